"""What the kernels promise beyond small errors: the same bits, any layout, any size."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from tests.gpu.nn.norms import (
    BF16,
    BF16_FP32,
    CUDA,
    FP16,
    FP32,
    LAYER_NORM,
    RMS_NORM,
    VARIANTS,
    Mix,
    Variant,
    as_torch,
    build,
    poison,
)
from tests.nn.operator_cases import assert_same_bits

# Of 1000 rows: single ones, few (another kernel), just more than few, nearly all.
PARTS = [(0, 1), (17, 18), (72, 73), (1, 3), (5, 69), (2, 130), (2, 131), (3, 1000)]
NORMS = [LAYER_NORM, RMS_NORM]
TYPES = [FP32, FP16, BF16, BF16_FP32]
LENGTHS = [1, 3, 40, 256, 768, 985, 1000, 1024, 4096, 8192, 10_000, 65_536, 200_003]


@pytest.fixture(params=NORMS, ids=lambda variant: variant.name)
def variant(request: pytest.FixtureRequest) -> Variant:
    chosen: Variant = request.param
    return chosen


@pytest.fixture(params=TYPES, ids=lambda mix: mix.name)
def mix(request: pytest.FixtureRequest) -> Mix:
    chosen: Mix = request.param
    return chosen


def _pair(mix: Mix, *shape: int) -> tuple[Tensor, Tensor]:
    """Return an input and an incoming gradient."""
    x, dy = torch.randn(2, *shape, device=CUDA).to(mix.input)
    return x, dy


def _forward_backward(layer: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """Return y, dx and the parameters' gradients, computed over poisoned memory."""
    given = x.detach().requires_grad_()
    poison(x.nbytes)
    y = layer(given)
    poison(x.nbytes, 4 * x.shape[-1], 8 * x.shape[-1])
    return y.detach(), *torch.autograd.grad(y, [given, *layer.parameters()], dy)


def _misaligned(tensor: Tensor) -> Tensor:
    """Return the same values one element off an aligned address."""
    buffer = torch.empty(tensor.numel() + 1, device=CUDA, dtype=tensor.dtype)
    moved = buffer[1:].view(tensor.shape)
    moved.copy_(tensor)
    assert moved.data_ptr() % 16
    return moved


def test_a_rows_bits_do_not_depend_on_the_batch_around_it(variant: Variant, mix: Mix) -> None:
    for length in LENGTHS:
        rows = min(1000, 2**24 // length)
        layer = build(variant, length, mix.parameters)
        x, dy = _pair(mix, rows, length)
        y, dx, *_ = _forward_backward(layer, x, dy)
        for start, stop in PARTS:
            part = slice(start, min(stop, rows))
            case = f"{part} of {rows}×{length}"
            for move in (lambda t: t, _misaligned, torch.clone):
                y_part, dx_part, *_ = _forward_backward(layer, move(x[part]), move(dy[part]))
                assert torch.equal(y_part, y[part]), f"y of {case}"
                assert torch.equal(dx_part, dx[part]), f"dx of {case}"


def test_a_rows_bits_are_the_same_in_a_grid_of_any_size(variant: Variant) -> None:
    for length in (1, 5, 40, 256, 1000):
        layer = build(variant, length)
        x, dy = _pair(FP32, 100_003, length)
        y, dx, *_ = _forward_backward(layer, x, dy)
        for part in (slice(0, 1), slice(99_990, 100_003), slice(30_001, 95_002)):
            y_part, dx_part, *_ = _forward_backward(layer, x[part], dy[part])
            assert torch.equal(y_part, y[part]), f"y of {part}, length {length}"
            assert torch.equal(dx_part, dx[part]), f"dx of {part}, length {length}"


def test_whether_gradients_will_be_asked_for_does_not_change_a_bit_of_y(
    variant: Variant, mix: Mix
) -> None:
    for length in LENGTHS:
        layer = build(variant, length, mix.parameters)
        x, dy = _pair(mix, 33, length)
        y, *_ = _forward_backward(layer, x, dy)
        with torch.no_grad():
            assert torch.equal(layer(x), y), f"without gradients, length {length}"
        with torch.inference_mode():
            assert torch.equal(layer(x), y), f"in inference mode, length {length}"


def test_a_gradient_is_the_same_whichever_others_are_asked_for(variant: Variant, mix: Mix) -> None:
    for length in LENGTHS:
        layer = build(variant, length, mix.parameters)
        x, dy = _pair(mix, 33, length)
        _, dx, *gradients = _forward_backward(layer, x, dy)
        given = x.detach().requires_grad_()
        parameters = list(layer.parameters())
        for wanted, expected in zip([given, *parameters], [dx, *gradients], strict=True):
            for leaf in (given, *parameters):
                leaf.requires_grad_(leaf is wanted)
            (alone,) = torch.autograd.grad(layer(given), wanted, dy)
            torch.testing.assert_close(alone, expected, msg=lambda m, n=length: f"length {n}: {m}")


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_run_gives_the_same_bits(variant: Variant, mix: Mix, deterministic: bool) -> None:
    noise = torch.randn(2**24, device=CUDA)
    beside = torch.cuda.Stream()
    torch.use_deterministic_algorithms(deterministic)
    try:
        for rows, length in (
            (65_536, 256),
            (4096, 1024),
            (262_144, 40),
            (300, 65_536),
            (40, 200_003),
        ):
            layer = build(variant, length, mix.parameters)
            x, dy = _pair(mix, rows, length)
            first = _forward_backward(layer, x, dy)
            for _ in range(4):
                with torch.cuda.stream(beside):  # blocks are scheduled differently every time
                    for _ in range(5):
                        noise.mul_(1.0)
                again = _forward_backward(layer, x, dy)
                for one, other in zip(again, first, strict=True):
                    assert torch.equal(one, other), f"{rows}×{length}"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.cuda.synchronize()


def test_misaligned_tensors_give_the_same_rows(variant: Variant, mix: Mix) -> None:
    for length in LENGTHS:
        layer = build(variant, length, mix.parameters)
        x, dy = _pair(mix, 37, length)
        expected = _forward_backward(layer, x, dy)
        results = {
            "x": _forward_backward(layer, _misaligned(x), dy),
            "dy": _forward_backward(layer, x, _misaligned(dy)),
        }
        for name, parameter in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(_misaligned(parameter.detach())))
        results["parameters"] = _forward_backward(layer, x, dy)
        results["all"] = _forward_backward(layer, _misaligned(x), _misaligned(dy))
        for what, (y, dx, *gradients) in results.items():
            case = f"{what} misaligned, length {length}"
            assert torch.equal(y, expected[0]), f"y, {case}"
            assert torch.equal(dx, expected[1]), f"dx, {case}"
            for one, other in zip(gradients, expected[2:], strict=True):
                torch.testing.assert_close(one, other, msg=lambda m, c=case: f"{c}: {m}")


def test_any_layout_gives_the_bits_of_a_dense_copy(variant: Variant, mix: Mix) -> None:
    layer = build(variant, 40, mix.parameters)
    wide = torch.randn(7, 6, 80, device=CUDA).to(mix.input)
    images = torch.randn(2, 3, 5, 40, device=CUDA).to(mix.input)
    layouts = {
        "every second column": wide[..., ::2],
        "the left half": wide[..., :40],
        "transposed rows": wide[..., :40].transpose(0, 1),
        "transposed": torch.randn(40, 9, device=CUDA).to(mix.input).t(),
        "expanded rows": wide[:1, :1, :40].expand(7, 6, 40),
        "expanded columns": wide[..., :1].expand(7, 6, 40),
        "channels last": images.to(memory_format=torch.channels_last),
        "conjugate's imaginary part": torch.randn(9, 40, dtype=torch.complex64, device=CUDA)
        .conj()
        .imag.to(mix.input),
        "negated": torch._neg_view(wide[..., :40].contiguous()),
    }
    for name, x in layouts.items():
        dy = torch.randn(x.shape, device=CUDA).to(mix.input)
        dense = _forward_backward(layer, x.clone(memory_format=torch.contiguous_format), dy)
        ours = _forward_backward(layer, x, dy)
        for one, other in zip(ours, dense, strict=True):
            assert torch.equal(one, other), f"x {name}"
        # The same layouts as incoming gradients, sum()'s among them.
        y_shape = dy.clone()
        dense = _forward_backward(layer, y_shape, x.clone(memory_format=torch.contiguous_format))
        ours = _forward_backward(layer, y_shape, x)
        for one, other in zip(ours, dense, strict=True):
            assert torch.equal(one, other), f"dy {name}"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_stay_in_their_row(variant: Variant, mix: Mix, value: float) -> None:
    for length in (3, 40, 1000, 1024, 8192, 65_536, 200_003):
        layer = build(variant, length, mix.parameters)
        x, dy = _pair(mix, 33, length)
        y, dx, *_ = _forward_backward(layer, x, dy)
        for row in (0, 20, 32):
            case = f"row {row} of length {length}"
            spoilt = x.clone()
            spoilt[row, length // 2] = value
            y_spoilt, dx_spoilt, *gradients = _forward_backward(layer, spoilt, dy)
            others = torch.arange(33, device=CUDA) != row
            assert torch.equal(y_spoilt[others], y[others]), f"y beside {case}"
            assert torch.equal(dx_spoilt[others], dx[others]), f"dx beside {case}"
            assert y_spoilt[row].isnan().any(), case
            assert not gradients[0].isfinite().all(), f"dweight, {case}"
            if variant is LAYER_NORM:
                assert y_spoilt[row].isnan().all(), case
                assert gradients[1].isfinite().all(), f"dbias does not depend on x, {case}"


def test_a_nan_in_the_incoming_gradient_stays_in_its_row_and_columns(variant: Variant) -> None:
    for length in (40, 1000, 8192, 200_003):
        layer = build(variant, length)
        x, dy = _pair(FP32, 9, length)
        _, dx, *gradients = _forward_backward(layer, x, dy)
        dy[4, 2] = float("nan")
        _, dx_spoilt, *spoilt = _forward_backward(layer, x, dy)
        others = torch.arange(9, device=CUDA) != 4
        assert torch.equal(dx_spoilt[others], dx[others])
        columns = torch.arange(length, device=CUDA) != 2
        for one, other in zip(spoilt, gradients, strict=True):
            assert torch.equal(one[columns], other[columns])
            assert one[2].isnan()


@pytest.mark.parametrize("length", [1, 3, 40, 1000, 8192, 65_536, 200_003])
def test_eps_of_zero_makes_a_row_without_variance_nan(variant: Variant, length: int) -> None:
    layer = build(variant, length)
    layer.eps = 0.0
    x = torch.randn(3, length, device=CUDA)
    x[1] = 3.0 if variant is LAYER_NORM else 0.0
    y = layer(x)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all() or (variant is LAYER_NORM and length == 1)


def test_no_rows_and_no_columns(mix: Mix) -> None:
    for variant in VARIANTS:
        layer = build(variant, 40, mix.parameters)
        for rows in ((0,), (0, 3), (2, 0)):
            x, dy = _pair(mix, *rows, 40)
            y, dx, *gradients = _forward_backward(layer, x, dy)
            assert y.shape == dx.shape == x.shape
            for gradient, parameter in zip(gradients, layer.parameters(), strict=True):
                assert_same_bits(gradient, torch.zeros_like(parameter))
        empty = build(variant, 0, mix.parameters)
        assert empty(torch.ones(3, 0, device=CUDA, dtype=mix.input)).shape == (3, 0)


def test_a_weight_somewhere_else_is_an_error_and_not_a_crash(variant: Variant) -> None:
    x = torch.randn(3, 40, device=CUDA)
    layer = build(variant, 40)
    layer.weight = nn.Parameter(torch.ones(40))
    with pytest.raises(RuntimeError, match="device"):
        layer(x)
    with pytest.raises(RuntimeError, match="device"):
        build(variant, 40)(x.cpu())
    torch.cuda.synchronize()  # the device is still sound
    assert build(variant, 40)(x).isfinite().all()


def test_a_half_precision_input_may_meet_fp32_parameters_where_torch_refuses() -> None:
    layer = build(LAYER_NORM, 40)
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(3, 40, device=CUDA, dtype=dtype)
        assert layer(x).dtype == dtype
        with pytest.raises(RuntimeError, match="expected scalar type"):
            as_torch(layer)(x)


@pytest.mark.xdist_group("much GPU memory")  # in one process, one after the other
@pytest.mark.parametrize(
    ("rows", "length"),
    [(2**21 + 9, 1024), (2**31 // 1000 + 9, 1000), (2**31 // 40 + 9, 40), (10_738, 200_003)],
)
def test_more_than_2_to_the_31_elements(variant: Variant, rows: int, length: int) -> None:
    assert rows * length > 2**31
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < 30e9:
        pytest.skip(f"needs 30 GB of GPU memory, and {free / 1e9:.0f} GB are free")
    layer = build(variant, length)
    x = torch.empty(rows, length, device=CUDA, dtype=torch.bfloat16).normal_().requires_grad_()
    y = layer(x)
    # Only these rows send a gradient back, so that float64 can add them all up.
    some = torch.tensor([0, 1, rows // 3, rows // 2 + 1, rows - 2, rows - 1], device=CUDA)
    for part in (slice(0, 5), slice(rows // 2, rows // 2 + 5), slice(rows - 5, rows)):
        assert torch.equal(y[part], layer(x[part])), f"y of {part}"
    dy = torch.zeros_like(y)
    del y
    dy[some] = torch.randn(len(some), length, device=CUDA, dtype=torch.bfloat16)
    dx, *gradients = torch.autograd.grad(layer(x), [x, *layer.parameters()], dy)
    given, sent = x.detach()[some].requires_grad_(), dy[some]
    expected = torch.autograd.grad(layer(given), given, sent)[0]
    assert torch.equal(dx[some], expected)
    for part in (
        slice(2, 1000),
        slice(rows // 2 + 2, rows // 2 + 1000),
        slice(rows - 1000, rows - 2),
    ):
        assert not dx[part].any(), f"dx of {part}"
    del dx, dy
    double = as_torch(layer, double=True)
    y_double = double(given.detach().double())
    for one, other in zip(
        gradients,
        torch.autograd.grad(y_double, list(double.parameters()), sent.double()),
        strict=True,
    ):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.xdist_group("much GPU memory")
def test_one_billion_rows_of_one_element() -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 30e9:
        pytest.skip(f"needs 30 GB of GPU memory, and {free / 1e9:.0f} GB are free")
    layer = build(LAYER_NORM, 1, torch.bfloat16)
    x = torch.ones(2**30 + 1, 1, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    assert torch.equal(y.detach().amin(), layer.bias.detach()[0])
    assert torch.equal(y.detach().amax(), layer.bias.detach()[0])
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert not dx.any()
