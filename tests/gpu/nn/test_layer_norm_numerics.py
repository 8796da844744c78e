"""The kernels' errors against float64: at most half as much again as those of torch's kernels.

Every row length, type and choice of parameters runs over memory full of NaNs. A test loops over the
shapes itself, since thousands of items cost more than the work; a failure names each bad case.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.nn.norms import (
    AUTOCAST,
    BF16,
    BF16_FP32,
    CUDA,
    FP16,
    FP32,
    LAYER_NORM,
    MIXES,
    RMS_NORM,
    VARIANTS,
    Mix,
    Trial,
    Variant,
    build,
)

# fmt: off
LENGTHS = [
    1, 2, 3, 5, 7, 31, 32, 33, 40, 63, 64, 100, 127, 128, 255, 256, 257, 384, 768, 985, 1000, 1023,
    1024, 1025, 2048, 3000, 4096, 5000, 8192, 10_000, 16_384, 20_000, 32_768, 65_536, 100_003,
    200_003,
]
# fmt: on
ROWS = [1, 3, 64, 1000]
# float64 copies of more than this, in several processes at once, would not fit on the GPU.
MOST_ELEMENTS = 2**26


def _check(trials: list[Trial]) -> None:
    failures = [failure for trial in trials for failure in trial.failures()]
    shown = "\n".join(failures[:40])
    assert not failures, f"{len(failures)} of {len(trials)} cases and results are wrong:\n{shown}"


def _grid(variant: Variant, mix: Mix, lengths: list[int]) -> list[Trial]:
    shapes = [
        (rows, length)
        for length in lengths
        for rows in sorted({min(rows, MOST_ELEMENTS // length) for rows in ROWS})
    ]
    return [Trial(variant, mix, rows, length) for rows, length in shapes]


# Both halves of the list go to a process each.
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
@pytest.mark.parametrize("variant", [LAYER_NORM, RMS_NORM], ids=lambda variant: variant.name)
def test_errors_at_every_row_length_are_within_1_5_times_torchs(
    variant: Variant, mix: Mix, half: int
) -> None:
    _check(_grid(variant, mix, LENGTHS[half::2]))


# Without a weight there are no types to mix; the other parameters' kernels differ little from the
# ones above, so half of the lengths will do.
@pytest.mark.parametrize("mix", [FP32, FP16, BF16], ids=lambda mix: mix.name)
@pytest.mark.parametrize(
    "variant",
    [variant for variant in VARIANTS if variant not in (LAYER_NORM, RMS_NORM)],
    ids=lambda variant: variant.name,
)
def test_errors_without_a_weight_or_bias_are_within_1_5_times_torchs(
    variant: Variant, mix: Mix
) -> None:
    _check(_grid(variant, mix, LENGTHS[MIXES.index(mix) % 2 :: 2]))


@pytest.mark.parametrize("mix", [BF16_FP32, AUTOCAST], ids=lambda mix: mix.name)
def test_errors_of_mixed_types_without_a_bias_are_within_1_5_times_torchs(mix: Mix) -> None:
    _check(_grid(VARIANTS[1], mix, LENGTHS[::4]))


@pytest.mark.parametrize("mix", [FP32, BF16], ids=lambda mix: mix.name)
@pytest.mark.parametrize("variant", [LAYER_NORM, RMS_NORM], ids=lambda variant: variant.name)
def test_errors_with_more_rows_than_a_grid_dimension_holds(variant: Variant, mix: Mix) -> None:
    shapes = [(70_001, 40), (100_000, 5), (65_537, 256), (66_000, 1000), (300_000, 1)]
    _check([Trial(variant, mix, rows, length) for rows, length in shapes])


@pytest.mark.parametrize("variant", [LAYER_NORM, RMS_NORM], ids=lambda variant: variant.name)
def test_errors_of_rows_beyond_a_million_elements(variant: Variant) -> None:
    shapes = [(3, 1_000_003), (2, 2**20), (1, 5_000_011)]
    _check([Trial(variant, mix, *shape) for shape in shapes for mix in (FP32, BF16)])


def test_an_offset_of_1e4_costs_no_more_than_1e_3() -> None:
    for length in (40, 985, 1000, 1024, 8192, 65_536, 200_003):
        layer = build(VARIANTS[3], length)
        x = torch.randn(16, length, device=CUDA) + 1e4
        double = x.double()
        centred = double - double.mean(-1, keepdim=True)
        expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        error = (layer(x).double() - expected).abs().max().item()
        assert error <= 1e-3, f"length {length}"


@pytest.mark.parametrize("parameters", [torch.float16, torch.float32])
def test_a_constant_row_of_60000_in_fp16_gives_the_bias(parameters: torch.dtype) -> None:
    for length in (31, 1000, 1024, 8192, 65_536, 200_003):
        layer = build(LAYER_NORM, length, parameters)
        x = torch.full((5, length), 60_000.0, device=CUDA, dtype=torch.float16)
        y = layer(x)
        assert y.dtype == torch.float16
        assert (y - layer.bias).abs().max().item() <= 2e-3, f"length {length}"


def test_rms_norm_of_large_fp16_does_not_overflow() -> None:
    layer = build(RMS_NORM, 1000, torch.float16)
    x = torch.full((5, 1000), 60_000.0, device=CUDA, dtype=torch.float16)
    torch.testing.assert_close(
        layer(x), layer.weight.detach().expand(5, 1000), rtol=2e-3, atol=1e-3
    )


@pytest.mark.parametrize("variant", [LAYER_NORM, RMS_NORM], ids=lambda variant: variant.name)
@pytest.mark.parametrize("rows", [2048, 100_000])
def test_column_sums_over_bf16_rows_are_kept_in_fp32(variant: Variant, rows: int) -> None:
    # Equal addends of 1: a sum kept in bf16 would stop growing at 256.
    layer = build(variant, 8, torch.bfloat16)
    x = torch.tensor([1.0, -1.0] * 4, device=CUDA, dtype=torch.bfloat16).expand(rows, 8)
    y = layer(x)
    gradients = torch.autograd.grad(y, list(layer.parameters()), torch.ones_like(y))
    expected = [rows * x[0].float(), torch.full((8,), float(rows), device=CUDA)]
    for gradient, value in zip(gradients, expected, strict=False):
        torch.testing.assert_close(gradient.float(), value, rtol=5e-3, atol=0)
