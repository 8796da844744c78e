"""What every class in the registry is: torch's class with another `forward`, and nothing more."""

from __future__ import annotations

import inspect

import pytest
from torch import nn

from hfai.nn.registry import OPERATORS, TORCH_CLASS, Explains
from tests.nn.operator_cases import CASES, OperatorCase


def test_every_registered_operator_has_a_case_in_this_suite() -> None:
    assert {(case.torch_class, case.hfai_class) for case in CASES} == set(OPERATORS.items())


def test_the_way_back_undoes_the_way_there() -> None:
    assert {hfai_class: torch_class for torch_class, hfai_class in OPERATORS.items()} == TORCH_CLASS


def test_ours_is_a_subclass_of_the_same_name_and_signature(case: OperatorCase) -> None:
    assert issubclass(case.hfai_class, case.torch_class)
    assert case.hfai_class.__name__ == case.torch_class.__name__
    assert inspect.signature(case.hfai_class) == inspect.signature(case.torch_class)
    ours, torchs = (inspect.signature(c.forward) for c in (case.hfai_class, case.torch_class))
    assert list(ours.parameters) == list(torchs.parameters)
    assert issubclass(case.hfai_class, Explains)


def test_ours_can_be_constructed_directly_and_then_holds_what_torchs_holds(
    case: OperatorCase,
) -> None:
    ours, torchs = (
        cls(*case.arguments, **case.keywords) for cls in (case.hfai_class, case.torch_class)
    )
    assert type(ours) is case.hfai_class
    assert vars(ours).keys() == vars(torchs).keys()
    assert list(ours.state_dict()) == list(torchs.state_dict())
    assert ours.extra_repr() == torchs.extra_repr()
    assert repr(ours) == repr(torchs)


@pytest.mark.parametrize("attribute", ["_version", "__constants__", "__setstate__", "__call__"])
def test_what_torch_looks_up_on_the_class_is_inherited(case: OperatorCase, attribute: str) -> None:
    assert getattr(case.hfai_class, attribute, None) == getattr(case.torch_class, attribute, None)


def test_ours_lives_where_users_import_it_from(case: OperatorCase) -> None:
    import hfai.nn

    assert getattr(hfai.nn, case.torch_class.__name__) is case.hfai_class
    assert getattr(nn, case.torch_class.__name__) is case.torch_class
