"""The native launcher where there is no GPU; tests/gpu has it at work."""

from __future__ import annotations

import pytest
import torch

_launch = pytest.importorskip(
    "hfai.kernels._launch", reason="the native launcher was not built for this interpreter"
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver here")
def test_without_a_driver_a_launch_says_so() -> None:
    with pytest.raises(RuntimeError, match="NVIDIA's driver"):
        _launch.launch(0, 0, 32, 0, 1, False, 1, 0, 1, 2.0)


def test_arguments_of_the_wrong_kind_are_a_type_error() -> None:
    with pytest.raises(TypeError):
        _launch.launch("kernel")
    with pytest.raises((TypeError, RuntimeError)):
        _launch.launch(0, 0, 32, 0, 1, False, 1, 0, "a string")
