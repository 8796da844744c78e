"""Being asked and leaving: real signals and files to real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hfai import client
from hfai.client.listener import Listener
from tests.client.scripts import end, output, running

ASKS = (signal.SIGTERM, signal.SIGUSR1)
# A training loop in short: a step, then the question.
LOOP = """
import sys, time
import hfai
before, after = {before!r}, {after!r}
exec(before)
hfai.receive_suspend_command()
print("ready", flush=True)
step = 0
while not hfai.receive_suspend_command():
    step += 1
    time.sleep(0.01)
exec(after)
hfai.go_suspend()
print("still here")
"""


def loop(before: str = "", after: str = "print('saved', flush=True)") -> str:
    return LOOP.format(before=before, after=after)


@pytest.mark.parametrize("number", ASKS)
def test_a_signal_is_a_request_and_the_exit_code_means_start_me_again(
    number: signal.Signals,
) -> None:
    with running(loop()) as process:
        process.send_signal(number)
        code, out, err = end(process)
    assert (code, out) == (75, "saved\n")
    assert f"suspended ({number.name}): exit code 75" in err


def test_a_second_signal_does_not_cut_the_saving_short() -> None:
    after = "print('saving', flush=True); time.sleep(0.3); print('saved', flush=True)"
    with running(loop(after=after)) as process:
        process.send_signal(signal.SIGTERM)
        assert output(process).readline() == "saving\n"
        for number in ASKS:
            process.send_signal(number)
        code, out, _ = end(process)
    assert (code, out) == (75, "saved\n")


def test_the_control_file_is_a_request_and_is_gone_afterwards(tmp_path: Path) -> None:
    file = tmp_path / "suspend"
    with running(loop(), HFAI_SUSPEND_FILE=str(file)) as process:
        file.touch()
        code, out, err = end(process)
    assert (code, out) == (75, "saved\n")
    assert f"suspended (the file {file})" in err
    assert not file.exists()


def test_the_control_file_is_taken_away_after_a_signal_too(tmp_path: Path) -> None:
    file = tmp_path / "suspend"
    with running(loop(after=f"open({str(file)!r}, 'w')"), HFAI_SUSPEND_FILE=str(file)) as process:
        process.send_signal(signal.SIGTERM)
        assert end(process)[0] == 75
    assert not file.exists()


def test_a_control_file_that_cannot_be_removed_is_said(tmp_path: Path) -> None:
    directory = tmp_path / "suspend"
    with running(loop(), HFAI_SUSPEND_FILE=str(directory)) as process:
        directory.mkdir()
        code, _, err = end(process)
    assert code == 75
    assert "remove it, or the next run suspends at once" in err


def test_a_signal_in_a_native_call_is_heard_at_the_next_boundary() -> None:
    # hashlib's loop holds the main thread for about a second and runs no bytecode.
    before = "import hashlib"
    long_call = "hashlib.pbkdf2_hmac('sha256', b'', b'', 3_000_000)"
    program = loop(before).replace(
        "time.sleep(0.01)", f"print('in'); sys.stdout.flush(); {long_call}"
    )
    with running(program) as process:
        assert output(process).readline() == "in\n"
        process.send_signal(signal.SIGTERM)
        code, out, _ = end(process)
    assert (code, out) == (75, "saved\n")


def test_a_request_before_the_loop_is_heard_once_listening() -> None:
    program = (
        "import hfai.client, time\n"
        "hfai.client.listen()\n"
        "print('ready', flush=True)\n"
        "time.sleep(0.5)\n"
        "print(hfai.client.receive_suspend_command())\n"
    )
    with running(program) as process:
        process.send_signal(signal.SIGUSR1)
        assert end(process)[:2] == (0, "True\n")


def test_handlers_that_were_there_are_called_and_put_back() -> None:
    program = """
import os, signal
import hfai.client
seen = []
def mine(number, frame): seen.append(number)
signal.signal(signal.SIGTERM, mine)
default = signal.getsignal(signal.SIGUSR1)
hfai.client.listen()
print("ready", flush=True)
for number in (signal.SIGTERM, signal.SIGUSR1):
    os.kill(os.getpid(), number)
print(seen == [signal.SIGTERM], hfai.client.receive_suspend_command())
hfai.client.stop_listening()
print(signal.getsignal(signal.SIGTERM) is mine, signal.getsignal(signal.SIGUSR1) == default)
print(hfai.client.receive_suspend_command(), signal.getsignal(signal.SIGTERM) is mine)
hfai.client.stop_listening()
os.kill(os.getpid(), signal.SIGTERM)
print(len(seen))
os.kill(os.getpid(), signal.SIGUSR1)
print("not reached")
"""
    with running(program) as process:
        code, out, _ = end(process)
    assert out.splitlines() == ["True True", "True True", "False False", "2"]
    assert code == -signal.SIGUSR1


def test_a_handler_that_is_set_over_ours_keeps_its_place_and_its_chain() -> None:
    program = """
import os, signal
import hfai.client
hfai.client.listen()
ours = signal.getsignal(signal.SIGTERM)
def theirs(number, frame): print("theirs", flush=True); ours(number, frame)
signal.signal(signal.SIGTERM, theirs)
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print(hfai.client.receive_suspend_command())
hfai.client.stop_listening()
print(signal.getsignal(signal.SIGTERM) is theirs, flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("not reached")
"""
    with running(program) as process:
        code, out, _ = end(process)
    assert out.splitlines() == ["theirs", "True", "True", "theirs"]
    assert code == -signal.SIGTERM


def test_listening_again_keeps_what_was_heard_and_every_handler_below() -> None:
    program = """
import os, signal, threading
import hfai.client
first = signal.getsignal(signal.SIGTERM)
hfai.client.listen()
ours = signal.getsignal(signal.SIGTERM)
def theirs(number, frame): print("theirs", flush=True); ours(number, frame)
signal.signal(signal.SIGTERM, theirs)
hfai.client.listen()
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
hfai.client.listen([signal.SIGUSR1])
print(signal.getsignal(signal.SIGTERM) is theirs, hfai.client.receive_suspend_command())
thread = threading.Thread(target=hfai.client.listen)
thread.start(); thread.join()
os.kill(os.getpid(), signal.SIGUSR1)
thread = threading.Thread(target=hfai.client.stop_listening)
thread.start(); thread.join()
hfai.client.listen()
print(hfai.client.receive_suspend_command(), flush=True)
os.kill(os.getpid(), signal.SIGUSR1)
print(hfai.client.receive_suspend_command(), flush=True)
hfai.client.stop_listening()
print(signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL, flush=True)
"""
    with running(program) as process:
        code, out, _ = end(process)
    assert out.splitlines() == ["theirs", "True True", "False", "True", "True"]
    assert code == 0


def test_an_exception_of_the_earlier_handler_goes_its_way_and_the_request_stays() -> None:
    program = """
import os, signal
import hfai.client
class Stop(Exception): pass
def raising(number, frame): raise Stop
signal.signal(signal.SIGTERM, raising)
hfai.client.listen()
print("ready", flush=True)
try: os.kill(os.getpid(), signal.SIGTERM)
except Stop: print("raised")
print(hfai.client.receive_suspend_command())
"""
    with running(program) as process:
        assert end(process)[:2] == (0, "raised\nTrue\n")


def test_a_signal_that_was_ignored_is_heard() -> None:
    before = "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)"
    with running(loop(before)) as process:
        process.send_signal(signal.SIGUSR1)
        assert end(process)[0] == 75


def test_off_cluster_every_call_is_harmless() -> None:
    program = """
import signal, threading
import hfai, hfai.client
before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)]
print("ready", flush=True)
print(hfai.go_suspend(), hfai.client.go_suspend(timeout=3, raise_exception=True))
print(before == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)])
print(hfai.receive_suspend_command(), hfai.receive_suspend_command(5, raise_exception=True))
print(hfai.go_suspend(), hfai.set_watchdog_time(60), hfai.set_whole_life_state(3))
print(hfai.get_whole_life_state(), threading.active_count())
"""
    with running(program) as process:
        code, out, err = end(process)
    assert (code, err) == (0, "")
    lines = ["None None", "True", "False False", "None False False", "3 1"]
    assert out.splitlines() == lines


def test_importing_sets_no_handler_and_needs_no_torch() -> None:
    program = """
import os, signal, sys
numbers = [n for n in signal.valid_signals() if n not in (signal.SIGKILL, signal.SIGSTOP)]
before = [signal.getsignal(n) for n in numbers]
import hfai.client
hfai.receive_suspend_command
print("ready", flush=True)
print(before == [signal.getsignal(n) for n in numbers], "torch" in sys.modules)
hfai.receive_suspend_command()
print("torch" in sys.modules)
"""
    with running(program) as process:
        assert end(process)[:2] == (0, "True False\nFalse\n")


def test_a_thread_that_trains_hears_what_the_main_thread_listens_for_and_ends_the_process() -> None:
    program = """
import atexit, threading, time
import hfai.client
hfai.client.listen()
def train():
    print("ready", flush=True)
    while not hfai.client.receive_suspend_command(): time.sleep(0.01)
    print("saved")
    hfai.client.go_suspend()
thread = threading.Thread(target=train)
thread.start()
thread.join()
print("not reached")
"""
    with running(program) as process:
        process.send_signal(signal.SIGTERM)
        assert end(process)[:2] == (75, "saved\n")


def test_a_first_call_from_another_thread_says_that_it_hears_no_signal(tmp_path: Path) -> None:
    program = """
import threading, time
import hfai.client
def train():
    hfai.client.receive_suspend_command()
    print("ready", flush=True)
    while not hfai.client.receive_suspend_command(): time.sleep(0.01)
    print("heard", flush=True)
thread = threading.Thread(target=train, name="trainer")
thread.start()
thread.join()
"""
    file = tmp_path / "suspend"
    with running(program, HFAI_SUSPEND_FILE=str(file)) as process:
        file.touch()
        code, out, err = end(process)
    assert (code, out) == (0, "heard\n")
    assert err.count("the first call came from the thread 'trainer'") == 1
    assert "call hfai.client.listen() there" in err


def test_the_main_thread_hears_signals_from_its_first_call_on() -> None:
    program = """
import os, signal, threading
import hfai.client
thread = threading.Thread(target=hfai.client.receive_suspend_command)
thread.start()
thread.join()
hfai.client.receive_suspend_command()
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print(hfai.client.receive_suspend_command())
"""
    with running(program) as process:
        assert end(process)[:2] == (0, "True\n")


def test_a_relative_control_file_stays_where_it_was(tmp_path: Path) -> None:
    program = """
import os, pathlib, sys
os.chdir(sys.path[0] or ".")
import hfai.client
hfai.client.listen(file="suspend")
os.chdir("/")
print("ready", flush=True)
sys.stdin.readline()
print(hfai.client.receive_suspend_command())
hfai.client.go_suspend()
"""
    (tmp_path / "suspend").touch()
    done = subprocess.run(
        [sys.executable, "-c", program], input="\n", capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (75, "ready\nTrue\n")
    assert not (tmp_path / "suspend").exists()


@pytest.mark.parametrize(
    ("signals", "error", "said"),
    [
        ([signal.SIGKILL], ValueError, "SIGKILL cannot be handled by any process"),
        ([9999], ValueError, "9999 is no signal"),
        (signal.SIGTERM, TypeError, "give several"),
        ("SIGTERM", TypeError, "give several"),
    ],
)
def test_what_is_no_signal_is_refused_in_words(
    signals: Any, error: type[Exception], said: str
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(error, match=said):
        client.listen(signals)
    assert signal.getsignal(signal.SIGTERM) == before


def test_clean_up_of_the_script_runs_on_leaving() -> None:
    before = "import atexit; atexit.register(print, 'cleaned up')"
    with running(loop(before)) as process:
        process.send_signal(signal.SIGTERM)
        assert end(process)[:2] == (75, "saved\ncleaned up\n")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("timeout=0", "ValueError: timeout is 0: give a positive number of seconds"),
        ("timeout='5'", "TypeError: timeout is '5': give a number of seconds"),
        ("timeout=float('nan')", "ValueError: timeout is nan: give a positive number"),
    ],
)
def test_a_senseless_timeout_is_refused_in_words(arguments: str, error: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import hfai; hfai.receive_suspend_command({arguments})"],
        capture_output=True,
        text=True,
    )
    assert error in done.stderr


def test_a_call_costs_next_to_nothing() -> None:
    program = """
import time
import hfai
hfai.receive_suspend_command()
print("ready", flush=True)
rounds = []
for _ in range(5):
    start = time.perf_counter()
    for _ in range(1000): hfai.receive_suspend_command()
    rounds.append((time.perf_counter() - start) / 1000)
print(min(rounds))
"""
    with running(program, HFAI_SUSPEND_FILE="/nowhere/at/all") as process:
        code, out, _ = end(process)
    assert code == 0
    assert float(out) < 50e-6  # some 2 µs where the machine is not busy


def test_a_child_that_is_forked_ends_when_its_parent_ends_it() -> None:
    program = """
import multiprocessing, os, signal, time
import hfai.client
hfai.client.listen()
print("ready", flush=True)
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
child.start()
os.kill(child.pid, signal.SIGUSR1)      # a request to the whole job is none to a child
time.sleep(0.2)
print(child.is_alive())
child.terminate()
child.join(10)
codes = set()
for _ in range(50):                     # while it is made, too
    pid = os.fork()
    if pid == 0:
        time.sleep(10)
        os._exit(1)
    os.kill(pid, signal.SIGTERM)
    codes.add(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(child.exitcode, codes, hfai.client.receive_suspend_command())
"""
    with running(program) as process:
        assert end(process)[:2] == (0, f"True\n{-signal.SIGTERM} {{{-signal.SIGTERM}}} False\n")


def test_a_program_that_a_child_starts_has_the_default_handlers() -> None:
    program = """
import os, signal, subprocess, sys
import hfai.client
hfai.client.listen()
print("ready", flush=True)
sys.stdout.flush()
if os.fork() == 0:
    code = "import signal; print(signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL)"
    os.execv(sys.executable, [sys.executable, "-c", code])
os.wait()
"""
    with running(program) as process:
        assert end(process)[:2] == (0, "True\n")


def test_a_child_of_a_process_that_listens_may_listen_itself() -> None:
    program = """
import os, signal, sys, time
import hfai.client
hfai.client.listen()
print("ready", flush=True)
pid = os.fork()
if pid == 0:
    hfai.client.listen()
    os.kill(os.getpid(), signal.SIGUSR1)
    os._exit(3 if hfai.client.receive_suspend_command() else 4)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), hfai.client.receive_suspend_command())
"""
    with running(program) as process:
        assert end(process)[:2] == (0, "3 False\n")


def test_many_signals_at_once_are_one_request() -> None:
    with running(loop()) as process:
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            for number in ASKS:
                os.kill(process.pid, number)
        assert end(process)[0] == 75


class Late(tuple[signal.Signals, ...]):
    """Signals, one of which comes when the first one's handler is about to be set."""

    def __iter__(self) -> Iterator[signal.Signals]:
        signal.raise_signal(self[0])
        return super().__iter__()


def test_a_signal_between_two_listeners_is_heard_by_the_second() -> None:
    first, second = (Listener([signal.SIGUSR1], None) for _ in range(2))
    first.start()
    second.signals = Late(second.signals)
    try:
        second.start()
        first.stop()
        assert second.listen() == "SIGUSR1"
    finally:
        second.stop()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
