"""`hfai.explain`: every layer's path and the reason, as a table and as data."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import hfai
from hfai.nn import to_hfai
from tests.nn.operator_cases import Operator, OperatorCase

pytestmark = pytest.mark.needs("no layers inside")


@pytest.fixture
def model(case: OperatorCase) -> nn.Module:
    """A model with the case's layer at two depths, and layers that hfai does not know."""
    layer = Operator(case, "torch").build()
    return nn.Sequential(nn.Linear(2, 2), layer, nn.ModuleDict({"inner": copy.deepcopy(layer)}))


def test_before_the_swap_every_known_layer_takes_torchs_path(
    case: OperatorCase, model: nn.Module
) -> None:
    rows = hfai.explain(model)
    assert [(row.name, row.layer, row.path) for row in rows] == [
        ("1", case.torch_class.__name__, "torch"),
        ("2.inner", case.torch_class.__name__, "torch"),
    ]
    assert all("to_hfai" in row.reason for row in rows)


def test_on_the_cpu_the_path_is_torchs_and_the_reason_is_named(model: nn.Module) -> None:
    rows = hfai.explain(to_hfai(model))
    assert len(rows) == 2
    for row in rows:
        assert row.path == "torch"
        assert re.search("CPU|cpu|CUDA|cuda", row.reason)


def test_double_takes_torchs_path_on_every_device(case: OperatorCase, device: torch.device) -> None:
    (row,) = hfai.explain(Operator(case, "hfai").build(device, torch.float64))
    assert row.path == "torch"
    assert row.reason


def test_layers_unknown_to_hfai_are_counted(model: nn.Module) -> None:
    assert hfai.explain(model).others == 1
    nested = nn.Sequential(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), nn.ModuleList())
    assert hfai.explain(nested).others == 3
    assert hfai.explain(nn.Sequential(nn.ModuleList())).others == 1


def test_the_data_are_ready_for_json(case: OperatorCase, model: nn.Module) -> None:
    rows = json.loads(json.dumps(hfai.explain(model).as_dicts()))
    assert [row["name"] for row in rows] == ["1", "2.inner"]
    assert set(rows[0]) == {"name", "layer", "path", "reason"}


def test_the_table_has_a_line_for_each_layer_and_one_for_the_rest(model: nn.Module) -> None:
    explanation = hfai.explain(model)
    lines = str(explanation).splitlines()
    assert lines[0].split() == ["name", "layer", "path", "reason"]
    assert [line.split()[0] for line in lines[1:-1]] == ["1", "2.inner"]
    assert lines[-1].startswith("1 other layer")
    columns = {line.index(row.path, len("2.inner")) for line, row in zip(lines[1:], explanation)}  # noqa: B905
    assert len(columns) == 1, "the columns do not line up"
    assert repr(explanation) == str(explanation)


def test_the_rows_are_a_sequence(model: nn.Module) -> None:
    rows = hfai.explain(model)
    assert len(rows) == 2
    assert rows[0] == next(iter(rows))
    assert list(rows[:1]) == [rows[0]]
    assert rows[-1] in rows


def test_a_layer_that_is_the_model_is_named_as_such(case: OperatorCase) -> None:
    (row,) = hfai.explain(Operator(case, "hfai").build())
    assert row.name == "(the model itself)"


def test_a_layer_in_two_places_is_one_row(case: OperatorCase) -> None:
    layer = Operator(case, "hfai").build()
    (row,) = hfai.explain(nn.ModuleList([layer, layer]))
    assert row.name == "0"


def test_a_subclass_is_listed_with_the_reason_it_is_left(case: OperatorCase) -> None:
    layer = Operator(case, "torch").build()
    layer.__class__ = type("Mine", (case.torch_class,), {"__module__": "user"})
    (row,) = hfai.explain(to_hfai(layer))
    assert (row.layer, row.path) == ("Mine", "torch")
    assert row.reason == (
        f"user.Mine is a subclass of {case.torch_class.__name__}; only torch's exact class is "
        f"swapped"
    )


def test_a_parametrization_is_named_as_the_reason(case: OperatorCase) -> None:
    layer = Operator(case, "torch").build()
    name = next(name for name, _ in layer.named_parameters())
    parametrize.register_parametrization(layer, name, nn.Identity())
    row = hfai.explain(to_hfai(layer))[0]
    assert row.path == "torch"
    assert row.reason.endswith("it has a parametrization: call to_hfai before registering one")


def test_a_replaced_forward_is_named_as_the_reason(case: OperatorCase) -> None:
    layer = Operator(case, "hfai").build()
    layer.forward = layer.forward  # what adapters do that wrap a layer in place
    (row,) = hfai.explain(layer)
    assert row.path == "torch"
    assert "forward" in row.reason


def test_a_user_subclass_of_ours_answers_for_itself(case: OperatorCase) -> None:
    layer = Operator(case, "hfai").build()
    expected = hfai.explain(layer)[0]
    layer.__class__ = type("Mine", (case.hfai_class,), {})
    (row,) = hfai.explain(layer)
    assert (row.path, row.reason) == (expected.path, expected.reason)


def test_explaining_changes_nothing(case: OperatorCase, device: torch.device) -> None:
    layer = Operator(case, "hfai").build(device)
    before = dict(vars(layer))
    hfai.explain(layer)
    assert dict(vars(layer)) == before
    assert type(layer) is case.hfai_class


def test_a_model_without_layers_gives_no_rows() -> None:
    explanation = hfai.explain(nn.ReLU())
    assert len(explanation) == 0
    assert explanation.others == 1
    assert explanation.as_dicts() == []
