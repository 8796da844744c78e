"""The number that outlives a task."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hfai import client


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import hfai\n{code}"],
        capture_output=True,
        text=True,
        env={"PATH": "", **environment},
    )
    return done.stdout.strip() or done.stderr.splitlines()[-1]


def test_the_next_run_finds_the_state_of_the_last(tmp_path: Path) -> None:
    file = {"HFAI_WHOLE_LIFE_STATE_FILE": str(tmp_path / "state")}
    assert python("print(hfai.get_whole_life_state())", **file) == "0"
    assert python("print(hfai.set_whole_life_state(-7))", **file) == "True"
    assert python("print(hfai.get_whole_life_state())", **file) == "-7"
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_state_of_the_scheduler_is_read_where_there_is_no_file(tmp_path: Path) -> None:
    given = {"MARSV2_WHOLE_LIFE_STATE": "12"}
    assert python("print(hfai.get_whole_life_state())", **given) == "12"
    given["HFAI_WHOLE_LIFE_STATE_FILE"] = str(tmp_path / "none yet")
    assert python("print(hfai.get_whole_life_state())", **given) == "12"


def test_what_is_no_number_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("soon")
    said = python("hfai.get_whole_life_state()", HFAI_WHOLE_LIFE_STATE_FILE=str(tmp_path / "state"))
    assert said == f"ValueError: the file {tmp_path}/state holds 'soon', and no whole number"


def test_a_file_that_cannot_be_written_is_an_error_only_where_that_is_asked(
    tmp_path: Path,
) -> None:
    file = {"HFAI_WHOLE_LIFE_STATE_FILE": str(tmp_path / "no" / "state")}
    assert python("hfai.set_whole_life_state(1)", **file).startswith("FileNotFoundError")
    assert python("print(hfai.set_whole_life_state(1, 5, False))", **file) == "False"


@pytest.mark.parametrize(
    ("state", "error", "said"),
    [
        (2**31, ValueError, "give a number of 32 bits"),
        (-(2**31) - 1, ValueError, "give a number of 32 bits"),
        (True, TypeError, "state is True: give a whole number"),
        ("1", TypeError, "state is '1': give a whole number"),
    ],
)
def test_a_state_that_is_no_number_of_32_bits_is_refused(
    state: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        client.set_whole_life_state(state)


@pytest.mark.parametrize(
    ("seconds", "error", "said"),
    [(0, ValueError, "give at least 1"), (2.5, TypeError, "give a whole number of seconds")],
)
def test_a_senseless_watchdog_time_is_refused(
    seconds: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        client.set_watchdog_time(seconds)
