"""Where the kernels run and where torch's do, and that they behave as work on a CUDA stream."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import hfai
from tests.gpu.nn.norms import (
    BF16,
    CUDA,
    FP16,
    FP32,
    LAYER_NORM,
    MIXES,
    RMS_NORM,
    VARIANTS,
    Mix,
    Variant,
    as_torch,
    build,
    is_ours,
    is_torchs_norm,
    kernels,
)
from tests.nn.operator_cases import assert_same_bits


@pytest.fixture(params=[LAYER_NORM, RMS_NORM], ids=lambda variant: variant.name)
def variant(request: pytest.FixtureRequest) -> Variant:
    chosen: Variant = request.param
    return chosen


def _train(layer: nn.Module, x: Tensor) -> None:
    layer(x.detach().requires_grad_()).sum().backward()


def _results(layer: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    given = x.detach().requires_grad_()
    y = layer(given)
    return y.detach(), *torch.autograd.grad(y, [given, *layer.parameters()], dy)


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
@pytest.mark.parametrize("each", VARIANTS, ids=lambda variant: variant.name)
def test_training_runs_our_kernels_and_none_of_torchs(each: Variant, mix: Mix) -> None:
    layer = build(each, 1000, mix.parameters)
    x = torch.randn(64, 1000, device=CUDA).to(mix.input)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=mix.autocast):
            y = layer(x.detach().requires_grad_())
        y.sum().backward()

    ran = kernels(step)
    ours = [name for name in ran if is_ours(name)]
    assert len(ours) >= 2, f"forward and backward are not both there: {ran}"
    assert not any(is_torchs_norm(name) for name in ran), ran


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_inference_is_one_kernel_of_ours(variant: Variant, mode: Callable[[], object]) -> None:
    layer = build(variant, 1000).requires_grad_(False)
    x = torch.randn(64, 1000, device=CUDA)

    def call() -> None:
        with mode():  # type: ignore[attr-defined]
            layer(x)

    ran = kernels(call)
    assert len(ran) == 1, ran
    assert is_ours(ran[0])


@pytest.mark.parametrize("length", [1, 7, 40, 1024, 65_536, 200_003, 1_000_003])
def test_rows_of_every_length_run_our_kernels(variant: Variant, length: int) -> None:
    layer = build(variant, length)
    x = torch.randn(4, length, device=CUDA)
    ran = kernels(lambda: _train(layer, x))
    assert sum(is_ours(name) for name in ran) >= 2, ran
    assert not any(is_torchs_norm(name) for name in ran), ran


def test_a_default_device_does_not_turn_our_kernels_off(variant: Variant) -> None:
    layer = build(variant, 1000)
    x = torch.randn(64, 1000, device=CUDA)
    with torch.device("cuda"):
        ran = kernels(lambda: _train(layer, x))
    assert any(is_ours(name) for name in ran), ran


def test_saved_tensor_hooks_do_not_turn_our_kernels_off(variant: Variant) -> None:
    layer = build(variant, 1000)
    x = torch.randn(64, 1000, device=CUDA)
    with torch.autograd.graph.save_on_cpu():
        ran = kernels(lambda: _train(layer, x))
    assert sum(is_ours(name) for name in ran) >= 2, ran


class _Watching(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def _double(layer: nn.Module, x: Tensor) -> None:
    layer.double()(x.double())


def _vmap(layer: nn.Module, x: Tensor) -> None:
    torch.func.vmap(layer)(x.unsqueeze(1))


def _jvp(layer: nn.Module, x: Tensor) -> None:
    torch.func.jvp(layer, (x,), (x,))


def _function_mode(layer: nn.Module, x: Tensor) -> None:
    with _Watching():
        layer(x)


@pytest.mark.parametrize("call", [_double, _vmap, _jvp, _function_mode])
def test_what_the_kernels_do_not_cover_runs_torchs(
    variant: Variant, call: Callable[[nn.Module, Tensor], None]
) -> None:
    layer = build(variant, 1000)
    x = torch.randn(64, 1000, device=CUDA)
    ran = kernels(lambda: call(layer, x))
    assert ran
    assert not any(is_ours(name) for name in ran), ran


@pytest.mark.parametrize("call", [_vmap, _jvp])
def test_a_transformed_call_that_comes_first_leaves_plain_calls_to_our_kernels(
    variant: Variant, call: Callable[[nn.Module, Tensor], None]
) -> None:
    layer = build(variant, 1237 if call is _vmap else 1239)  # lengths that no other test has
    x = torch.randn(64, *layer.normalized_shape, device=CUDA)
    call(layer, x)
    ran = kernels(lambda: layer(x))
    assert any(is_ours(name) for name in ran), ran


@pytest.mark.parametrize("mix", [FP32, FP16, BF16], ids=lambda mix: mix.name)
def test_explain_says_hfai_where_our_kernels_run(variant: Variant, mix: Mix) -> None:
    (row,) = hfai.explain(build(variant, 1000, mix.parameters))
    assert (row.path, row.layer) == ("hfai", variant.layer)
    assert row.reason


def test_explain_says_torch_and_why_elsewhere(variant: Variant) -> None:
    (double,) = hfai.explain(build(variant, 1000, torch.float64))
    assert double.path == "torch"
    assert "float64" in double.reason
    (cpu,) = hfai.explain(build(variant, 1000).cpu())
    assert cpu.path == "torch"
    assert "cpu" in cpu.reason.lower()


def test_a_cuda_graph_replays_forward_and_backward_on_new_data(variant: Variant) -> None:
    for length in (40, 1000, 8192, 65_536, 200_003):
        layer = build(variant, length)
        x = torch.randn(37, length, device=CUDA, requires_grad=True)
        dy = torch.randn(37, length, device=CUDA)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # compiles, and gives autograd its streams
            _results(layer, x, dy)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
            captured = (y, *torch.autograd.grad(y, [x, *layer.parameters()], dy))
        for _ in range(3):
            with torch.no_grad():
                x.normal_()
                dy.normal_()
                for parameter in layer.parameters():
                    parameter.normal_()
            graph.replay()
            replayed = tuple(t.detach().clone() for t in captured)
            assert_same_bits(replayed, _results(layer, x, dy))


def test_make_graphed_callables_takes_the_layer(variant: Variant) -> None:
    layer = build(variant, 1000)
    x, dy = torch.randn(2, 64, 1000, device=CUDA)
    expected = _results(layer, x, dy)
    graphed = torch.cuda.make_graphed_callables(layer, (x.clone().requires_grad_(),))
    given = x.clone().requires_grad_()
    y = graphed(given)
    y.backward(dy)
    assert_same_bits(y.detach(), expected[0])
    assert_same_bits(given.grad, expected[1])


def test_a_call_does_not_wait_for_the_gpu(variant: Variant) -> None:
    layer = build(variant, 1000)
    x = torch.randn(64, 1000, device=CUDA)
    _train(layer, x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _train(layer, x)
        with torch.no_grad():
            layer(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_kernels_run_on_the_current_stream(variant: Variant) -> None:
    layer = build(variant, 1000)
    x, dy, late = torch.randn(3, 64, 1000, device=CUDA)
    expected = _results(layer, late, dy)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # some 50 ms: a kernel on another stream would see the old x
        x.copy_(late)
        results = _results(layer, x, dy)
    stream.synchronize()
    assert_same_bits(results, expected)


def test_streams_do_not_disturb_each_other(variant: Variant) -> None:
    layer = build(variant, 768)
    streams = [torch.cuda.Stream() for _ in range(8)]
    data = [torch.randn(2, 4096, 768, device=CUDA) for _ in streams]
    expected = [_results(layer, *pair) for pair in data]
    torch.cuda.synchronize()
    results: list[list[tuple[Tensor, ...]]] = [[] for _ in streams]
    for _ in range(10):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[index].append(_results(layer, *data[index]))
    torch.cuda.synchronize()
    for repeated, right in zip(results, expected, strict=True):
        for result in repeated:
            assert_same_bits(result, right)


def test_the_first_call_may_come_from_several_threads_at_once(variant: Variant) -> None:
    layer = build(variant, 12_347)  # a length that no other test has compiled
    x, dy = torch.randn(2, 5, 12_347, device=CUDA)
    results: list[tuple[Tensor, ...]] = []

    def work() -> None:
        results.append(_results(layer, x, dy))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for result in results[1:]:
        assert_same_bits(result, results[0])
    torch.testing.assert_close(results[0], _results(as_torch(layer), x, dy), rtol=1e-4, atol=1e-4)


def test_a_device_that_is_not_the_current_one_works(variant: Variant) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    layer = build(variant, 1000)
    x, dy = torch.randn(2, 64, 1000, device=CUDA)
    expected = _results(layer, x, dy)
    assert torch.cuda.current_device() == 0
    results = _results(layer.to("cuda:1"), x.to("cuda:1"), dy.to("cuda:1"))
    assert {t.device.index for t in results} == {1}
    assert_same_bits(tuple(t.to(CUDA) for t in results), expected)
    assert torch.cuda.current_device() == 0


def test_forward_keeps_the_input_and_two_fp32_numbers_a_row(variant: Variant) -> None:
    layer = build(variant, 1024, torch.bfloat16)
    x = torch.randn(8192, 1024, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    _train(layer, x)
    before = torch.cuda.memory_allocated()
    y = layer(x)
    kept = torch.cuda.memory_allocated() - before - y.nbytes
    assert kept <= 2 * 4 * 8192 + 1024


def test_memory_is_given_back(variant: Variant) -> None:
    layer = build(variant, 1000)
    x = torch.randn(640, 1000, device=CUDA)
    _train(layer, x)
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        _train(layer, x)
    assert torch.cuda.memory_allocated() == before


def test_uninitialised_memory_does_not_reach_results(variant: Variant) -> None:
    # In this mode torch fills whatever `empty` returns with NaN.
    layer = build(variant, 1000)
    x, dy = torch.randn(2, 333, 1000, device=CUDA)
    expected = _results(layer, x, dy)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3, device=CUDA).isnan().all()
        assert_same_bits(_results(layer, x, dy), expected)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("mix", [FP32, BF16], ids=lambda mix: mix.name)
def test_compiled_by_inductor_it_gives_torchs_values(variant: Variant, mix: Mix) -> None:
    torch._dynamo.reset()
    layer = build(variant, 1000, mix.parameters)
    x, dy = torch.randn(2, 64, 1000, device=CUDA).to(mix.input)
    compiled = torch.compile(layer, fullgraph=True)
    given = x.detach().requires_grad_()
    y = compiled(given)
    gradients = torch.autograd.grad(y, [given, *layer.parameters()], dy)
    expected = _results(as_torch(layer), x, dy)
    tolerance = 1e-4 if mix is FP32 else 5e-2
    torch.testing.assert_close((y, *gradients), expected, rtol=tolerance, atol=10 * tolerance)


FORK = """
import os, sys, torch, hfai.nn
model = hfai.nn.to_hfai(torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.RMSNorm(64)))
x = torch.randn(5, 64)
expected = model(x)
assert not torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    y = model.cuda()(x.cuda()).cpu()
    os._exit(0 if torch.allclose(y, expected, atol=1e-5) else 1)
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_process_forked_after_import_and_conversion_can_use_the_gpu() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr


WORKERS = """
import torch, hfai.nn
from torch.utils.data import DataLoader, Dataset

class Normalised(Dataset):
    layer = hfai.nn.to_hfai(torch.nn.LayerNorm(16))
    def __len__(self):
        return 8
    def __getitem__(self, index):
        with torch.no_grad():
            return self.layer(torch.arange(16.0) * index)

x = torch.randn(3, 16, device="cuda", requires_grad=True)
hfai.nn.to_hfai(torch.nn.LayerNorm(16).cuda())(x).sum().backward()
data = Normalised()
loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork")
batches = torch.cat(list(loader))
assert torch.equal(batches, torch.stack([data[index] for index in range(8)]))
"""


def test_forked_workers_can_normalise_on_the_cpu_while_the_parent_uses_the_gpu() -> None:
    # In a process of its own: a worker collects the garbage that its parent had, and torch ends a
    # forked process that destroys a CUDA event, or a tensor that was used on a second stream. Other
    # tests leave some.
    done = subprocess.run(
        [sys.executable, "-c", WORKERS], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_model_saved_on_the_gpu_loads_where_there_is_none(
    variant: Variant, tmp_path: Path
) -> None:
    layer = build(variant, 64)
    x = torch.randn(5, 64, device=CUDA)
    expected = layer(x)
    torch.save(layer, tmp_path / "model.pt")
    torch.save((x.cpu(), expected.detach().cpu()), tmp_path / "data.pt")
    program = (
        "import sys, torch, hfai\n"
        "assert not torch.cuda.is_available()\n"
        "layer = torch.load(sys.argv[1], map_location='cpu', weights_only=False)\n"
        "x, expected = torch.load(sys.argv[2])\n"
        "torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)\n"
        "assert hfai.explain(layer)[0].path == 'torch'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "model.pt"), str(tmp_path / "data.pt")],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
