"""Values that are no tensors come back as they were, and what cannot is refused by its name."""

from __future__ import annotations

import math
import random
import sys
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hfai import checkpoint
from hfai.checkpoint import tree

_leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
    | st.complex_numbers()
)  # fmt: skip
_keys = (
    st.text() | st.integers() | st.tuples(st.integers(), st.text())
    | st.frozensets(st.integers(0, 9), max_size=1)
)  # fmt: skip
_values = st.recursive(
    _leaves,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(_keys, inner),
    max_leaves=12,
)


@given(_values)
@settings(max_examples=60, deadline=None)
def test_nested_values_come_back_with_their_types(value: Any) -> None:
    import json

    text = json.dumps(tree.encode(value, "v", {}), allow_nan=False)
    found = tree.decode(json.loads(text), lambda name: torch.empty(0))
    assert repr(found) == repr(value)


def test_arrays_scalars_types_and_tensors_come_back(tmp_path: Path) -> None:
    others = {
        "array": np.arange(6, dtype=">i4").reshape(2, 3)[:, ::2],
        "scalar": np.float32(0.1),
        "integer": np.int64(-3),
        "type": torch.bfloat16,
        "device": torch.device("cpu"),
        "set": {1, 2},
        "python": random.getstate(),
        "ordered": OrderedDict(a=1),
        "tensors": [torch.arange(3), {"deep": torch.ones(2)}],
        "$odd": {"$tensor": "not one"},
        "infinite": [math.inf, -math.inf],
    }
    checkpoint.save(tmp_path / "a", None, others=others, rng=False)
    found = checkpoint.load(tmp_path / "a")
    assert np.array_equal(found.pop("array"), others.pop("array"))
    (first, second), (one, two) = found.pop("tensors"), others.pop("tensors")  # type: ignore[misc]
    assert torch.equal(first, one)
    assert torch.equal(second["deep"], two["deep"])
    assert found == others
    assert type(found["scalar"]) is np.float32


class Thing:
    pass


@pytest.mark.parametrize(
    "value",
    [
        Thing(),
        lambda: 0,
        Path("/x"),
        np.array(["a"]),
        object,
        np.ma.masked_array([1.0, 2.0], [0, 1]),
    ],
)
def test_an_object_is_refused_with_the_way_to_it(value: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="others/loader/1 is a"):
        checkpoint.save(tmp_path / "a", None, others={"loader": [0, value]})
    assert list(tmp_path.iterdir()) == []


def test_a_value_that_contains_itself_is_refused(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="contains itself"):
        checkpoint.save(tmp_path / "a", None, others={"loop": loop})


def test_reserved_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'optimizer', which is the checkpoint's own"):
        checkpoint.save(tmp_path / "a", None, others={"optimizer": 1})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.zeros(2, np.longdouble), "others/x is an array of .*: convert it to float64"),
        (10**5000, "others/x is an int of 16610 bits: .*give bytes"),
    ],
    ids=["long double", "long int"],
)
def test_numbers_that_no_file_takes_are_refused_by_name(
    value: Any, words: str, tmp_path: Path
) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        checkpoint.save(tmp_path / "a", {"w": torch.ones(1)}, others={"x": value})


def test_frozensets_come_back_as_such_wherever_they_are(tmp_path: Path) -> None:
    others = {
        "plain": frozenset({1, 2}),
        "in a set": {frozenset({1}), frozenset({frozenset({2}), 3})},
        "keys": {frozenset({1, 2}): 0.5, (frozenset({4}), 1): "a"},
        "set": {1},
    }
    checkpoint.save(tmp_path / "a", None, others=others, rng=False)
    found = checkpoint.load(tmp_path / "a")
    assert found == others
    assert type(found["plain"]) is frozenset
    assert type(found["set"]) is set


def nested(levels: int) -> Any:
    """A dict with others in it, so many in all."""
    value: Any = 1
    for _ in range(levels):
        value = {1: value}
    return value


def test_what_is_nested_too_deeply_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"others/v/1/1/.*… is nested too deeply: at most 100 "):
        checkpoint.save(tmp_path / "a", None, others={"v": nested(tree.MOST_LEVELS)})
    assert list(tmp_path.iterdir()) == []
    deepest = {"v": nested(tree.MOST_LEVELS - 1)}
    checkpoint.save(tmp_path / "a", None, others=deepest, rng=False)
    assert checkpoint.load(tmp_path / "a") == deepest


def test_a_load_without_room_for_its_calls_says_so_and_not_that_bytes_are_damaged(
    tmp_path: Path,
) -> None:
    model = torch.nn.Linear(1, 1)
    manager = checkpoint.CheckpointManager(tmp_path, asynchronous=False)
    for step in (1, 2):
        manager.save(step, model, others={"v": nested(tree.MOST_LEVELS - 1)})

    def deeper(calls: int) -> Any:
        return deeper(calls - 1) if calls else manager.resume(model)

    outcomes: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a step that is passed over
        for room in range(250, 450, 20):
            try:
                outcomes.append(deeper(sys.getrecursionlimit() - room).step)
            except (RecursionError, checkpoint.CheckpointError) as error:
                outcomes.append(error)
    assert 1 not in outcomes
    assert not any(isinstance(one, checkpoint.DamagedCheckpointError) for one in outcomes)
    assert any("nested too deeply" in str(outcome) for outcome in outcomes)
    assert manager.resume(model).step == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["__metadata__", "a/__metadata__", "a\udc80"])
def test_names_that_safetensors_files_cannot_have_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the tensor 'model/.* has a name .*: rename it"):
        checkpoint.save(tmp_path / "a", {name: torch.ones(1)}, rng=False)
    assert list(tmp_path.iterdir()) == []
    checkpoint.save(tmp_path / "a", None, others={name: [name]}, rng=False)
    assert checkpoint.load(tmp_path / "a") == {name: [name]}
