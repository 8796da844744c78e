"""Residual sums on a GPU: as accurate as torch's operators, repeatable, and used by the layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hfai.kernels.residual_norm import call, formula, launch, normalise_sum
from hfai.kernels.residual_norm.programs import Configuration, Types
from hfai.nn import to_hfai
from tests.gpu.nn.norms import poison
from tests.nn.operator_cases import assert_same_bits

CUDA = torch.device("cuda")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
MIXED = "mixed"  # half-precision branches and fp32 residuals, as under autocast
NOISE = {FP32: 1e-6, FP16: 5e-4, BF16: 4e-3, MIXED: 1e-6}


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "LEAST_ELEMENTS", 0)


def parts(rows: int, length: int, dtype: Any) -> list[Tensor]:
    """Return branch, branch_bias, residual, weight and bias."""
    branch, rest = (BF16, FP32) if dtype is MIXED else (dtype, dtype)
    shapes = ((rows, length), (length,), (rows, length), (length,), (length,))
    types = (branch, rest, rest, rest, rest)
    return [
        torch.randn(shape, device=CUDA).to(t).requires_grad_()
        for shape, t in zip(shapes, types, strict=True)
    ]


def by_torch(branch: Tensor, shift: Tensor, residual: Tensor, *affine: Tensor) -> Tensor:
    return F.layer_norm(residual + (branch + shift), branch.shape[-1:], *affine)


def errors(made: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(made, exact, strict=True)]


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16, MIXED], ids=str)
@pytest.mark.parametrize("rows", [1, 37, 5000])
@pytest.mark.parametrize("length", [8, 256, 768, 1000, 1024, 2560, 4096])
def test_errors_are_at_most_one_and_a_half_times_torchs(length: int, rows: int, dtype: Any) -> None:
    torch.manual_seed(length + rows)
    given = parts(rows, length, dtype)
    with torch.autocast("cuda", BF16, enabled=dtype is MIXED):
        torchs = by_torch(*given)
    dy = torch.randn(torchs.shape, device=CUDA).to(torchs.dtype)
    expected = [torchs, *torch.autograd.grad(torchs, given, dy)]
    leaves = [t.detach().double().requires_grad_() for t in given]
    true = by_torch(*leaves)
    exact = [true, *torch.autograd.grad(true, leaves, dy.double())]
    poison(*(4 * rows * length,) * 6)
    with torch.autocast("cuda", BF16, enabled=dtype is MIXED):
        y = normalise_sum(*given, 1e-5, 0.0).y
    assert y is not None
    assert y.dtype is torchs.dtype
    found = [y, *torch.autograd.grad(y, given, dy)]
    for ours, theirs in zip(errors(found, exact), errors(expected, exact), strict=True):
        assert ours <= 1.5 * theirs + NOISE[dtype]


@pytest.mark.parametrize("dtype", [FP32, BF16, MIXED], ids=str)
def test_all_outputs_at_once_and_their_gradients(dtype: Any) -> None:
    given = parts(300, 1024, dtype)
    with torch.autocast("cuda", BF16, enabled=dtype is MIXED):
        z, y, half = normalise_sum(*given, 1e-5, 0.0, z=True, half=True)
    assert z is not None
    assert y is not None
    assert half is not None
    assert half.dtype is given[0].dtype
    coming = [torch.randn_like(t) for t in (z, y, half)]
    found = torch.autograd.grad([z, y, half], given, coming)
    leaves = [t.detach().double().requires_grad_() for t in given]
    exact_z = leaves[2] + leaves[0] + leaves[1]
    exact_y = F.layer_norm(exact_z, (1024,), *leaves[3:])
    total = coming[1].double() + coming[2].double()
    exact = torch.autograd.grad([exact_z, exact_y], leaves, [coming[0].double(), total])
    bound = 1e-5 if dtype is FP32 else 1e-2
    assert max(errors(list(found), list(exact))) < bound


def test_dropout_keeps_what_its_mask_says_and_as_much_as_asked() -> None:
    rows, length, p = 3000, 1024, 0.1
    types = Types(BF16, FP32, FP32, FP32)
    configuration = Configuration(0, length, types, True, True, True, True)
    given = [t.detach() for t in parts(rows, length, MIXED)]
    made = launch.forward(
        configuration, *given, 1e-5, p, z=True, y=True, half=False, for_backward=True
    )
    assert made.mask is not None
    assert made.z is not None
    keep = formula.kept(made.mask, made.z.shape)
    share, several = keep.double().mean().item(), (p * (1 - p) / keep.numel()) ** 0.5 * 5
    assert share == pytest.approx(1 - p, abs=several)
    assert keep.double().mean(0).sub(1 - p).abs().max() < 0.05
    assert keep.double().mean(1).sub(1 - p).abs().max() < 0.08
    for shift in (1, 2, 3, 4, 8):
        both = (keep[:, shift:] & keep[:, :-shift]).double().mean().item()
        assert both == pytest.approx((1 - p) ** 2, abs=2e-3)
    branch = torch.where(keep, (given[0].float() + given[1]) / (1 - p), 0.0)
    torch.testing.assert_close(made.z, given[2] + branch, rtol=1e-6, atol=1e-6)


def test_bits_repeat() -> None:
    given = parts(5000, 1024, MIXED)
    dy = torch.randn(5000, 1024, device=CUDA)

    def run() -> list[Tensor]:
        torch.manual_seed(7)
        with torch.autocast("cuda", BF16):
            y = normalise_sum(*given, 1e-5, 0.1).y
        assert y is not None
        return [y, *torch.autograd.grad(y, given, dy)]

    first = run()
    for again in (run(), run()):
        for one, other in zip(first, again, strict=True):
            assert_same_bits(one, other)


def test_a_captured_graph_draws_anew_each_time() -> None:
    given = [t.detach() for t in parts(64, 256, FP32)]
    normalise_sum(*given, 1e-5, 0.5)  # kernels are compiled
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        normalise_sum(*given, 1e-5, 0.5)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        y = normalise_sum(*given, 1e-5, 0.5).y
    assert y is not None
    results = []
    for _ in range(2):
        graph.replay()
        results.append(y.clone())
    assert not torch.equal(*results)
    assert all(result.isfinite().all() for result in results)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_encoder_layers_are_as_accurate_as_torchs(norm_first: bool, autocast: bool) -> None:
    torch.manual_seed(0)
    torchs = nn.TransformerEncoderLayer(
        256, 4, 512, dropout=0.0, batch_first=True, norm_first=norm_first, device=CUDA
    )
    ours = to_hfai(copy.deepcopy(torchs))
    x = torch.randn(6, 100, 256, device=CUDA)
    dy = torch.randn_like(x)

    def run(layer: nn.Module, dtype: torch.dtype) -> list[Tensor]:
        leaf = x.to(dtype).requires_grad_()
        with torch.autocast("cuda", BF16, enabled=autocast and dtype is FP32):
            y = layer(leaf)
        return [y, *torch.autograd.grad(y, [leaf, *layer.parameters()], dy.to(dtype))]

    exact = run(copy.deepcopy(torchs).double(), torch.float64)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True  # else attention is torch's
    try:
        found, expected = run(ours, FP32), run(torchs, FP32)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    for mine, theirs in zip(errors(found, exact), errors(expected, exact), strict=True):
        assert mine <= 1.5 * theirs + 1e-6


def test_an_encoder_with_dropout_learns_as_torchs() -> None:
    def last_losses(swap: bool) -> float:
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True, device=CUDA)
        encoder: nn.Module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        encoder = to_hfai(encoder) if swap else encoder
        optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
        generator = torch.Generator(CUDA).manual_seed(0)
        losses = []
        for _ in range(150):
            x = torch.randn(16, 32, 64, device=CUDA, generator=generator)
            with torch.autocast("cuda", BF16):
                loss = F.mse_loss(encoder(x), x.roll(1, 1).cumsum(1).tanh())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return sum(losses[-20:]) / 20

    assert last_losses(True) == pytest.approx(last_losses(False), rel=0.03)
