"""Loader workers outlive a signal to the whole job, and end when the loader ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

pytest.importorskip("hfai.client._worker_signals", reason="the native part is not built")

from tests.client.scripts import end, output, running

# Batches of process ids; the loop is slow enough for a signal to come in between.
LOADING = """
import os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset
import hfai.client

class Pids(Dataset):
    def __len__(self): return 10**9
    def __getitem__(self, index): return os.getpid()

if __name__ == "__main__":
    seen = set()
    hfai.client.listen()
    loader = DataLoader(Pids(), batch_size=2, num_workers={workers}, {options})
    for step, batch in enumerate(loader):
        seen.update(batch.tolist())
        if step == 3: print("ready", flush=True)
        if step > 3 and hfai.client.receive_suspend_command(): break
        time.sleep(0.01)
    more = iter(loader)              # workers that a signal may catch starting, and busy at the end
    print(*sorted(seen), flush=True)
    hfai.client.go_suspend()
"""


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (2, "multiprocessing_context='fork', worker_init_fn=torch.manual_seed"),
        (1, "multiprocessing_context='spawn', worker_init_fn=hfai.client.ignore_in_worker"),
    ],
    ids=["forked", "spawned"],
)
def test_a_signal_to_the_whole_job_leaves_its_workers_working(
    workers: int, options: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOADING.format(workers=workers, options=options))
    program = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    with running(program) as process:
        os.killpg(process.pid, signal.SIGTERM)
        if "fork" in options:  # again, while new workers start
            time.sleep(0.1)
            os.killpg(process.pid, signal.SIGUSR1)
            os.killpg(process.pid, signal.SIGTERM)
        start = time.monotonic()
        code, out, err = end(process)
        assert code == 75, err
        assert time.monotonic() - start < 20
        pids = [int(pid) for pid in out.split()]
        assert len(pids) == workers
        for pid in pids:
            assert not Path(f"/proc/{pid}").exists()


def test_the_handler_ends_a_process_for_its_parent_alone_and_is_not_handed_down() -> None:
    program = """
import os, signal, subprocess, sys, time
from hfai.client import ignore_in_worker
print("ready", flush=True)
pid = os.fork()
if pid == 0:
    ignore_in_worker()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getppid(), signal.SIGCONT)
    code = "import signal; print([signal.getsignal(n) == 0 for n in (15, 10)], flush=True)"
    subprocess.run([sys.executable, "-c", code])
    print("worker", flush=True)
    time.sleep(60)
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
    with running(program) as process:
        lines = [output(process).readline() for _ in range(2)]
        assert lines == ["[True, True]\n", "worker\n"]
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        (worker,) = map(int, children.split())
        subprocess.run(["kill", "-TERM", str(worker)], check=True)
        time.sleep(0.1)
        assert Path(f"/proc/{worker}").exists()
        os.kill(worker, signal.SIGKILL)
        assert end(process)[:2] == (0, f"{-signal.SIGKILL}\n")


def test_a_worker_that_asks_is_never_told() -> None:
    program = """
import os, signal, torch
from torch.utils.data import DataLoader, Dataset
import hfai.client

class Asking(Dataset):
    def __len__(self): return 4
    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGUSR1)
        hfai.client.listen()
        return hfai.client.receive_suspend_command()

hfai.client.listen()
print("ready", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print([batch.tolist() for batch in DataLoader(Asking(), batch_size=2, num_workers=1)])
print(hfai.client.receive_suspend_command())
"""
    with running(program) as process:
        assert end(process)[1] == "[[False, False], [False, False]]\nTrue\n"
