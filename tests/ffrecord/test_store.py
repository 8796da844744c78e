"""Readers over a real object store: addresses, batches, a server that dies, the block cache."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ffrecord import FileReader, RecordError, StoreOptions
from tests.ffrecord.independent import file_of
from tests.ffrecord.weed import Server

pytestmark = pytest.mark.xdist_group("store")

TIMEOUT = 3.0


@pytest.fixture(scope="module")
def url(server: Server, records: list[bytes]) -> str:
    """A directory of three record files and something else."""
    server.put("set.ffr/PART_00001.ffr", file_of(records[200:]))
    server.put("set.ffr/PART_00000.ffr", file_of(records[:200]))
    server.put("set.ffr/meta.txt", b"not a record file")
    server.put("set.ffr/below/PART_00000.ffr", file_of(records[:1]))
    server.put("one.ffr", file_of(records))
    return "s3://records/set.ffr"


@pytest.fixture(scope="module")
def options(server: Server) -> StoreOptions:
    return StoreOptions(config=server.config, timeout=TIMEOUT)


def contents(batch: list[Any]) -> list[bytes]:
    return [record.tobytes() for record in batch]


@pytest.mark.parametrize("tables", ["memory", "demand"])
def test_objects_directories_and_lists_are_read_like_files(
    url: str, options: StoreOptions, records: list[bytes], tables: Any
) -> None:
    parts = [f"{url}/PART_00000.ffr", f"{url}/PART_00001.ffr"]
    order = [5, 299, -1, 0, 5, 200, 199]
    for given in (url, f"{url}/", parts, "s3://records/one.ffr"):
        reader = FileReader(given, tables=tables, storage=options)
        assert reader.n == 300
        assert contents(reader.read(order)) == [records[i] for i in order]
        assert contents(reader[::7]) == records[::7]
        assert reader.read_one(-1).tobytes() == records[-1]
    assert FileReader(url, storage=options).fnames == parts
    assert contents(list(FileReader(url, storage=options))) == records
    FileReader(url, storage=options).validate(deep=True)


def test_a_reader_is_pickled_by_its_urls_and_read_in_a_spawned_process(
    url: str, options: StoreOptions, records: list[bytes]
) -> None:
    reader = FileReader(url, storage=options)
    assert contents(pickle.loads(pickle.dumps(reader)).read([3])) == [records[3]]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(reader.read_one, (7,)).tobytes() == records[7]


def test_spawned_workers_of_a_loader_read_from_the_store(
    url: str, options: StoreOptions, records: list[bytes]
) -> None:
    from ffrecord.torch import DataLoader, Dataset

    loader = DataLoader(
        Dataset(url, storage=options),
        batch_size=50,
        num_workers=2,
        multiprocessing_context="spawn",
        collate_fn=contents,
    )
    assert [record for batch in loader for record in batch] == records


def test_a_forked_process_is_told_to_be_spawned(url: str, options: StoreOptions) -> None:
    reader = FileReader(url, storage=options)
    child = os.fork()
    if child == 0:
        try:
            reader.read(range(20))
        except RuntimeError as error:
            os._exit(0 if "spawn" in str(error) else 1)
        except BaseException as error:
            os.write(2, repr(error).encode())
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("s3://records/none.ffr", FileNotFoundError, "no such object: s3://records/none.ffr"),
        ("s3://other/none.ffr", FileNotFoundError, "no such bucket or object"),
        ("s3://records/set.ffr/meta.txt", ValueError, "ends with .ffr"),
        ("s3://records", ValueError, "names no object"),
        ("s3://", ValueError, "s3:// names no object"),
        ("tape://records/one.ffr", ValueError, "tape://records is no store that can be read"),
        (["s3://records/one.ffr", "a.ffr"], ValueError, "not both"),
    ],
)
def test_an_address_that_makes_no_sense_is_refused_in_words(
    name: Any, kind: type[Exception], words: str, url: str, options: StoreOptions
) -> None:
    with pytest.raises(kind, match=words):
        FileReader(name, storage=options)


def test_options_of_another_type_are_refused(url: str) -> None:
    with pytest.raises(TypeError, match="give a ffrecord"):
        FileReader(url, storage={"timeout": 3})  # type: ignore[arg-type]


def test_an_engine_for_local_files_is_refused(url: str, options: StoreOptions) -> None:
    with pytest.raises(ValueError, match="'direct': that is for local files"):
        FileReader(url, engine="direct", storage=options)


def test_wrong_credentials_are_a_permission_error(url: str, server: Server) -> None:
    config = {**server.config, "secret_access_key": "wrong"}
    with pytest.raises(PermissionError, match="the store refuses"):
        FileReader(url, storage=StoreOptions(config=config, timeout=TIMEOUT))


def test_missing_credentials_are_a_permission_error_that_says_where_they_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    nobody = {"metadata_endpoint": "http://127.0.0.1:9", "region": "here"}
    with pytest.raises(PermissionError, match=r"AWS_ACCESS_KEY_ID.*access_key_id"):
        FileReader("s3://bucket/a/x.ffr", storage=StoreOptions(nobody, timeout=1))


def test_damage_is_named_with_its_url(server: Server, options: StoreOptions) -> None:
    raw = bytearray(file_of([b"a" * 100, b"b" * 100]))
    raw[-50] ^= 4
    name = server.put("damaged.ffr", bytes(raw))
    with pytest.raises(RecordError, match=r"record 1 is damaged: s3://records/damaged\.ffr, byte"):
        FileReader(name, storage=options).read([0, 1])


def test_an_object_cut_short_after_opening_is_an_error(
    server: Server, options: StoreOptions
) -> None:
    raw = file_of([b"a" * 9000, b"b" * 9000])
    name = server.put("short.ffr", raw)
    reader = FileReader(name, storage=options)
    reader.read([0])
    server.put("short.ffr", raw[:12_000])
    with pytest.raises((OSError, RecordError), match=r"record [01],? .*short\.ffr"):
        reader.read([0, 1])


def test_a_killed_server_is_an_error_in_time_never_wrong_data_and_recovery_on_return(
    server: Server, url: str, options: StoreOptions, records: list[bytes]
) -> None:
    reader = FileReader(url, storage=options)
    failures: list[tuple[float, OSError]] = []
    right: list[float] = []
    wrong: list[list[int]] = []
    stop = threading.Event()

    def work() -> None:
        source = random.Random(4)
        while not stop.is_set():
            order = source.choices(range(300), k=40)
            start = time.monotonic()
            try:
                batch = contents(reader.read(order))
            except OSError as error:
                failures.append((time.monotonic() - start, error))
            else:
                right.append(time.monotonic())
                if batch != [records[i] for i in order]:
                    wrong.append(order)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        time.sleep(0.5)
        before = len(right)
        server.kill()
        time.sleep(TIMEOUT + 1)
        server.start()
        back = time.monotonic()
        while right[-1] < back and time.monotonic() < back + 2 * TIMEOUT:
            time.sleep(0.05)
    finally:
        stop.set()
        thread.join()
    assert before > 0
    assert wrong == []
    assert failures
    for taken, error in failures:
        assert taken < TIMEOUT + 1
        assert isinstance(error, TimeoutError)
        assert "s3://records/set.ffr" in str(error)
        assert "did not answer within 3 s" in str(error)
    assert right[-1] > back


def test_a_server_that_hangs_is_an_error_in_time(
    server: Server, url: str, options: StoreOptions, records: list[bytes]
) -> None:
    reader = FileReader(url, storage=options)
    server.pause(True)
    try:
        start = time.monotonic()
        with pytest.raises(TimeoutError, match="did not answer within 3 s"):
            reader.read(range(0, 300, 3))
        assert time.monotonic() - start < TIMEOUT + 1
    finally:
        server.pause(False)
    assert contents(reader.read([8])) == [records[8]]


def test_a_cache_serves_without_the_server(
    server: Server, url: str, records: list[bytes], tmp_path: Path
) -> None:
    options = StoreOptions(config=server.config, timeout=TIMEOUT, cache=tmp_path / "cache")
    order = list(range(0, 300, 2))
    reader = FileReader(url, storage=options)
    reader.read(order)
    server.pause(True)
    try:
        assert contents(reader.read(order)) == [records[i] for i in order]
    finally:
        server.pause(False)


def test_processes_share_a_cache_within_its_bound(
    server: Server, options: StoreOptions, tmp_path: Path
) -> None:
    source = random.Random(6)
    many = [source.randbytes(source.randrange(60_000)) for _ in range(120)]
    name = server.put("many.ffr", file_of(many))
    program = f"""
import random, sys, zlib
from ffrecord import FileReader, StoreOptions
options = StoreOptions(config={server.config!r}, cache={str(tmp_path)!r}, cache_bytes=1 << 20)
reader = FileReader({name!r}, storage=options)
source = random.Random(int(sys.argv[1]))
for _ in range(15):
    reader.read(source.sample(range(120), 12))
"""
    running = [subprocess.Popen([sys.executable, "-c", program, str(k)]) for k in range(2)]
    peak = 0
    while any(process.poll() is None for process in running):
        peak = max(peak, used(tmp_path))
        time.sleep(0.01)
    assert [process.returncode for process in running] == [0, 0]
    assert 0 < peak <= 1 << 20


def used(cache: Path) -> int:
    """The bytes of all blocks while none can be added; a block may have two names for a moment."""
    sizes = {}
    with open(cache / "bytes", "ab") as counter:
        fcntl.flock(counter, fcntl.LOCK_EX)
        for path in cache.glob("??/*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


def test_without_obstore_an_address_is_an_import_error_in_words() -> None:
    program = (
        "import sys; sys.modules['obstore'] = None\n"
        "import ffrecord\n"
        "try: ffrecord.FileReader('s3://bucket/a.ffr')\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "pip install 'hfai[storage]'" in done.stdout


@pytest.mark.parametrize(
    "wrong", [{"timeout": 0}, {"timeout": -1.0}, {"in_flight": 0}, {"gap": -1}]
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is "):
        StoreOptions(**wrong)
