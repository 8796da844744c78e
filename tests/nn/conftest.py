"""Every operator case, and for each torch's class and ours in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.nn.operator_cases import CASES, Operator, OperatorCase


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> OperatorCase:
    """Each operator in each configuration."""
    chosen: OperatorCase = request.param
    for marker in request.node.iter_markers("needs"):
        for feature in marker.args:
            chosen.require(feature)
    return chosen


@pytest.fixture(params=["torch", "hfai"])
def operator(case: OperatorCase, request: pytest.FixtureRequest) -> Operator:
    """The case as torch's class, then as ours."""
    return Operator(case, request.param)


@pytest.fixture
def swapped(case: OperatorCase) -> Operator:
    """The case as our class alone, for promises that only we make."""
    return Operator(case, "hfai")


@pytest.fixture
def one_process_group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()
