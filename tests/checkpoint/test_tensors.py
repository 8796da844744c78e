"""Tensors of every type and form come back bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hfai import checkpoint
from hfai.checkpoint.format import DTYPES
from hfai.checkpoint.shard import copy_range
from tests.checkpoint.training import bits, same


def _of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = int(np.prod(shape)) * dtype.itemsize
    data = torch.randint(0, 256, (count,), dtype=torch.uint8)
    if dtype is torch.bool:
        data = data % 2
    return data.view(dtype).reshape(shape)


@pytest.mark.parametrize("name", [name for name in DTYPES if hasattr(torch, name)])
def test_every_type_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    dtype = getattr(torch, name)
    state = {"matrix": _of(dtype, 5, 7), "page": _of(dtype, 4099), "scalar": _of(dtype, 1)[0]}
    checkpoint.save(tmp_path / "a", state, rng=False)
    assert same(checkpoint.load(tmp_path / "a")["model"], state)
    into = {key: torch.zeros_like(value) for key, value in state.items()}
    checkpoint.load_into(tmp_path / "a", into)
    assert same(into, state)


ODD = {
    "empty": torch.empty(0),
    "empty matrix": torch.empty(3, 0, 2),
    "number": torch.tensor(3.5),
    "transposed": torch.arange(6000.0).reshape(60, 100).t(),
    "every second": torch.arange(9000.0)[::2],
    "expanded": torch.ones(1, 5).expand(2000, 5),
    "channels last": torch.randn(2, 3, 40, 50).to(memory_format=torch.channels_last),
    "conjugate": torch.randn(700, dtype=torch.complex64).conj(),
    "negative": torch.randn(700, dtype=torch.complex64).conj().imag,
    "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    "of one row": torch.randn(1, 30000),
}


def test_tensors_of_odd_forms_come_back_and_are_filled_in_place(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", ODD, rng=False)
    loaded = checkpoint.load(tmp_path / "a")["model"]
    assert same(loaded, {k: v.resolve_conj().resolve_neg() for k, v in ODD.items()})
    targets = {
        "transposed": torch.zeros(60, 100).t(),
        "every second": torch.zeros(9000)[::2],
        "channels last": torch.zeros(2, 3, 40, 50).to(memory_format=torch.channels_last),
    }
    checkpoint.load_into(tmp_path / "a", targets, strict=False)
    for name, target in targets.items():
        assert torch.equal(target, ODD[name])


def test_ranges_of_strided_tensors_are_copied_without_the_rest() -> None:
    base = torch.randn(6, 5, 4).transpose(0, 2)
    whole = bits(base)
    for start in range(0, len(whole), 12):
        for length in (4, 20, 96, 300):
            if start + length <= len(whole):
                out = torch.empty(length, dtype=torch.uint8)
                copy_range(base, start, length, out)
                assert out.numpy().tobytes() == whole[start : start + length]


def test_tied_tensors_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    weight = torch.randn(5000)
    checkpoint.save(tmp_path / "a", {"a": weight, "b": weight, "c": weight.clone()}, rng=False)
    loaded = checkpoint.load(tmp_path / "a")["model"]
    assert loaded["a"] is loaded["b"]
    assert loaded["a"] is not loaded["c"]
    assert (tmp_path / "a" / "rank-00000.safetensors").stat().st_size < 3 * 20000


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.empty(3, device="meta"), "meta device"),
        (torch.eye(3).to_sparse(), "make it dense"),
        (torch.nn.UninitializedParameter(), "subclasses"),
    ],
)
def test_what_is_not_stored_is_refused_by_name(
    tensor: torch.Tensor, words: str, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=f"model/odd.*{words}"):
        checkpoint.save(tmp_path / "a", {"odd": tensor})
    assert list(tmp_path.iterdir()) == []


def test_one_tensor_is_read_without_the_rest(tmp_path: Path) -> None:
    state = {f"w{at}": torch.randn(1 << 20) for at in range(8)}
    checkpoint.save(tmp_path / "a", state, rng=False)
    before = _bytes_read()
    found = checkpoint.load_tensor(tmp_path / "a", "model/w5")
    assert _bytes_read() - before < 6 << 20
    assert torch.equal(found, state["w5"])
    with pytest.raises(KeyError, match=r"no tensor 'w5'; did you mean model/w5\?"):
        checkpoint.load_tensor(tmp_path / "a", "w5")


def test_the_meta_device_gives_shapes_without_reading_data(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", {"w": torch.randn(4 << 20)}, others={"n": 3}, rng=False)
    before = _bytes_read()
    loaded = checkpoint.load(tmp_path / "a", "meta")
    assert _bytes_read() - before < 1 << 20
    assert loaded["model"]["w"].is_meta
    assert loaded["model"]["w"].shape == (4 << 20,)
    assert loaded["n"] == 3


def _bytes_read() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_a_nested_tensor_is_refused_by_name(tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(TypeError, match="model/n is a nested tensor"):
        checkpoint.save(tmp_path / "a", {"n": nested})
