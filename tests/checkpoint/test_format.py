"""The bytes of a checkpoint, looked at by others' readers and by hand."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open

from hfai import checkpoint
from hfai.checkpoint import format as format_module
from hfai.checkpoint.format import ALIGNMENT, CHUNK, Slice, lay_out
from tests.checkpoint.training import bits


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    state = {
        "large": torch.randn(3, 1 << 20),  # three chunks
        "odd": torch.randn(4099),
        "half": torch.randn(7, dtype=torch.bfloat16),
        "flag": torch.tensor(True),
        "none": torch.empty(0, 3),
    }
    path = tmp_path / "a"
    checkpoint.save(path, state, others={"epoch": 2}, step=5, rng=False)
    return path


def test_safetensors_opens_a_shard_file(saved: Path) -> None:
    loaded = checkpoint.load(saved)["model"]
    with safe_open(saved / "rank-00000.safetensors", "pt") as file:
        names = [name for name in file.keys() if not name.startswith("__pad__")]  # noqa: SIM118
        assert sorted(names) == sorted(f"model/{name}" for name in loaded)
        for name in names:
            found = file.get_tensor(name)
            mine = loaded[name.removeprefix("model/")]
            assert (found.dtype, found.shape, bits(found)) == (mine.dtype, mine.shape, bits(mine))
        assert file.metadata()["generation"] == commit_of(saved)["generation"]


def commit_of(path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((path / "COMMIT").read_bytes().splitlines()[0])
    return found


def test_the_page_on_the_format_can_be_followed_by_hand(saved: Path) -> None:
    body, hashed = (saved / "COMMIT").read_bytes().splitlines()
    assert xxhash.xxh3_64_hexdigest(body + b"\n") == hashed.decode()
    commit = json.loads(body)
    assert (commit["format"], commit["version"], commit["world"]) == ("hfai-checkpoint", 1, 1)
    assert commit["step"] == 5
    for name, (size, digest) in commit["files"].items():
        data = (saved / name).read_bytes()
        assert len(data) == size
        assert digest in ("", xxhash.xxh3_64_hexdigest(data))
    index = json.loads((saved / "rank-00000.json").read_bytes())
    shard = (saved / index["file"]).read_bytes()
    (text,) = struct.unpack_from("<Q", shard)
    assert index["header"] == text + 8
    assert xxhash.xxh3_64_hexdigest(shard[: text + 8]) == index["header_xxh3"]
    assert len(shard) == index["size"]
    for _, _, shape, _, sizes, begin, length, hashes in index["tensors"]:
        assert shape == sizes
        data = shard[begin : begin + length]
        chunks = [data[at : at + index["chunk"]] for at in range(0, length, index["chunk"])]
        assert "".join(xxhash.xxh3_64_hexdigest(chunk) for chunk in chunks) == hashes
    assert json.loads((saved / "state.json").read_bytes())["values"]["others"] == {"epoch": 2}


def test_data_and_every_tensor_of_a_page_or_more_begin_at_4_kib(saved: Path) -> None:
    index = json.loads((saved / "rank-00000.json").read_bytes())
    assert index["header"] % ALIGNMENT == 0
    places = {row[0]: (row[5], row[6]) for row in index["tensors"]}
    large = [begin for begin, length in places.values() if length >= ALIGNMENT]
    assert len(large) == 2
    assert all(begin % ALIGNMENT == 0 for begin in large)


def test_small_tensors_are_aligned_to_their_items() -> None:
    kinds = [("uint8", 1, 3), ("float64", 8, 1), ("bfloat16", 2, 5), ("float32", 4, 7)]
    slices = [
        Slice(f"{kind}{at}", kind, (count,), (0,), (count,), 0, width * count)
        for at in range(3)
        for kind, width, count in kinds
    ]
    layout = lay_out(slices, "g", 0)
    for piece in layout.slices:
        assert piece.begin % format_module.DTYPES[piece.dtype][1] == 0


def test_an_index_of_a_newer_version_is_refused_in_words(saved: Path) -> None:
    body = (saved / "COMMIT").read_bytes().splitlines()[0].replace(b'"version":1', b'"version":2')
    record = body + b"\n"
    (saved / "COMMIT").write_bytes(record + xxhash.xxh3_64_hexdigest(record).encode() + b"\n")
    with pytest.raises(checkpoint.CheckpointError, match=r"version 2 .* newer hfai"):
        checkpoint.load(saved)


def test_chunks_are_those_the_page_names() -> None:
    assert (CHUNK, ALIGNMENT) == (4 << 20, 4096)
