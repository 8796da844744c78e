"""What is LayerNorm's and RMSNorm's own, on torch's class and on ours alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hfai.nn
from hfai.nn import to_hfai, to_torch
from tests.nn.operator_cases import (
    assert_same_bits,
    cotangents,
    layer_norm_reference,
    rms_norm_reference,
    run,
)

Build = Callable[..., nn.Module]


@pytest.fixture(params=["torch", "hfai"])
def layer_norm(request: pytest.FixtureRequest) -> Build:
    """Torch's class, then ours."""
    return nn.LayerNorm if request.param == "torch" else hfai.nn.LayerNorm


@pytest.fixture(params=["torch", "hfai"])
def rms_norm(request: pytest.FixtureRequest) -> Build:
    """Torch's class, then ours."""
    return nn.RMSNorm if request.param == "torch" else hfai.nn.RMSNorm


@pytest.fixture(params=["LayerNorm", "RMSNorm"])
def either(request: pytest.FixtureRequest) -> str:
    """The name of each of the two."""
    return str(request.param)


@pytest.fixture(params=["torch", "hfai"])
def norm(either: str, request: pytest.FixtureRequest) -> Build:
    """Each of the two as torch's class, then as ours."""
    build: Build = getattr(nn if request.param == "torch" else hfai.nn, either)
    return build


def _double(module: nn.Module) -> nn.Module:
    """Return torch's class in float64 on the CPU with the parameters that `module` has now."""
    cls = nn.LayerNorm if isinstance(module, nn.LayerNorm) else nn.RMSNorm
    double = cls(module.normalized_shape, module.eps)
    for name in dict(double.named_parameters()):
        value = getattr(module, name)
        setattr(double, name, None if value is None else nn.Parameter(value.double().cpu()))
    return double


def _check(module: nn.Module, x: Tensor, tolerance: float = 2e-5) -> None:
    """Compare outputs and all gradients with float64."""
    results = run(module, (x,))
    double = _double(module)
    reference = layer_norm_reference if isinstance(double, nn.LayerNorm) else rms_norm_reference
    expected = run(
        lambda t: reference(double, t),  # type: ignore[arg-type]
        (x.detach().double().cpu().requires_grad_(x.requires_grad),),
        double.named_parameters(),
    )
    torch.testing.assert_close(
        results.outputs[0].double().cpu(), expected.outputs[0], rtol=tolerance, atol=tolerance
    )
    assert results.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        if gradient is not None:
            scale = max(1.0, gradient.abs().max().item()) if gradient.numel() else 1.0
            torch.testing.assert_close(
                results.gradients[name].double().cpu(),
                gradient,
                rtol=tolerance,
                atol=tolerance * scale,
            )


def _random(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -0.9, 0.9)
    return module


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, ["weight", "bias"]),
        ({"bias": False}, ["weight"]),
        ({"elementwise_affine": False}, []),
        ({"elementwise_affine": False, "bias": True}, []),
    ],
)
def test_layer_norm_with_and_without_weight_and_bias(
    layer_norm: Build, device: torch.device, options: dict[str, Any], keys: list[str]
) -> None:
    module = _random(layer_norm(24, **options, device=device))
    assert list(module.state_dict()) == keys
    assert {name for name in ("weight", "bias") if getattr(module, name) is not None} == set(keys)
    _check(module, torch.randn(5, 24, device=device, requires_grad=True))


@pytest.mark.parametrize(("affine", "keys"), [(True, ["weight"]), (False, [])])
def test_rms_norm_with_and_without_weight(
    rms_norm: Build, device: torch.device, affine: bool, keys: list[str]
) -> None:
    module = _random(rms_norm(24, elementwise_affine=affine, device=device))
    assert list(module.state_dict()) == keys
    _check(module, torch.randn(5, 24, device=device, requires_grad=True))


def test_a_bias_without_a_weight_is_added(layer_norm: Build, device: torch.device) -> None:
    module = _random(layer_norm(24, device=device))
    module.weight = None
    _check(module, torch.randn(5, 24, device=device, requires_grad=True))


@pytest.mark.parametrize(
    "shape", [24, [24], (24,), torch.Size([24]), [2, 3, 4], torch.Size([4, 6])]
)
def test_normalized_shape_may_be_an_int_or_any_sequence(
    norm: Build, device: torch.device, shape: Any
) -> None:
    module = _random(norm(shape, device=device))
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    assert module.normalized_shape == dims
    for leading in ((), (1,), (5,), (2, 3)):
        _check(module, torch.randn(*leading, *dims, device=device, requires_grad=True))


@pytest.mark.parametrize("wrong", [(5, 4), (3, 4, 3), (12,), (4, 3), ()])
def test_a_shape_that_does_not_fit_is_refused_in_torchs_words(
    either: str, device: torch.device, wrong: tuple[int, ...]
) -> None:
    words = []
    for module in (getattr(nn, either)([3, 4]), getattr(hfai.nn, either)([3, 4])):
        with pytest.raises((RuntimeError, ValueError)) as error:
            module.to(device)(torch.randn(wrong, device=device))
        words.append((error.type, str(error.value)))
    assert words[0] == words[1]
    assert "normalized_shape" in words[0][1] or "dimensions" in words[0][1]


def test_a_normalized_shape_without_dimensions_is_refused(
    norm: Build, device: torch.device
) -> None:
    for x in (torch.randn(3, device=device), torch.randn((), device=device)):
        with pytest.raises(RuntimeError, match="at least 1-dimensional"):
            norm((), device=device)(x)


def test_a_weight_of_another_shape_is_refused(norm: Build, device: torch.device) -> None:
    module = norm(8, device=device)
    for wrong in (7, 1, 16):
        module.weight = nn.Parameter(torch.ones(wrong, device=device))
        with pytest.raises(RuntimeError, match="Expected weight to be of same shape"):
            module(torch.randn(2, 8, device=device))


def test_eps_is_inside_the_root_and_read_on_every_call(norm: Build, device: torch.device) -> None:
    module = _random(norm(24, eps=1e-5, device=device))
    x = (torch.randn(5, 24, device=device) * 1e-3).requires_grad_()
    for eps in (1e-5, 1.0, 1):
        module.eps = eps
        _check(module, x)


def test_eps_may_be_any_number(norm: Build, device: torch.device) -> None:
    module = _random(norm(24, device=device))
    x = torch.randn(5, 24, device=device)
    module.eps = 0.5
    expected = module(x)
    for eps in (np.float32(0.5), np.float64(0.5), torch.tensor(0.5).item()):
        module.eps = eps
        assert_same_bits(module(x).detach(), expected.detach())


def test_a_normalized_shape_may_be_a_list(norm: Build, device: torch.device) -> None:
    module = _random(norm(24, device=device))
    module.normalized_shape = [24]
    _check(module, torch.randn(5, 24, device=device, requires_grad=True))


def test_a_forward_kept_aside_outlives_the_conversion_back(
    norm: Build, device: torch.device
) -> None:
    module = _random(norm(24, device=device))
    kept = module.forward
    module.forward = lambda x: kept(x)
    to_torch(module)
    _check(module, torch.randn(5, 24, device=device, requires_grad=True))


def test_rms_norm_without_eps_takes_that_of_float32(rms_norm: Build, device: torch.device) -> None:
    module = _random(rms_norm(24, device=device))
    assert module.eps is None
    _check(module, (torch.randn(5, 24, device=device) * 1e-4).requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rms_norm_without_eps_takes_the_one_that_torch_takes(
    device: torch.device, dtype: torch.dtype
) -> None:
    # Small enough for eps to matter, so that another one would be seen.
    x = (torch.randn(5, 24, device=device) * 1e-3).to(dtype)
    ours, torchs = (cls(24, device=device, dtype=dtype)(x) for cls in (hfai.nn.RMSNorm, nn.RMSNorm))
    torch.testing.assert_close(ours, torchs)


@pytest.mark.parametrize("rows", [1, 7])
def test_a_constant_row_gives_the_bias(layer_norm: Build, device: torch.device, rows: int) -> None:
    module = _random(layer_norm(1000, device=device))
    x = torch.full((rows, 1000), 3.0, device=device, requires_grad=True)
    y = module(x)
    assert_same_bits(y.detach(), module.bias.detach().expand(rows, 1000).contiguous())


def test_eps_of_zero_makes_a_constant_row_non_finite_and_no_other(
    layer_norm: Build, device: torch.device
) -> None:
    x = torch.randn(3, 24, device=device)
    x[1] = 7.0
    y = layer_norm(24, eps=0.0, device=device)(x)
    assert not y[1].isfinite().any()  # NaN, or infinite where the mean is a rounding off
    assert y[[0, 2]].isfinite().all()


def test_eps_of_zero_makes_a_zero_row_of_rms_norm_nan_and_no_other(
    rms_norm: Build, device: torch.device
) -> None:
    x = torch.randn(3, 24, device=device)
    x[1] = 0.0
    y = rms_norm(24, eps=0.0, device=device)(x)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_stay_in_their_row(norm: Build, device: torch.device, value: float) -> None:
    module = _random(norm(24, device=device))
    x = torch.randn(5, 24, device=device)
    clean = run(module, (x.clone().requires_grad_(),))
    x[2, 3] = value
    results = run(module, (x.requires_grad_(),))
    others = [0, 1, 3, 4]
    assert not results.outputs[0][2].isfinite().all()
    assert_same_bits(results.outputs[0][others], clean.outputs[0][others])
    assert_same_bits(results.gradients["input.0"][others], clean.gradients["input.0"][others])


def test_a_large_common_offset_costs_no_accuracy(layer_norm: Build, device: torch.device) -> None:
    # E[x²] - E[x]² would cancel to nothing here. The mean itself is rounded to 1e-3 / 2.
    x = torch.randn(16, 1000, device=device) + 1e4
    y = layer_norm(1000, device=device)(x)
    double = x.double()
    centred = double - double.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert (y.double() - expected).abs().max() <= 2e-3


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_a_bf16_input_with_fp32_parameters_gives_bf16(either: str, device: torch.device) -> None:
    x = torch.randn(5, 24, device=device, dtype=torch.bfloat16, requires_grad=True)
    module = _random(getattr(hfai.nn, either)(24, device=device))
    y = module(x)
    assert y.dtype == torch.bfloat16
    _check(module, x, tolerance=2e-2)
    assert module.weight.grad.dtype == torch.float32
    assert x.grad.dtype == torch.bfloat16
    plain = _random(getattr(nn, either)(24, device=device))
    if either == "LayerNorm" and device.type == "cuda":
        # torch takes this mix on the CPU alone; ours takes it on both.
        with pytest.raises(RuntimeError, match="expected scalar type"):
            plain(x)
    else:
        assert plain(x).dtype == torch.bfloat16


def test_an_fp32_input_with_bf16_parameters_is_refused(
    layer_norm: Build, device: torch.device
) -> None:
    module = layer_norm(24, device=device, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"mixed dtype|expected scalar type"):
        module(torch.randn(5, 24, device=device))


def test_what_is_no_float_is_refused(layer_norm: Build, device: torch.device) -> None:
    module = layer_norm(24, device=device)
    for dtype in (torch.int64, torch.bool, torch.complex64):
        with pytest.raises(RuntimeError):
            module(torch.ones(5, 24, device=device).to(dtype))


def test_no_rows_give_no_rows_and_zero_gradients(norm: Build, device: torch.device) -> None:
    module = _random(norm(24, device=device))
    x = torch.randn(0, 3, 24, device=device, requires_grad=True)
    results = run(module, (x,))
    assert results.outputs[0].shape == (0, 3, 24)
    assert results.gradients["input.0"].shape == (0, 3, 24)
    for name, parameter in module.named_parameters():
        assert_same_bits(results.gradients[name], torch.zeros_like(parameter))


def test_rows_without_elements_are_accepted(norm: Build, device: torch.device) -> None:
    module = norm(0, device=device)
    x = torch.randn(3, 0, device=device, requires_grad=True)
    results = run(module, (x,))
    assert results.outputs[0].shape == (3, 0)
    assert results.gradients["input.0"].shape == (3, 0)


def test_a_row_of_one_element_gives_the_bias(layer_norm: Build, device: torch.device) -> None:
    module = _random(layer_norm(1, device=device))
    y = module(torch.randn(5, 1, device=device))
    assert_same_bits(y.detach(), module.bias.detach().expand(5, 1).contiguous())


@pytest.mark.parametrize("length", [2, 31, 985, 70_001])
def test_any_row_length_is_right(norm: Build, device: torch.device, length: int) -> None:
    module = _random(norm(length, device=device))
    _check(module, torch.randn(4, length, device=device, requires_grad=True), tolerance=1e-4)


def test_a_channels_last_input_gives_a_dense_output(
    layer_norm: Build, device: torch.device
) -> None:
    module = _random(layer_norm(5, device=device))
    x = torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last)
    _check(module, x.requires_grad_())
    assert module(x).is_contiguous()


def test_rows_do_not_depend_on_the_rows_beside_them(norm: Build, device: torch.device) -> None:
    module = _random(norm(40, device=device))
    x = torch.randn(64, 40, device=device)
    whole = module(x)
    for start, stop in ((0, 64), (0, 1), (17, 18), (3, 64)):
        torch.testing.assert_close(module(x[start:stop]), whole[start:stop], rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_strided_nested_tensor_is_normalised(layer_norm: Build, device: torch.device) -> None:
    module = _random(layer_norm(24, device=device))
    parts = [torch.randn(rows, 24, device=device) for rows in (2, 5)]
    y = module(torch.nested.nested_tensor(parts))
    assert y.is_nested
    for part, expected in zip(y.unbind(), parts, strict=True):
        torch.testing.assert_close(part, module(expected))


def test_a_jagged_nested_tensor_is_normalised(norm: Build, device: torch.device) -> None:
    module = _random(norm(24, device=device))
    parts = [torch.randn(rows, 24, device=device) for rows in (2, 5)]
    y = module(torch.nested.nested_tensor(parts, layout=torch.jagged))
    assert y.layout == torch.jagged
    for part, expected in zip(y.unbind(), parts, strict=True):
        torch.testing.assert_close(part, module(expected))


@pytest.mark.parametrize("mode", ["training", "inference fast path"])
def test_a_transformer_encoder_computes_the_same_after_the_swap(
    device: torch.device, mode: str
) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16), enable_nested_tensor=False)
    model = _random(model).to(device).train(mode == "training")
    x = torch.randn(3, 5, 16, device=device)
    with torch.set_grad_enabled(mode == "training"):
        before = model(x)
        to_hfai(model)
        assert type(model.layers[0].norm1) is hfai.nn.LayerNorm
        assert type(model.norm) is hfai.nn.LayerNorm
        after = model(x)
    torch.testing.assert_close(after, before)
    if device.type == "cpu":
        assert_same_bits(after.detach(), before.detach())


def test_only_the_weights_gradient_may_be_asked_for(norm: Build, device: torch.device) -> None:
    module = _random(norm(24, device=device))
    x = torch.randn(5, 24, device=device, requires_grad=True)
    expected = run(module, (x,)).gradients["weight"]
    y = module(x.detach())
    (gradient,) = torch.autograd.grad(y, module.weight, cotangents((y,)))
    assert_same_bits(gradient, expected)
