"""Correct first: each implementation against the float64 reference, before it is timed.

The measure is ‖out − ref‖ / ‖ref‖ for the output and for every gradient. Where torch's allocator
hands memory out, the blocks that the outputs will land in are filled with NaN first, so that an
element nobody writes shows up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from benchmarks.harness.case import Inputs, Piece

# Ours may be this much less accurate than torch itself before the result is flagged.
ALLOWED_OVER_TORCH = 1.5
# At an error of 1 an output is no better than zeros, whatever torch's is.
MOST_ALLOWED = 0.5


def run_once(call: Callable[[], Tensor], inputs: Inputs, grad_output: Tensor) -> dict[str, Tensor]:
    """Run forward and backward over poisoned memory; return outputs by the names in `Piece`."""
    leaves = list(inputs.leaves.values())
    poison([grad_output, *leaves])
    y = call()
    gradients = torch.autograd.grad(y, leaves, grad_output)
    outputs = {"y": y.detach()}
    for name, gradient in zip(inputs.leaves, gradients, strict=True):
        outputs[f"d{name}"] = gradient
    return outputs


def poison(like: Iterable[Tensor]) -> None:
    """Leave NaN in the blocks that torch's CUDA allocator gives out next for tensors like these.

    On other devices the memory comes from elsewhere, and this does nothing.
    """
    filled = [torch.full_like(tensor, math.nan) for tensor in like if tensor.is_cuda]
    del filled


def relative_errors(outputs: Mapping[str, Tensor], reference: Iterable[Piece]) -> dict[str, float]:
    """Return ‖out − ref‖ / ‖ref‖ for each output that the reference has pieces of.

    A NaN anywhere gives NaN, an output of zeros where zeros are due gives 0.
    """
    squares: dict[str, tuple[Tensor, Tensor]] = {}
    for piece in reference:
        actual = piece.select(outputs[piece.output]).double()
        if actual.shape != piece.expected.shape:
            raise ValueError(
                f"{piece.output} has shape {tuple(actual.shape)} where the reference has "
                f"{tuple(piece.expected.shape)}"
            )
        error = (actual - piece.expected).square().sum()
        norm = piece.expected.square().sum()
        if piece.output in squares:
            error += squares[piece.output][0]
            norm += squares[piece.output][1]
        squares[piece.output] = (error, norm)
    errors = {}
    for output, (error, norm) in squares.items():
        error_norm, reference_norm = math.sqrt(error.item()), math.sqrt(norm.item())
        errors[output] = error_norm / reference_norm if reference_norm else error_norm
    return errors


def beyond_tolerance(
    errors: Mapping[str, float], tolerance: float, torchs: Mapping[str, float]
) -> list[str]:
    """Return the outputs that are wrong, in words; NaN is wrong.

    What is about as accurate as torch is not wrong, even where that is beyond the tolerance: on the
    CPU torch sums bf16 parameters' gradients in bf16, for one, and is off by a tenth.

    Args:
        errors: of the implementation.
        tolerance: the error that needs no excuse.
        torchs: errors of torch on the same inputs; empty to allow the tolerance alone.
    """
    wrong = []
    for output, error in errors.items():
        torch_error = torchs.get(output, 0.0)
        allowed = tolerance
        if not math.isnan(torch_error):
            allowed = max(tolerance, min(MOST_ALLOWED, ALLOWED_OVER_TORCH * torch_error))
        if not error <= allowed:
            wrong.append(f"{output} is off by {error:.2g} (allowed {allowed:.2g})")
    return wrong


def less_accurate(
    ours: Mapping[str, float], torchs: Mapping[str, float], dtype: torch.dtype
) -> list[str]:
    """Return the outputs in which ours is over `ALLOWED_OVER_TORCH` times torch's error, in words.

    Errors below an eighth of the type's epsilon are rounding that no two orders of summation share,
    and are never flagged.
    """
    noise = torch.finfo(dtype).eps / 8
    return [
        f"{output}'s error is {error / torchs[output]:.2f}x torch's"
        for output, error in ours.items()
        if output in torchs and error > noise and error > ALLOWED_OVER_TORCH * torchs[output] > 0
    ]
