"""The `ffrecord` command, run as its users run it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ffrecord import FileReader
from tests.ffrecord.conftest import DATA


def ffrecord(*arguments: object) -> subprocess.CompletedProcess[bytes]:
    program = "import sys; from ffrecord.cli import main; sys.argv[0] = 'ffrecord'; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, check=False
    )


def figures(*arguments: object) -> dict[str, object]:
    done = ffrecord(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    loaded: dict[str, object] = json.loads(done.stdout)
    return loaded


def test_help_waits_for_nothing_but_click() -> None:
    program = (
        "import sys\nfrom ffrecord.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('numpy', 'torch', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(name in done.stdout for name in ("verify", "unpack", "Exit codes", "130"))


def test_info_ls_and_cat_show_what_is_there() -> None:
    basic = DATA / "basic.ffr"
    shown = figures("info", DATA / "multi.ffr")
    assert (shown["records"], shown["files"], shown["packed_folder"]) == (100, 4, False)
    assert figures("info", basic)["bytes_in_gaps"] == 0
    assert b"largest record" in ffrecord("info", basic).stdout
    lines = ffrecord("ls", basic, "--start", -2, "--json").stdout.splitlines()
    assert [json.loads(line)["length"] for line in lines] == [4097, 12]
    assert len(ffrecord("ls", DATA / "multi.ffr").stdout.splitlines()) == 100
    assert ffrecord("cat", basic, 0, 2, "--", -11).stdout == b"hello ffrecord\0hello ffrecord"


def test_verify_names_every_damaged_record(tmp_path: Path) -> None:
    assert figures("verify", DATA / "multi.ffr")["damaged"] == 0
    raw = bytearray((DATA / "basic.ffr").read_bytes())
    for at in (150, 14250):
        raw[at] ^= 1
    (tmp_path / "bad.ffr").write_bytes(raw)
    done = ffrecord("verify", tmp_path / "bad.ffr", "--json")
    assert done.returncode == 1
    assert [error["index"] for error in json.loads(done.stdout)["errors"]] == [0, 10]
    plain = ffrecord("verify", tmp_path / "bad.ffr")
    assert plain.returncode == 1
    assert plain.stderr.count(b"is damaged") == 2
    assert ffrecord("verify", "--headers", tmp_path / "bad.ffr").returncode == 0


def test_split_then_merge_gives_the_same_file(tmp_path: Path) -> None:
    shown = figures("split", tmp_path / "parts.ffr", DATA / "basic.ffr", "--files", 4)
    assert shown["files"] == 4
    figures("merge", tmp_path / "again.ffr", tmp_path / "parts.ffr")
    assert (tmp_path / "again.ffr").read_bytes() == (DATA / "basic.ffr").read_bytes()


def test_a_sample_is_repeated_by_its_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        figures("sample", tmp_path / f"{name}.ffr", DATA / "multi.ffr", "-n", 20, "--seed", seed)
    a, b, c = ((tmp_path / f"{name}.ffr").read_bytes() for name in "abc")
    assert a == b != c
    chosen = {record.tobytes() for record in FileReader(tmp_path / "a.ffr")}
    assert len(chosen) == 20
    assert chosen <= {record.tobytes() for record in FileReader(DATA / "multi.ffr")}


def test_a_folder_is_packed_listed_and_unpacked(tmp_path: Path) -> None:
    shutil.copytree(DATA / "multi.ffr", tmp_path / "in" / "sub")
    assert figures("pack", tmp_path / "in", tmp_path / "p.ffr")["files"] == 4
    assert figures("info", tmp_path / "p.ffr")["packed_folder"] is True
    names = ffrecord("ls", "--names", tmp_path / "p.ffr").stdout.decode().split()
    assert names == ["sub", *(f"sub/PART_0000{k}.ffr" for k in range(4))]
    one = ffrecord("cat", "--names", tmp_path / "p.ffr", "sub/PART_00002.ffr").stdout
    assert one == (DATA / "multi.ffr" / "PART_00002.ffr").read_bytes()
    assert figures("unpack", tmp_path / "p.ffr", tmp_path / "out")["files"] == 4
    assert (tmp_path / "out" / "sub" / "PART_00002.ffr").read_bytes() == one


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["info", "nothing.ffr"], 1, "no such file: nothing.ffr"),
        (["info", DATA / "manifest.json"], 1, "ends with .ffr"),
        (["verify", DATA / "damaged" / "header_crc_flipped.ffr"], 1, "damaged header"),
        (["cat", DATA / "basic.ffr", "11"], 1, "record 11 is out of range: there are 11"),
        (["cat", DATA / "basic.ffr", "x"], 2, "x is not the index of a record"),
        (["ls", "--names", DATA / "basic.ffr"], 1, "no packed folder"),
        (["merge", DATA / "basic.ffr", DATA / "single.ffr"], 2, "exists"),
        (["sample", "new.ffr", DATA / "basic.ffr", "-n", "12"], 2, "12 of 11 records"),
        (["split", "new.ffr", DATA / "basic.ffr"], 2, "--files"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_an_error_is_one_line_with_its_exit_code(
    arguments: list[object], code: int, words: str
) -> None:
    done = ffrecord(*arguments)
    assert done.returncode == code
    assert len(done.stderr.splitlines()) == 1
    assert words in done.stderr.decode()
    assert not Path("new.ffr").exists()


def test_debug_shows_where_an_error_comes_from() -> None:
    assert b"Traceback" in ffrecord("info", "nothing.ffr", "--debug").stderr
