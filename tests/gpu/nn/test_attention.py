"""Attention on a GPU: as accurate as torch's over poisoned memory, captured, repeatable bits."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import hfai
from hfai.kernels.mha import call, cores, dispatch, weights
from hfai.kernels.mha.call import Options
from hfai.kernels.mha.projections import Layout
from hfai.nn import to_hfai, transformer
from tests.gpu.nn.norms import kernels, poison
from tests.nn.operator_cases import assert_same_bits

CUDA = torch.device("cuda")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Below this no two orders of summation agree, and neither error says anything of the kernels.
NOISE = {FP32: 1e-6, FP16: 5e-4, BF16: 4e-3}


LIMITS = {
    "LEAST_WORK_IN_INFERENCE": (dispatch.LEAST_WORK_IN_INFERENCE, 0),
    "LEAST_WORK_WITHOUT_WEIGHTS": (dispatch.LEAST_WORK_WITHOUT_WEIGHTS, 0),
    "INSTEAD_OF_ONE_OPERATOR": (dispatch.INSTEAD_OF_ONE_OPERATOR, True),
    "WITHOUT_TF32": (dispatch.WITHOUT_TF32, True),
}
"""What users get, and what sends all calls our way: code behind a limit is tested all the same."""


@pytest.fixture(autouse=True)
def _all_calls_go_our_way(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (_, all_calls) in LIMITS.items():
        monkeypatch.setattr(dispatch, name, all_calls)


@pytest.fixture(params=[False, True], ids=["ieee", "tf32"])
def tf32(request: pytest.FixtureRequest) -> Any:
    """Both of torch's switches for fp32 products."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = request.param
    yield request.param
    torch.backends.cuda.matmul.allow_tf32 = before


def modules(
    features: int, heads: int, dtype: torch.dtype, **options: Any
) -> tuple[nn.MultiheadAttention, ...]:
    """Return ours, torch's and torch's in float64, with the same parameters, on the GPU."""
    torchs = nn.MultiheadAttention(features, heads, **options).to(CUDA, dtype)
    with torch.no_grad():
        for parameter in torchs.parameters():
            parameter.uniform_(-1.5 * features**-0.5, 1.5 * features**-0.5)
    return to_hfai(copy.deepcopy(torchs)), torchs, copy.deepcopy(torchs).double()


def results(module: nn.MultiheadAttention, inputs: list[Tensor], **options: Any) -> list[Tensor]:
    """Return the output, averaged weights if any, and all gradients of the output."""
    dtype = module.out_proj.weight.dtype
    cast = {id(x): x.to(dtype).requires_grad_() for x in inputs}
    given = [cast[id(x)] for x in inputs]
    options = {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in options.items()
    }
    poison(*(4 * x.nbytes for x in given), 16 * given[0].nbytes)
    y, averaged = module(*given, **options)
    generator = torch.Generator(CUDA).manual_seed(1)
    dy = torch.randn(y.shape, generator=generator, device=CUDA, dtype=torch.float64).to(y.dtype)
    poison(*(4 * x.nbytes for x in given), 16 * given[0].nbytes)
    gradients = torch.autograd.grad(y, [*cast.values(), *module.parameters()], dy)
    return [y.detach(), *([] if averaged is None else [averaged.detach()]), *gradients]


def is_covered(module: nn.MultiheadAttention, *inputs: Tensor, **options: Any) -> bool:
    given = Options(None, True, None, True, False)._replace(**options)
    return call.attend(module, *inputs, given) is not None


def compare(
    ours: list[Tensor], torchs: list[Tensor], doubles: list[Tensor], dtype: torch.dtype
) -> None:
    """Hold ours to 1.5 times torch's error against float64, noise aside."""
    for i, (one, other, exact) in enumerate(zip(ours, torchs, doubles, strict=True)):
        assert one.shape == exact.shape
        assert one.dtype == other.dtype
        errors = [float(((t.double() - exact).norm() / exact.norm()).item()) for t in (one, other)]
        # torch's own may be NaN: cuDNN's gradients with a mask at some lengths are.
        allowed = 1.5 * errors[1] if math.isfinite(errors[1]) else NOISE[dtype]
        assert errors[0] <= allowed + NOISE[dtype], f"result {i}: {errors}"


def masks(kind: str, batch: int, heads: int, rows: int, keys: int) -> dict[str, Any]:
    generator = torch.Generator(CUDA).manual_seed(5)

    def drawn(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=CUDA)

    padding, blocked = drawn(batch, keys) < 0.3, drawn(rows, keys) < 0.3
    padding[:, 0] = blocked[:, 0] = False
    causal = torch.ones(rows, keys, dtype=torch.bool, device=CUDA).triu(1)
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "float": {"attn_mask": drawn(rows, keys) * 2},
        "of each head": {"attn_mask": drawn(batch * heads, rows, keys) * 2},
        "both": {"key_padding_mask": padding, "attn_mask": blocked},
        "causal": {"attn_mask": causal, "is_causal": True},
    }[kind]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("head", [64, 32, 80, 128])
@pytest.mark.parametrize("length", [16, 64, 100, 256, 320, 576])
def test_errors_are_at_most_one_and_a_half_times_torchs(
    length: int, head: int, dtype: torch.dtype, tf32: bool
) -> None:
    if dtype != FP32 and tf32:
        pytest.skip("TF32 is fp32's")
    ours, torchs, double = modules(2 * head, 2, dtype, batch_first=True)
    x = torch.randn(3, length, 2 * head, device=CUDA).to(dtype)
    for need_weights in (True, False):
        options = {"need_weights": need_weights}
        assert is_covered(ours, x, x, x, **options)
        compare(*(results(m, [x] * 3, **options) for m in (ours, torchs, double)), dtype)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("kind", ["padding", "float", "of each head", "both", "causal"])
@pytest.mark.parametrize("rows", [64, 128, 320])
@pytest.mark.parametrize("keys", [64, 200, 576])
def test_masked_and_cross_attention_are_as_accurate(
    keys: int, rows: int, kind: str, dtype: torch.dtype
) -> None:
    ours, torchs, double = modules(128, 2, dtype)
    query = torch.randn(rows, 3, 128, device=CUDA).to(dtype)
    key = torch.randn(keys, 3, 128, device=CUDA).to(dtype)
    options = masks(kind, 3, 2, rows, keys)
    for need_weights in (True, False):
        options["need_weights"] = need_weights
        given = [query, key, key]
        compare(*(results(m, given, **options) for m in (ours, torchs, double)), dtype)


@pytest.mark.parametrize("core", [dispatch.FLASH, dispatch.EFFICIENT, dispatch.CUDNN])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("length", [320, 384])
def test_each_of_torchs_cores_gives_the_same(
    core: cores.Core, batch_first: bool, length: int
) -> None:
    backends = {
        dispatch.FLASH: SDPBackend.FLASH_ATTENTION,
        dispatch.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
        dispatch.CUDNN: SDPBackend.CUDNN_ATTENTION,
    }
    ours, torchs, double = modules(128, 2, BF16, batch_first=batch_first)
    x = torch.randn(3, length, 128, device=CUDA).to(BF16)
    x = x if batch_first else x.transpose(0, 1).contiguous()
    # Outside: none of the cores takes float64.
    exact = [results(double, [x] * 3, need_weights=weights) for weights in (True, False)]
    with sdpa_kernel(backends[core]):
        q, k, v = Layout(2, batch_first).split([x.repeat(1, 1, 3)])
        if dispatch.torchs_core(q, k, v, None, False, 0.0) is not core:
            pytest.skip(f"{core.name} does not take this on this device")
        for need_weights, doubles in zip((True, False), exact, strict=True):
            found = [results(m, [x] * 3, need_weights=need_weights) for m in (ours, torchs)]
            compare(*found, doubles, BF16)


def test_a_mask_where_cudnn_has_nan_gradients_goes_elsewhere() -> None:
    q = torch.randn(2, 320, 2, 64, device=CUDA, dtype=BF16)
    bias = torch.zeros(2, 1, 1, 320, device=CUDA, dtype=BF16)
    assert dispatch.torchs_core(q, q, q, bias, False, 0.0) is not dispatch.CUDNN


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("length", [64, 512])
def test_weights_on_the_side_are_those_of_the_formula(length: int, dtype: torch.dtype) -> None:
    q, k = torch.randn(2, 2, length, 4, 64, device=CUDA).to(dtype).unbind()
    _, kept = dispatch.EFFICIENT.forward(q, k, k, None, False)
    made = weights.averaged(q, k, kept, None, False)
    exact = torch.einsum("blhd,bshd->bhls", q.double(), k.double()).div(8).softmax(-1).mean(1)
    assert ((made - exact).norm() / exact.norm()).item() < 4 * NOISE[dtype]


@pytest.mark.parametrize("length", [64, 320])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_rows_without_any_key_are_what_torch_makes_of_them(
    training: bool, need_weights: bool, length: int
) -> None:
    ours, torchs, _ = (m.train(training) for m in modules(128, 2, BF16, batch_first=True))
    x = torch.randn(3, length, 128, device=CUDA, dtype=BF16)
    padding = torch.zeros(3, length, dtype=torch.bool, device=CUDA)
    padding[1] = True
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            options = {"key_padding_mask": padding, "need_weights": need_weights}
            found, expected = ours(x, x, x, **options), torchs(x, x, x, **options)
        for one, other in zip(found, expected, strict=True):
            if one is not None:
                torch.testing.assert_close(one, other, rtol=0.1, atol=0.1, equal_nan=True)


def test_more_batches_of_heads_than_a_grid_has_rows() -> None:
    ours, torchs, _ = modules(64, 8, BF16, batch_first=True)
    x = torch.randn(9000, 16, 64, device=CUDA, dtype=BF16)
    with torch.no_grad():
        found, expected = ours(x, x, x), torchs(x, x, x)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("length", [64, 256])
@pytest.mark.parametrize("need_weights", [True, False])
def test_short_sequences_give_the_same_bits_again(length: int, need_weights: bool) -> None:
    ours, _, _ = modules(512, 8, BF16, batch_first=True)
    x = torch.randn(40, length, 512, device=CUDA, dtype=BF16)
    first = results(ours, [x] * 3, need_weights=need_weights)
    for _ in range(3):
        assert_same_bits(results(ours, [x] * 3, need_weights=need_weights), first)


@pytest.mark.parametrize("length", [64, 256, 512])
@pytest.mark.parametrize("need_weights", [True, False])
def test_a_call_is_captured_in_a_graph(length: int, need_weights: bool) -> None:
    ours, _, _ = modules(128, 2, BF16, batch_first=True)
    x = torch.randn(4, length, 128, device=CUDA, dtype=BF16).requires_grad_()

    def step() -> list[Tensor]:
        y, averaged = ours(x, x, x, need_weights=need_weights)
        gradients = torch.autograd.grad(y, [x, *ours.parameters()], torch.ones_like(y))
        return [y, *([averaged] if need_weights else []), *gradients]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    for one, other in zip(made, step(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("length", [64, 320])
def test_autocast_gives_torchs_types_and_values(length: int, need_weights: bool) -> None:
    ours, torchs, double = modules(128, 2, FP32, batch_first=True)
    x = torch.randn(3, length, 128, device=CUDA)
    found = []
    for module in (ours, torchs):
        with torch.autocast("cuda", BF16):
            assert module is torchs or is_covered(ours, x, x, x, need_weights=need_weights)
            found.append(results(module, [x] * 3, need_weights=need_weights))
    compare(*found, results(double, [x] * 3, need_weights=need_weights), BF16)


@pytest.mark.parametrize("length", [64, 320])
def test_dropout_without_weights_is_unbiased_and_repeats_by_seed(length: int) -> None:
    ours, _, _ = modules(128, 2, BF16, batch_first=True, dropout=0.2)
    x = torch.randn(3, length, 128, device=CUDA, dtype=BF16)
    assert is_covered(ours, x, x, x, need_weights=False)
    with torch.no_grad():
        runs = []
        for seed in range(64):
            torch.manual_seed(seed)
            runs.append(ours(x, x, x, need_weights=False)[0])
        torch.manual_seed(3)
        assert_same_bits(ours(x, x, x, need_weights=False)[0], runs[3])
        kept = ours.eval()(x, x, x, need_weights=False)[0]
    mean = torch.stack(runs).float().mean(0)
    assert ((mean - kept).norm() / kept.norm()).item() < 0.15


@pytest.mark.parametrize("length", [64, 320])
def test_gradients_of_gradients_and_through_weights_are_torchs(length: int) -> None:
    found = []
    for module in modules(128, 2, FP32, batch_first=True)[:2]:
        torch.manual_seed(2)
        x = torch.randn(2, length, 128, device=CUDA, requires_grad=True)
        y, averaged = module(x, x, x)
        loss = y.square().sum() + averaged.square().sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), [x, *module.parameters()]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2 * float(other.abs().max()))


def test_training_the_default_call_writes_no_scores_of_each_head() -> None:
    ours, torchs, _ = modules(512, 8, BF16, batch_first=True)
    # So large that cuBLAS's workspaces and the parameters' gradients, some MiB, do not count.
    x = torch.randn(2000, 64, 512, device=CUDA, dtype=BF16).requires_grad_()

    def peak(module: nn.Module) -> int:
        for _ in range(2):  # the first compiles, and allocates what is kept
            x.grad = None
            module.zero_grad()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            y, _ = module(x, x, x)
            y.sum().backward()
            torch.cuda.synchronize()
            highest = torch.cuda.max_memory_allocated() - before
        return highest

    assert peak(ours) <= 0.85 * peak(torchs)  # 0.73 of it at 5000 sequences, as measured
    names = kernels(lambda: ours(x, x, x)[0].sum().backward())
    assert not any("softmax" in name.lower() for name in names)


@pytest.mark.parametrize("need_weights", [True, False])
def test_compiled_gives_torchs_values(need_weights: bool) -> None:
    torch._dynamo.reset()
    ours, torchs, double = modules(128, 2, BF16, batch_first=True)
    x = torch.randn(3, 96, 128, device=CUDA, dtype=BF16)
    compiled = torch.compile(ours, fullgraph=True)
    found = results(compiled, [x] * 3, need_weights=need_weights)  # type: ignore[arg-type]
    others = [results(m, [x] * 3, need_weights=need_weights) for m in (torchs, double)]
    compare(found, *others, BF16)
    torch._dynamo.reset()


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_layers_and_packed_encoders_are_as_accurate(
    monkeypatch: pytest.MonkeyPatch, masked: bool, training: bool, norm_first: bool
) -> None:
    monkeypatch.setattr(transformer, "LEAST_WORK_IN_EVALUATION", 0)
    layer = nn.TransformerEncoderLayer(
        128, 2, 256, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    torchs = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(CUDA, BF16)
    torchs.train(training)
    ours, packed = to_hfai(copy.deepcopy(torchs)), to_hfai(copy.deepcopy(torchs))
    packed.packed = True  # type: ignore[assignment]
    x = torch.randn(4, 72, 128, device=CUDA, dtype=BF16)
    padding = torch.arange(72, device=CUDA) >= torch.tensor([72, 5, 40, 60], device=CUDA)[:, None]
    counted = ~padding if masked else torch.ones_like(padding)
    options = {"src_key_padding_mask": padding} if masked else {}
    exact = copy.deepcopy(torchs).double()(x.double(), **options)[counted]
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            found = [m(x, **options)[counted] for m in (torchs, ours, packed)]
        errors = [((y.double() - exact).norm() / exact.norm()).item() for y in found]
        assert errors[1] <= 1.5 * errors[0] + NOISE[BF16]
        assert errors[2] <= 1.5 * errors[0] + NOISE[BF16]


def test_explain_says_which_path_and_why() -> None:
    ours, _, _ = modules(128, 2, BF16)
    (row,) = hfai.explain(ours)
    assert row.path == "hfai"
    assert "fused attention" in row.reason
    for words, options in (("add_zero_attn", {"add_zero_attn": True}), ("float64", {})):
        module = modules(128, 2, torch.float64 if words == "float64" else BF16, **options)[0]
        (row,) = hfai.explain(module)
        assert row.path == "torch"
        assert words in row.reason


def test_what_was_slower_or_not_measured_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (given, _) in LIMITS.items():
        monkeypatch.setattr(dispatch, name, given)
    ours, _, _ = modules(128, 2, BF16, batch_first=True)
    x = torch.randn(2, 257, 128, device=CUDA, dtype=BF16)
    assert is_covered(ours, x, x, x)
    with torch.no_grad():
        assert not is_covered(ours, x, x, x)
    single = modules(128, 2, FP32, batch_first=True)[0]
    x = torch.randn(2, 64, 128, device=CUDA)
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for allowed in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            assert is_covered(single, x, x, x) == allowed
            (row,) = hfai.explain(single)
            assert row.path == ("hfai" if allowed else "torch")
            assert allowed or "without TF32" in row.reason
            with torch.autocast("cuda", BF16):
                assert is_covered(single, x, x, x)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_another_stream_and_not_the_current_device_are_right() -> None:
    ours, torchs, _ = modules(128, 2, BF16, batch_first=True)
    x = torch.randn(3, 64, 128, device=CUDA, dtype=BF16)
    expected = torchs(x, x, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = ours(x, x, x)
    stream.synchronize()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)


def test_inputs_of_every_layout_are_read_right() -> None:
    ours, torchs, _ = modules(128, 2, BF16, batch_first=True)
    whole = torch.randn(3, 65, 130, device=CUDA, dtype=BF16)
    for batch_first, part in itertools.product((True, False), range(3)):
        ours.batch_first = torchs.batch_first = batch_first
        x = whole[:, 1:, part : part + 128] if part else whole.transpose(0, 1)[..., :128]
        found, expected = ours(x, x, x), torchs(x, x, x)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("length", [20, 100, 300])
@pytest.mark.parametrize("lowered", [-1e9, torch.finfo(torch.bfloat16).min])
def test_rows_that_a_mask_lowers_by_large_numbers_keep_their_weights(
    lowered: float, length: int, gradients: bool
) -> None:
    ours, torchs, double = modules(64, 2, BF16, batch_first=True)
    x = torch.randn(2, length, 64, device=CUDA)
    mask = torch.zeros(length, length, device=CUDA)
    mask[3] = lowered
    with torch.set_grad_enabled(gradients):
        _, weights_of_ours = ours(*[x.to(BF16)] * 3, attn_mask=mask.to(BF16))
    assert (weights_of_ours.float().sum(-1) - 1).abs().max() < 0.03
    if gradients:
        compare(*(results(m, [x] * 3, attn_mask=mask) for m in (ours, torchs, double)), BF16)
