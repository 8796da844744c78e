"""Every format: there and back, empty sets, what is refused, and nothing half-written."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ffrecord import FileReader, FileWriter
from ffrecord.convert import Options, convert
from ffrecord.convert.formats import FORMATS, detect_source, detect_target
from tests.ffrecord.convert.conftest import Rows, rows_of, write_rows

# format -> (a target's name, the library it needs, whether it keeps keys)
OTHERS = {
    "folder": ("out", None, True),
    "webdataset": ("out.tar", None, True),
    "tfrecord": ("out.tfrecord", "google_crc32c", False),
    "lmdb": ("out.lmdb", "lmdb", True),
    "array_record": ("out.array_record", "array_record", False),
    "huggingface": ("out", "datasets", False),
}


def needed(name: str) -> str:
    """Return a target's name; skip where the library is missing."""
    target, library, _ = OTHERS[name]
    if library:
        pytest.importorskip(library)
    return target


@pytest.mark.parametrize("name", OTHERS)
def test_records_come_back_as_they_were(name: str, source: Path, keyed: Rows) -> None:
    target = source.parent / needed(name)
    counts = convert([source], target, target_format=name)
    assert counts.records == len(keyed)
    assert detect_source(target) == name
    seen: list[int] = []
    totals: list[int | None] = []
    options = Options(column="record") if name == "huggingface" else Options()
    back = source.parent / "back.ffr"
    convert([target], back, options=options, progress=seen.append, total=totals.append)
    assert sum(seen) == len(keyed)
    assert totals == [None if name in ("webdataset", "tfrecord") else len(keyed)]
    found = rows_of(back)
    if name == "folder":  # a packed folder: the last record is its index
        found = found[:-1]
    assert [data for _, data in found] == [data for _, data in keyed]
    if OTHERS[name][2] and name != "folder":
        assert found == keyed


@pytest.mark.parametrize("name", OTHERS)
def test_records_without_keys_keep_their_order(name: str, plain: Path, keyed: Rows) -> None:
    target = plain.parent / needed(name)
    convert([plain], target, target_format=name)
    options = Options(keys=False, column="record" if name == "huggingface" else None)
    convert([target], plain.parent / "back.ffr", options=options)
    found = [data for _, data in rows_of(plain.parent / "back.ffr")][: len(keyed)]
    assert found == [data for _, data in keyed]


@pytest.mark.parametrize("name", OTHERS)
def test_no_records_are_a_set_too(name: str, tmp_path: Path) -> None:
    target = tmp_path / needed(name)
    FileWriter(tmp_path / "none.ffr", 0).close()
    assert convert([tmp_path / "none.ffr"], target, target_format=name).records == 0
    convert([target], tmp_path / "back.ffr")
    assert FileReader(tmp_path / "back.ffr").n == (1 if name == "folder" else 0)


@pytest.mark.parametrize("name", OTHERS)
def test_a_damaged_source_leaves_no_target(name: str, source: Path) -> None:
    target = source.parent / needed(name)
    raw = bytearray(source.read_bytes())
    raw[-1] ^= 1
    source.write_bytes(raw)
    with pytest.raises(RuntimeError, match="record 5 is damaged"):
        convert([source], target, target_format=name)
    assert [path.name for path in source.parent.iterdir()] == ["source.ffr"]


@pytest.mark.parametrize("name", [name for name in OTHERS if name != "folder"])
def test_what_is_no_file_of_a_format_is_refused_in_words(name: str, tmp_path: Path) -> None:
    needed(name)
    wrong = tmp_path / "wrong"
    wrong.write_bytes(b"\x07" * 5000)
    with pytest.raises((ValueError, OSError), match="wrong"):
        convert([wrong], tmp_path / "new.ffr", source_format=name)
    assert [path.name for path in tmp_path.iterdir()] == ["wrong"]


@pytest.mark.parametrize("name", [name for name, (_, library, _) in OTHERS.items() if library])
def test_a_missing_library_is_named_with_its_pip_line(
    name: str, source: Path, tmp_path: Path
) -> None:
    target, library, _ = OTHERS[name]
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    (shadow / f"{library}.py").write_text("raise ImportError('not there')\n")
    code = "import sys; from ffrecord.cli import main; main(sys.argv[1:])"
    path = os.pathsep.join(filter(None, [str(shadow), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", code, "convert", str(source), str(tmp_path / target), "--to", name],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "pip install" in line
    assert library is not None
    assert library.split("_")[0] in line


def test_no_format_is_imported_before_it_is_used() -> None:
    code = (
        "import sys, ffrecord.convert.run\n"
        "print([m for m in ('lmdb', 'datasets', 'pyarrow', 'array_record', 'google_crc32c', "
        "'torch', 'tarfile') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_reads_and_writes(name: str) -> None:
    module = importlib.import_module(FORMATS[name])
    assert callable(module.open_source)
    assert callable(module.write)


def test_many_sources_become_one_target_in_their_order(tmp_path: Path) -> None:
    for number in range(3):
        write_rows(tmp_path / f"{number}.ffr", [(f"{number}.txt", b"%d" % number)])
        convert([tmp_path / f"{number}.ffr"], tmp_path / f"{number}.tar")
    convert([tmp_path / f"{number}.tar" for number in (2, 0, 1)], tmp_path / "all.ffr")
    assert rows_of(tmp_path / "all.ffr") == [("2.txt", b"2"), ("0.txt", b"0"), ("1.txt", b"1")]


def test_parts_have_about_the_size_asked_for(source: Path, keyed: Rows) -> None:
    counts = convert([source], source.parent / "parts.ffr", options=Options(part_bytes=4000))
    assert counts == (6, 3)
    assert rows_of(source.parent / "parts.ffr") == keyed
    names = sorted(path.name for path in (source.parent / "parts.ffr").iterdir())
    assert names == ["PART_00000.ffr", "PART_00001.ffr", "PART_00002.ffr"]


def test_metadata_and_schema_go_along(tmp_path: Path) -> None:
    with FileWriter(tmp_path / "a.ffr", 0, metadata={"a": 1}, schema={"b": 2}):
        pass
    convert([tmp_path / "a.ffr"], tmp_path / "b.ffr")
    reader = FileReader(tmp_path / "b.ffr")
    assert (reader.get_metadata(0), reader.get_schema(0)) == ({"a": 1}, {"b": 2})


REFUSED = {
    "nothing": ([], "b.ffr", {}, "no source"),
    "both foreign": (["a.tar"], "b.tar", {}, "one side must be ffrecord"),
    "no suffix": (["a.ffr"], "b", {}, "the name tells no format"),
    "two formats": (["a.ffr", "a.tar"], "b.ffr", {}, "several formats: ffrecord, webdataset"),
    "unknown": (["a.ffr"], "b", {"target_format": "zip"}, "no format 'zip'"),
    "url": (["a.ffr"], "s3://bucket/b.tar", {}, "conversions are of local files"),
    "field": (["a.ffr"], "b.tar", {"options": Options(field="jpg")}, "field is for"),
    "column": (["a.tar"], "b.ffr", {"options": Options(column="x")}, "column is for"),
    "parts": (["a.ffr"], "b.tar", {"options": Options(part_bytes=1)}, "parts are for"),
}


@pytest.mark.parametrize(("sources", "target", "more", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_before_anything_is_written(
    sources: list[str], target: str, more: dict[str, object], words: str, tmp_path: Path
) -> None:
    write_rows(tmp_path / "a.ffr", [("a", b"a")])
    convert([tmp_path / "a.ffr"], tmp_path / "a.tar")
    out = target if "://" in target else tmp_path / target
    with pytest.raises(ValueError, match=words):
        convert([tmp_path / name for name in sources], out, **more)  # type: ignore[arg-type]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ffr", "a.tar"]


def test_a_target_that_exists_is_left_alone(source: Path) -> None:
    target = source.parent / "b.tar"
    target.write_text("mine")
    with pytest.raises(FileExistsError, match="exists"):
        convert([source], target)
    assert target.read_text() == "mine"
    with pytest.raises(FileNotFoundError, match=r"nothing\.ffr"):
        convert([source.parent / "nothing.ffr"], source.parent / "c.tar")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("a.tar.gz", "webdataset"), ("a.tfrecords", "tfrecord"), ("a.b.ffr", "ffrecord")],
)
def test_a_targets_suffix_tells_its_format(name: str, expected: str) -> None:
    assert detect_target(Path(name)) == expected


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    """A real Ctrl-C while a pipe of endless records is read."""
    code = (
        "import sys, signal; from pathlib import Path\n"
        "from ffrecord.convert import Entry, Source, Options\n"
        "from ffrecord.convert.webdataset import write\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def endless():\n"
        "    print('ready', flush=True)\n"
        "    while True: yield Entry(b'x' * 100_000)\n"
        "write(Path(sys.argv[1]), Source(endless()), Options())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "a.tar")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) != 0
    assert list(tmp_path.iterdir()) == []


def test_a_directory_of_record_files_and_others_is_asked_about(source: Path) -> None:
    mixed = source.parent / "mixed"
    mixed.mkdir()
    source.rename(mixed / "a.ffr")
    (mixed / ".hidden").touch()
    assert detect_source(mixed) == "ffrecord"
    (mixed / "readme.txt").write_text("x")
    with pytest.raises(ValueError, match=r"record files and others \(readme\.txt\): say which"):
        convert([mixed], source.parent / "b.tar")
    counts = convert([mixed], source.parent / "b.ffr", source_format="folder")
    assert counts.records == 3
