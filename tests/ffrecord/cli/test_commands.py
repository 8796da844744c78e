"""The `ffrecord` command, run as its users run it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ffrecord import FileReader, FileWriter
from ffrecord.convert.records import keys_of
from tests.ffrecord.cli.run import PROGRAM, ffrecord, figures
from tests.ffrecord.conftest import DATA


def test_help_waits_for_nothing_but_click() -> None:
    program = (
        "import sys\nfrom ffrecord.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('numpy', 'torch', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"
    looking = ("info", "ls", "cat", "verify", "bench", "doctor")
    making = ("sample", "pack", "unpack", "convert", "merge", "split")
    assert all(name in done.stdout for name in (*looking, *making, "Exit codes", "130"))


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


def test_parts_of_a_split_have_equal_numbers_of_records(tmp_path: Path) -> None:
    for files, sizes in ((3, [34, 34, 32]), (100, [1] * 100), (1, [100])):
        out = tmp_path / f"{files}.ffr"
        figures("split", out, DATA / "multi.ffr", "--files", files)
        with FileReader(out) as reader, FileReader(DATA / "multi.ffr") as whole:
            counts = [len(reader.get_checksums(number)) for number in range(len(reader.fnames))]
            assert counts == sizes
            assert [r.tobytes() for r in reader] == [r.tobytes() for r in whole]
    assert figures("split", tmp_path / "e.ffr", DATA / "empty.ffr", "--files", 3)["files"] == 1
    assert FileReader(tmp_path / "e.ffr").n == 0


def test_keys_and_common_metadata_go_with_their_records(tmp_path: Path) -> None:
    for name in "ab":
        with FileWriter(tmp_path / f"{name}.ffr", metadata={"set": 1}) as writer:
            for number in range(3):
                writer.write_one(f"{name}{number}".encode(), key=f"{name}/{number}")
    both = (tmp_path / "a.ffr", tmp_path / "b.ffr")
    figures("merge", tmp_path / "m.ffr", *both)
    figures("split", tmp_path / "s.ffr", *both, "--files", 4)
    figures("sample", tmp_path / "c.ffr", *both, "-n", 4)
    for path, count in ((tmp_path / "m.ffr", 6), (tmp_path / "s.ffr", 6), (tmp_path / "c.ffr", 4)):
        with FileReader(path) as reader:
            found = {
                key: reader.read_one(index).tobytes() for index, key in keys_of(reader).items()
            }
            assert len(found) == count
            assert all(data == key.replace("/", "").encode() for key, data in found.items())
            assert reader.get_metadata(0) == {"set": 1}


def test_different_metadata_are_left_out_and_that_is_said(tmp_path: Path) -> None:
    for name in "ab":
        FileWriter(tmp_path / f"{name}.ffr", 0, metadata={"set": name}).close()
    done = ffrecord("merge", tmp_path / "m.ffr", tmp_path / "a.ffr", tmp_path / "b.ffr")
    assert done.returncode == 0
    assert b"different metadata, which are left out" in done.stderr
    assert FileReader(tmp_path / "m.ffr").get_metadata(0) is None


@pytest.mark.parametrize("command", ["merge", "split", "sample"])
def test_a_packed_folder_is_not_taken_apart(command: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x").write_text("x")
    figures("pack", tmp_path / "in", tmp_path / "p.ffr")
    more = {"merge": [], "split": ["--files", 2], "sample": ["-n", 1]}[command]
    done = ffrecord(command, tmp_path / "o.ffr", tmp_path / "p.ffr", *more)
    assert done.returncode == 2
    assert b"is a packed folder" in done.stderr
    assert not (tmp_path / "o.ffr").exists()


def test_convert_says_what_it_wrote(tmp_path: Path) -> None:
    shown = figures("convert", DATA / "multi.ffr", tmp_path / "a.tar")
    assert (shown["records"], shown["files"]) == (100, 1)
    shown = figures("convert", tmp_path / "a.tar", tmp_path / "p.ffr", "--part-size", 1)
    assert (shown["records"], shown["files"]) == (100, 1)
    assert (tmp_path / "p.ffr" / "PART_00000.ffr").exists()
    done = ffrecord("convert", tmp_path / "p.ffr", tmp_path / "b.tar", "--no-keys")
    assert b"records  100" in done.stdout


def test_bench_measures_every_engine_cold_and_hot(tmp_path: Path) -> None:
    with FileWriter(tmp_path / "a.ffr", 400) as writer:
        writer.write(bytes([number % 256]) * 5000 for number in range(400))
    options = ("--rounds", 2, "--seconds", 0.02, "--batch", 32)
    shown = figures("bench", tmp_path / "a.ffr", *options)
    rows = shown["rows"]
    assert isinstance(rows, list)
    ways = {row["way"] for row in rows}
    assert {"python", "pread loop"} <= ways
    assert len(rows) == 2 * len(ways)
    for row in rows:
        assert row["records_per_second"] > 0
        assert row["bytes_per_second"] == pytest.approx(5000 * row["records_per_second"], rel=1)
        low, high = row["ratio_range"]
        assert low <= row["ratio"] <= high
        assert (row["ratio"] == 1) or row["way"] != "pread loop"
    plain = ffrecord("bench", tmp_path / "a.ffr", *options, "--engine", "python").stdout.decode()
    assert "python, cold" in plain
    assert "threads" not in plain


def test_doctor_names_engines_and_libraries() -> None:
    shown = figures("doctor")
    engines, libraries = shown["engines"], shown["libraries"]
    assert isinstance(engines, dict)
    assert engines["python"] == "works"
    assert all(state == "works" or len(state) > 10 for state in engines.values())
    assert isinstance(libraries, dict)
    assert "convert: LMDB" in libraries["lmdb"]
    text = ffrecord("doctor").stdout.decode()
    assert all(name in text for name in (*engines, *libraries, str(shown["small_sets"])))


def test_doctor_says_why_an_engine_does_not_work() -> None:
    program = (
        "import sys; sys.modules['ffrecord._native'] = None\n"
        "from ffrecord.cli import main; main(['doctor', '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    engines = json.loads(done.stdout)["engines"]
    assert engines["python"] == "works"
    assert "native part is not there" in engines["io_uring"]


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
        (["convert", DATA / "basic.ffr", "new"], 2, "the name tells no format"),
        (["convert", "nothing.ffr", "new.tar"], 1, "no such file or directory: nothing.ffr"),
        (["convert", DATA / "basic.ffr", "new.tar", "--field", "x"], 2, "field is for"),
        (["convert", DATA / "basic.ffr", DATA / "single.ffr"], 2, "exists"),
        (["bench", DATA / "basic.ffr", "--engine", "fast"], 2, "engine 'fast': give one of"),
        (["bench", DATA / "empty.ffr"], 1, "no records to read"),
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
    assert not any(Path(name).exists() for name in ("new.ffr", "new", "new.tar"))


def test_debug_shows_where_an_error_comes_from() -> None:
    assert b"Traceback" in ffrecord("info", "nothing.ffr", "--debug").stderr


def test_ctrl_c_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    with FileWriter(tmp_path / "a.ffr", 300_000) as writer:
        writer.write(b"x" for _ in range(300_000))
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "convert", tmp_path / "a.ffr", tmp_path / "a.tar"],
        stderr=subprocess.PIPE,
        # The tests may run in the background of a shell, which then ignores Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while not any(path.name.startswith(".a.tar") for path in tmp_path.iterdir()):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.splitlines()[-1] == b"ffrecord: stopped"
    assert [path.name for path in tmp_path.iterdir()] == ["a.ffr"]
