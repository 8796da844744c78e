"""The recurrent kernels on a GPU: as accurate as torch's, the same bits each time, and no hang."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfai
from hfai.kernels import jit
from hfai.kernels.cooperative import RefusedError
from hfai.kernels.rnn import call, dispatch, status
from hfai.kernels.rnn.plan import Cell, Precision
from hfai.nn import to_hfai
from hfai.nn.rnn import _stack
from tests.kernels.rnn.by_hand import every_size_is_ours
from tests.nn.operator_cases import assert_same_bits

__all__ = ["every_size_is_ours"]

CUDA = torch.device("cuda")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Below this no two orders of summation agree, and neither error says anything of the kernels.
NOISE = {FP32: 3e-7, FP16: 3e-4, BF16: 2e-3}


@pytest.fixture(autouse=True)
def _nothing_gives_up() -> Iterator[None]:
    """Whatever a test launches must have ended by itself."""
    yield
    torch.cuda.synchronize()
    status.raise_if_lost(torch.cuda.current_device())


def layers(kind: str, hidden: int, dtype: torch.dtype, **options: Any) -> tuple[nn.Module, ...]:
    """Return ours, torch's and torch's in float64, with the same parameters, on the GPU."""
    torchs: nn.Module = getattr(nn, kind)(hidden, hidden, **options).to(CUDA, dtype)
    double = copy.deepcopy(torchs).double()
    return to_hfai(copy.deepcopy(torchs)), torchs, double


def results(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Return y and the gradients of x and of all parameters."""
    given = x.to(next(layer.parameters()).dtype).requires_grad_()
    y = layer(given)[0]
    generator = torch.Generator(CUDA).manual_seed(1)
    dy = torch.randn(y.shape, generator=generator, device=CUDA, dtype=torch.float64).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [given, *layer.parameters()], dy)]


def is_ours(layer: nn.Module, x: Tensor) -> bool:
    y = layer(x)[0]
    return type(y.grad_fn).__name__ == "LayerBackward"


def error(actual: Tensor, expected: Tensor) -> float:
    return float(((actual.double() - expected).norm() / expected.norm()).item())


@pytest.mark.parametrize(
    ("kind", "hidden", "batch", "dtype", "options"),
    [
        ("LSTM", 985, 4, FP32, {}),
        ("LSTM", 985, 4, BF16, {}),
        ("LSTM", 1024, 8, FP16, {}),
        ("LSTM", 256, 32, FP32, {"num_layers": 2, "bidirectional": True}),
        ("GRU", 985, 4, FP32, {}),
        ("GRU", 333, 17, BF16, {"bidirectional": True}),
        ("RNN", 500, 3, FP32, {}),
        ("LSTM", 985, 30, FP32, {}),
        ("LSTM", 1024, 50, BF16, {}),
        ("LSTM", 1150, 4, FP32, {}),  # partly in shared memory
        ("LSTM", 2048, 8, BF16, {}),
    ],
)
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.usefixtures("every_size_is_ours")
def test_errors_are_at_most_one_and_a_half_times_torchs(
    kind: str, hidden: int, batch: int, dtype: torch.dtype, options: dict[str, Any], tf32: bool
) -> None:
    if not tf32 and dtype != FP32:
        pytest.skip("the switch is for fp32")
    ours, torchs, double = layers(kind, hidden, dtype, **options)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
        if call.why_not_configured(_stack(ours), 0, dtype, batch, 40) is not None:
            pytest.skip("this size is torch's in this precision")
    x = torch.randn(40, batch, hidden, device=CUDA).to(dtype)
    assert_as_accurate(ours, torchs, double, x, tf32)


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.usefixtures("every_size_is_ours")
def test_relus_errors_are_at_most_one_and_a_half_times_torchs(tf32: bool) -> None:
    ours, torchs, double = layers("RNN", 401, FP32, nonlinearity="relu", bias=False)
    for layer in (ours, torchs, double):
        torch.nn.init.eye_(layer.weight_ih_l0)
    # One of 16 000 sums rounded to the other side of relu's kink gives gradients that are off by a
    # hundredth, and say nothing of the kernels: every sum stays a tenth away from it.
    h = torch.zeros(1, 401, dtype=torch.float64, device=CUDA)
    steps = []
    for _ in range(40):
        drawn = torch.randn_like(h)
        wanted = drawn + 0.1 * drawn.sign()
        steps.append((wanted - h @ double.weight_hh_l0.detach().t()).float())
        h = (steps[-1].double() + h @ double.weight_hh_l0.detach().t()).relu()
    assert_as_accurate(ours, torchs, double, torch.stack(steps), tf32)


def assert_as_accurate(
    ours: nn.Module, torchs: nn.Module, double: nn.Module, x: Tensor, tf32: bool
) -> None:
    """Compare ours and torch's results with those in float64."""
    # `flags` switches cuDNN itself off unless told otherwise.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
        assert is_ours(ours, x)
        triples = zip(results(ours, x), results(torchs, x), results(double, x), strict=True)
        for one, other, expected in triples:
            allowed = max(1.5 * error(other, expected), NOISE[x.dtype])
            # In TF32 torch rounds only some of the operands.
            allowed = max(allowed, 1e-3) if tf32 else allowed
            assert error(one, expected) <= allowed


def test_bias_gradients_of_gru_are_as_accurate_as_torchs_in_tf32() -> None:
    ours, torchs, double = layers("GRU", 985, FP32)
    x = torch.randn(200, 4, 985, device=CUDA)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        found, theirs, exact = (results(layer, x)[4:] for layer in (ours, torchs, double))
    for one, other, expected in zip(found, theirs, exact, strict=True):
        assert error(one, expected) <= 1.5 * error(other, expected)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("tf32", [False, True])
def test_peak_memory_of_training_is_at_most_torchs(kind: str, tf32: bool) -> None:
    ours, torchs, _ = layers(kind, 985, FP32)
    x = torch.randn(1000, 4, 985, device=CUDA, requires_grad=True)
    dy = torch.randn_like(x)
    peaks = []
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
        for layer in (ours, torchs):
            inputs = [x, *layer.parameters()]
            for _ in range(2):  # what the first call makes and keeps does not count
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                torch.autograd.grad(layer(x)[0], inputs, dy)
                peak = torch.cuda.max_memory_allocated() - before
            peaks.append(peak)
    assert peaks[0] <= peaks[1]


def test_the_tf32_switch_is_read_on_every_call() -> None:
    ours, _, double = layers("LSTM", 256, FP32)
    x = torch.randn(40, 4, 256, device=CUDA)
    expected = double(x.double())[0]
    for tf32, least, most in ((True, 2e-5, 2e-3), (False, 0.0, 2e-6), (True, 2e-5, 2e-3)):
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
            assert least <= error(ours(x)[0], expected) <= most


@pytest.mark.parametrize("bits", [-1, 0x7FC00000])
def test_a_nan_of_any_bits_passes_and_stays_in_its_sequence(bits: int) -> None:
    ours, _, _ = layers("GRU", 256, FP32)
    x = torch.randn(30, 4, 256, device=CUDA)
    x.view(torch.int32)[10, 2, 7] = bits
    y = ours(x)[0].isnan().any(-1)
    assert y[10:, 2].all()
    assert not y[:10].any()
    assert not y[:, [0, 1, 3]].any()


def test_a_captured_graph_replays_forward_and_backward() -> None:
    ours, _, _ = layers("LSTM", 300, FP32)
    x = torch.randn(20, 4, 300, device=CUDA)
    expected = results(ours, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results(ours, x)
    torch.cuda.current_stream().wait_stream(stream)
    static = torch.zeros_like(x)
    dy = torch.ones(20, 4, 300, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given = static.detach().requires_grad_()
        y = ours(given)[0]
        made = [y.detach(), *torch.autograd.grad(y, [given], dy)]
    static.copy_(x)
    for _ in range(3):
        graph.replay()
    assert_same_bits(made[0], expected[0])
    (dx,) = torch.autograd.grad(ours(given := x.clone().requires_grad_())[0], [given], dy)
    assert_same_bits(made[1], dx)


def test_two_streams_run_the_same_layer_at_once() -> None:
    ours, _, _ = layers("LSTM", 985, FP32)
    inputs = [torch.randn(50, 4, 985, device=CUDA) for _ in range(2)]
    expected = [results(ours, x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(5):
        made = []
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                made.append(results(ours, x))
        torch.cuda.synchronize()
        for one, other in zip(made, expected, strict=True):
            assert_same_bits(one, other)


@pytest.mark.usefixtures("every_size_is_ours")
def test_random_layers_give_the_same_bits_beside_other_work() -> None:
    long = "HFAI_LONG_TESTS" in os.environ
    configurations, repeats = (30, 200) if long else (6, 10)
    generator = torch.Generator().manual_seed(7)

    def draw(*options: Any) -> Any:
        return options[int(torch.randint(len(options), (), generator=generator))]

    other = torch.cuda.Stream()
    noise = torch.randn(2048, 2048, device=CUDA)
    for _ in range(configurations):
        hidden = draw(1, 7, 64, 100, 256, 333, 512, 700, 985)
        options = {"bidirectional": draw(False, True) and hidden < 500, "bias": draw(False, True)}
        options["num_layers"] = draw(1, 2)
        ours, _, _ = layers(draw("LSTM", "GRU", "RNN"), hidden, draw(FP32, FP16, BF16), **options)
        x = torch.randn(draw(1, 5, 60), draw(1, 4, 9, 32), hidden, device=CUDA)
        x = x.to(next(ours.parameters()).dtype)
        first = results(ours, x)
        for _ in range(repeats):
            with torch.cuda.stream(other):
                for _ in range(draw(0, 1, 5)):
                    noise = torch.tanh(noise @ noise)
            assert_same_bits(results(ours, x), first)


def test_peak_memory_is_no_more_than_torchs() -> None:
    ours, torchs, _ = layers("LSTM", 985, FP32)
    torchs.flatten_parameters()
    x = torch.randn(500, 4, 985, device=CUDA)
    peaks = []
    for layer in (ours, torchs):
        results(layer, x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results(layer, x)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] <= 1.05 * peaks[1]


def test_more_blocks_than_the_device_holds_are_refused_and_leave_it_usable() -> None:
    limits = jit.device_limits(0)
    plan = dispatch.choose(Cell.LSTM, 985, 1, 4, Precision.TF32, limits)
    assert plan is not None
    kernel = call._configuration(0, FP32, plan).forward(True).kernel
    with pytest.raises(RefusedError, match="no room"):
        kernel.launch(
            10 * limits.multiprocessors, torch.cuda.current_stream().cuda_stream, *[0] * 22
        )
    ours, torchs, _ = layers("LSTM", 300, FP32)
    x = torch.randn(20, 4, 300, device=CUDA)
    torch.testing.assert_close(ours(x)[0], torchs(x)[0], rtol=1e-2, atol=1e-2)


def test_explain_names_the_path_and_its_bounds() -> None:
    model = nn.Sequential(nn.LSTM(985, 985), nn.LSTM(8, 8, proj_size=4), nn.LSTM(8, 3000)).to(CUDA)
    first, second, third = hfai.explain(to_hfai(model))
    assert first.path == "hfai"
    assert "up to batch" in first.reason
    assert (second.path, third.path) == ("torch", "torch")
    assert "proj_size" in second.reason
    assert "3000" in third.reason
