"""What `FileReader` promises, the faults of the original's reader among them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import platform
import random
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ffrecord import DamagedFileError, FileReader, RecordError
from ffrecord.descriptors import OPEN_FILES, SourceFile
from ffrecord.engines import NAMES, probe
from tests.ffrecord.independent import file_of


@pytest.fixture(scope="module", params=["memory", "demand"])
def tables(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory, records: list[bytes]) -> Path:
    """A directory of five files, one of them empty, one with a gap before its first record."""
    directory = tmp_path_factory.mktemp("set") / "set.ffr"
    directory.mkdir()
    for number, (first, last, gap) in enumerate(
        [(0, 1, 0), (1, 90, 4000), (90, 90, 0), (90, 299, 0), (299, 300, 0)]
    ):
        (directory / f"PART_{number:05d}.ffr").write_bytes(file_of(records[first:last], gap))
    return directory


@settings(max_examples=60, deadline=None)
@given(indices=st.lists(st.integers(-300, 299), max_size=60))
def test_a_batch_keeps_order_and_duplicates(
    indices: list[int], parts: Path, records: list[bytes], tables: Any
) -> None:
    batch = FileReader(parts, tables=tables).read(indices)
    assert [record.tobytes() for record in batch] == [records[index] for index in indices]


@pytest.mark.parametrize("as_array", [np.int64, np.int32, np.uint16])
def test_arrays_ranges_and_slices_are_indices(
    as_array: Any, parts: Path, records: list[bytes], tables: Any
) -> None:
    reader = FileReader(parts, tables=tables)
    order = [5, 290, 5, 0]
    assert [r.tobytes() for r in reader.read(np.array(order, as_array))] == [
        records[i] for i in order
    ]
    assert [r.tobytes() for r in reader.read(range(10, 0, -3))] == records[10:0:-3]
    assert [r.tobytes() for r in reader[250:-3:7]] == records[250:-3:7]
    assert [r.tobytes() for r in reader[::-1]] == records[::-1]
    assert reader.read([]) == reader.read(slice(5, 5)) == []
    assert reader[-1].tobytes() == records[-1]
    assert [record.tobytes() for record in reader] == records


@pytest.mark.parametrize("index", [300, -301, 2**40, -(2**62)])
def test_an_index_out_of_range_is_an_index_error(index: int, parts: Path) -> None:
    reader = FileReader(parts)
    for read in (
        lambda: reader.read_one(index),
        lambda: reader.read([0, index]),
        lambda: reader[index],
    ):
        with pytest.raises(IndexError, match=f"{index} is out of range: there are 300"):
            read()


@pytest.mark.parametrize("indices", [[1.0], ["a"], [True, False], 3, [[1, 2]], [None]])
def test_what_is_no_list_of_integers_is_a_type_error(indices: Any, parts: Path) -> None:
    with pytest.raises(TypeError):
        FileReader(parts).read(indices)


def test_arrays_are_writable_bytes_that_share_no_byte(parts: Path, records: list[bytes]) -> None:
    reader = FileReader(parts)
    first, second, alone = *reader.read([7, 7]), reader.read_one(7)
    for record in (first, second, alone):
        assert record.dtype == np.uint8
        assert record.ndim == 1
        assert record.flags.writeable
        assert record.flags.aligned
    first[:] = 0
    assert second.tobytes() == alone.tobytes() == records[7]
    assert not any(r.flags.writeable for r in reader.read([7, 8], writable=False))


def test_a_batch_may_be_read_into_the_caller_s_memory(parts: Path, records: list[bytes]) -> None:
    reader = FileReader(parts)
    order = [9, 200, 9, 1]
    arena = np.zeros(reader.nbytes(order) + 100, np.uint8)
    batch = reader.read(order, out=arena)
    assert [record.tobytes() for record in batch] == [records[i] for i in order]
    assert all(np.shares_memory(record, arena) for record in batch if len(record))
    with pytest.raises(ValueError, match="needs"):
        reader.read(order, out=bytearray(reader.nbytes(order) - 1))
    with pytest.raises(ValueError, match="writable"):
        reader.read(order, out=bytes(1 << 20))


@pytest.mark.parametrize("check_data", [True, False])
def test_a_flipped_bit_is_found_unless_checks_are_off(tmp_path: Path, check_data: bool) -> None:
    raw = bytearray(file_of([b"a" * 100, b"b" * 100, b"c" * 100]))
    raw[12 + 36 + 150] ^= 4
    (tmp_path / "a.ffr").write_bytes(raw)
    reader = FileReader(tmp_path / "a.ffr", check_data)
    if check_data:
        for read in (lambda: reader.read([0, 1, 2]), lambda: reader.read_one(1)):
            with pytest.raises(RecordError, match=r"record 1 is damaged: .*a\.ffr, byte 148"):
                read()
    else:
        assert reader.read([1])[0].tobytes() != b"b" * 100
    assert [error.index for error in reader.damaged()] == [1]


def test_an_error_of_a_record_survives_pickling(tmp_path: Path) -> None:
    (tmp_path / "a.ffr").write_bytes(file_of([b"abc"])[:-1])
    with pytest.raises(RecordError) as caught:
        FileReader(tmp_path / "a.ffr").read_one(0)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), vars(copy)) == (str(caught.value), vars(caught.value))


def test_a_file_that_shrinks_while_open_is_an_error_in_words(tmp_path: Path, tables: Any) -> None:
    path = tmp_path / "a.ffr"
    path.write_bytes(file_of([b"a" * 5000, b"b" * 5000]))
    reader = FileReader(path, tables=tables)
    reader.read([0, 1])
    os.truncate(path, 6000)
    for read in (lambda: reader.read([0, 1]), lambda: reader.read_one(1)):
        with pytest.raises(DamagedFileError, match=r"cut short.*6000"):
            read()


def test_a_file_replaced_under_a_reader_is_not_mixed_with_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.ffr"
    path.write_bytes(file_of([b"old"]))
    reader = FileReader(path)
    OPEN_FILES.forget(reader._set.parts[0].file)  # type: ignore[union-attr]
    path.unlink()
    path.write_bytes(file_of([b"newer"]))
    with pytest.raises(DamagedFileError, match="make a new reader"):
        reader.read_one(0)
    assert FileReader(path).read_one(0).tobytes() == b"newer"


def test_a_thousand_files_need_few_descriptors(tmp_path: Path) -> None:
    for number in range(1000):
        (tmp_path / f"{number:05d}.ffr").write_bytes(file_of([b"%d" % number]))
    before = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 200, hard))
    try:
        reader = FileReader(tmp_path)
        order = list(range(1000))
        random.Random(1).shuffle(order)
        assert [int(bytes(record)) for record in reader.read(order)] == order
        assert len(OPEN_FILES) <= OPEN_FILES.limit
        reader.close()
        assert len(os.listdir("/proc/self/fd")) <= before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thousand_readers_work_at_once(parts: Path, records: list[bytes]) -> None:
    readers = [FileReader(parts) for _ in range(1000)]
    for reader in readers:
        assert [r.tobytes() for r in reader.read([0, 150, 299])] == [
            records[i] for i in (0, 150, 299)
        ]


def test_a_reader_collected_while_another_opens_a_file_blocks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        (tmp_path / f"{name}.ffr").write_bytes(file_of([name.encode()]))
    dropped = [FileReader(tmp_path / "a.ffr")]
    descriptor = OPEN_FILES._open[dropped[0]._set.parts[0].file.number]  # type: ignore[union-attr]
    opening = SourceFile.open

    def collect_and_open(file: SourceFile) -> int:
        dropped.clear()
        return opening(file)

    monkeypatch.setattr(SourceFile, "open", collect_and_open)
    assert FileReader(tmp_path / "b.ffr").read_one(0).tobytes() == b"b"
    assert descriptor not in OPEN_FILES._open.values()


def _checksum(reader: FileReader) -> int:
    return sum(int(record.sum()) for record in reader.read(range(len(reader))))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_reader_works_in_child_processes(method: str, parts: Path, records: list[bytes]) -> None:
    reader = FileReader(parts)
    reader.read([0, 1, 2, 3])
    expected = sum(sum(record) for record in records)
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(_checksum, [reader] * 4) == [expected] * 4
    child = os.fork()
    if child == 0:
        os._exit(_checksum(reader) != expected)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert _checksum(reader) == expected


def test_threads_may_share_a_reader(parts: Path, records: list[bytes], tables: Any) -> None:
    reader = FileReader(parts, tables=tables)
    wrong: list[int] = []

    def work(seed: int) -> None:
        source = random.Random(seed)
        for _ in range(40):
            order = source.choices(range(300), k=20)
            if [r.tobytes() for r in reader.read(order)] != [records[i] for i in order]:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_copy_by_pickle_keeps_files_and_options(parts: Path) -> None:
    reader = FileReader(parts, check_data=False, tables="demand")
    copy = pickle.loads(pickle.dumps(reader))
    assert (copy.fnames, copy.n, copy.check_data) == (reader.fnames, 300, False)


def test_a_closed_reader_says_so(parts: Path) -> None:
    with FileReader(parts) as reader:
        pass
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.read([0])
    with pytest.raises(ValueError, match="closed"):
        reader.read_one(0)


def test_names_that_cannot_be_read_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file"):
        FileReader(tmp_path / "none.ffr")
    with pytest.raises(FileNotFoundError, match=r"no \.ffr files"):
        FileReader(tmp_path)
    with pytest.raises(ValueError, match="empty"):
        FileReader([])
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="ends with"):
        FileReader(tmp_path / "a.bin")
    os.mkfifo(tmp_path / "pipe.ffr")
    with pytest.raises(ValueError, match="regular"):
        FileReader(tmp_path / "pipe.ffr")


def test_a_change_of_directory_is_nothing_to_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.ffr").write_bytes(file_of([b"x", b"y"]))
    monkeypatch.chdir(tmp_path)
    reader = FileReader("a.ffr")
    monkeypatch.chdir("sub")
    OPEN_FILES.forget(reader._set.parts[0].file)  # type: ignore[union-attr]
    assert bytes(reader.read_one(1)) == b"y"
    assert bytes(pickle.loads(pickle.dumps(reader)).read_one(1)) == b"y"
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        assert bytes(pool.apply(reader.read_one, (0,))) == b"x"


def test_a_pickled_reader_refuses_other_files_than_it_had(tmp_path: Path) -> None:
    path = tmp_path / "a.ffr"
    path.write_bytes(file_of([b"old"] * 5))
    pickled = pickle.dumps(FileReader(path))
    os.utime(path, (1, 1))  # a copy elsewhere, with another time, is the same set
    assert pickle.loads(pickled).n == 5
    for records in ([b"new"] * 3, [b"new"] * 5):
        path.write_bytes(file_of(records))
        with pytest.raises(DamagedFileError, match=r"a\.ffr was replaced or written to"):
            pickle.loads(pickled)


def test_a_set_that_does_not_open_leaves_nothing_open(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.ffr").write_bytes(file_of([b"x"]))
    (tmp_path / "9.ffr").write_bytes(b"junk" * 10)
    with pytest.raises(DamagedFileError):
        FileReader(tmp_path)
    still = [os.readlink(f"/proc/self/fd/{found}") for found in OPEN_FILES._open.values()]
    assert not [name for name in still if name.startswith(str(tmp_path))]


DAEMON = """
import os, sys
from ffrecord import FileReader
engine, directory = sys.argv[1:]
readers = [FileReader(f"{directory}/a.ffr", False, engine=engine) for _ in range(3)]
for reader in readers: reader.read([0])
child = os.fork()
if child == 0:
    os.closerange(3, 256)
    mine = [os.open(f"{directory}/b.ffr", os.O_RDONLY) for _ in range(20)]
    found = [bytes(readers[0].read([1])[0])]
    readers[1].close()
    found.append(bytes(FileReader(f"{directory}/a.ffr", False, engine=engine).read([1])[0]))
    assert found == [b"A" * 5000] * 2, found
    for descriptor in mine:
        assert os.readlink(f"/proc/self/fd/{descriptor}").endswith("b.ffr")
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_daemon_that_closed_all_it_inherited_reads_its_files_and_keeps_its_own(
    name: str, tmp_path: Path
) -> None:
    if name not in probe().engines:
        pytest.skip(probe().reasons[name])
    for letter in "ab":
        content = file_of([letter.upper().encode() * 5000] * 3)
        (tmp_path / f"{letter}.ffr").write_bytes(content)
    command = [sys.executable, "-c", DAEMON, name, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# Every read that starts at the byte given gets EIO, as from a bad sector.
BAD_SECTOR = """
import ctypes, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
rules = [(0x20, 0, 0, 0), (0x15, 1, 0, 295), (0x15, 0, 3, 327), (0x20, 0, 0, 40),
         (0x15, 0, 1, int(sys.argv[2])), (0x06, 0, 0, 0x00050005), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
program = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code))
from ffrecord import FileReader
reader = FileReader(sys.argv[1], engine="python")
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
for error in reader.damaged(): print(error.index, error)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of system calls are x86's")
def test_a_bad_sector_is_a_damaged_record_and_the_rest_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.ffr"
    content = bytearray(file_of([b"x" * 100] * 5))
    content[-1] ^= 1
    path.write_bytes(content)
    first = int(FileReader(path).get_offsets(0)[0])
    done = subprocess.run(
        [sys.executable, "-c", BAD_SECTOR, str(path), str(first)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    bad, flipped = done.stdout.splitlines()
    assert bad == f"0 record 0 is damaged: {path}: Input/output error"
    assert flipped.startswith("4 record 4 is damaged")
