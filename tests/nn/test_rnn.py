"""What is LSTM's, GRU's and RNN's own, on torch's class and on ours, kernels included.

Where there is no GPU, ours is run twice: as it is, on torch's path, and with the two launches done
by hand (tests/kernels/rnn/by_hand.py), so that all else on the kernels' path is what is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

import hfai
from hfai.nn import to_hfai, to_torch
from tests.kernels.rnn.by_hand import every_size_is_ours, kernels_on_cpu
from tests.nn.operator_cases import assert_same_bits, tensors, weighted_sum

__all__ = ["every_size_is_ours", "kernels_on_cpu"]

Build = Callable[..., nn.Module]
KINDS = [("LSTM", {}), ("GRU", {}), ("RNN", {}), ("RNN", {"nonlinearity": "relu"})]


@pytest.fixture(params=["torch", "hfai", "hfai's kernels"])
def flavour(request: pytest.FixtureRequest, device: torch.device) -> str:
    """Torch's class, ours on torch's path, ours on the kernels' path."""
    if request.param == "hfai's kernels":
        name = "kernels_on_cpu" if device.type == "cpu" else "every_size_is_ours"
        request.getfixturevalue(name)
    return str(request.param)


@pytest.fixture(params=KINDS, ids=["LSTM", "GRU", "RNN-tanh", "RNN-relu"])
def build(request: pytest.FixtureRequest, flavour: str, device: torch.device) -> Build:
    """Builds each of the layers, on the device, with the same parameters whatever the class."""
    name, keywords = request.param

    def made(*arguments: Any, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
        layer: nn.Module = getattr(nn, name)(*arguments, **keywords, **options)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.uniform_(-0.4, 0.4, generator=generator)
        layer = layer.to(device, dtype)
        return layer if flavour == "torch" else to_hfai(layer)

    return made


@pytest.fixture(autouse=True)
def _ieee() -> Iterator[None]:
    """fp32 in fp32: TF32 has tests of its own."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def double(layer: nn.Module) -> nn.Module:
    """Return torch's class in float64 on the CPU with the parameters that `layer` has now."""
    names = ["input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout"]
    options = {name: getattr(layer, name) for name in [*names, "bidirectional"]}
    kind = layer.mode.split("_")[0]
    if kind == "RNN":
        options["nonlinearity"] = layer.nonlinearity
    if kind == "LSTM":
        options["proj_size"] = layer.proj_size
    made: nn.Module = getattr(nn, kind)(**options).double()
    made.load_state_dict({name: value.double().cpu() for name, value in layer.state_dict().items()})
    return made.train(layer.training)


def hidden_state(layer: nn.Module, batch: int, dtype: torch.dtype = torch.float64) -> Any:
    """Draw h0, or h0 and c0, on the CPU."""
    generator = torch.Generator().manual_seed(5)
    shape = (layer.num_layers * (1 + layer.bidirectional), batch, layer.hidden_size)
    h0, c0 = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
    return (h0, c0) if layer.mode == "LSTM" else h0


def leaves(value: Any, device: torch.device | str, dtype: torch.dtype) -> Any:
    """Copy tensors, or a structure of them, to leaves that require a gradient."""
    return pytree.tree_map_only(
        Tensor, lambda t: t.detach().to(device, dtype).requires_grad_(), value
    )


def gradients(layer: nn.Module, call: Callable[..., Any], x: Any, hx: Any) -> list[Tensor | None]:
    """Return outputs and the gradients of x, hx and the parameters."""
    outputs = call(layer, x) if hx is None else call(layer, x, hx)
    inputs = [*tensors((x, hx)), *layer.parameters()]
    found = torch.autograd.grad(weighted_sum(outputs), inputs, allow_unused=True)
    return [*tensors(outputs), *found]


def check(
    layer: nn.Module,
    x: Any,
    hx: Any = None,
    call: Callable[..., Any] = lambda layer, *inputs: layer(*inputs),
    tolerance: float = 2e-5,
) -> None:
    """Compare outputs and all gradients with torch's class in float64 on the CPU."""
    parameter = next(layer.parameters())
    device, dtype = parameter.device, parameter.dtype
    rounded = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(dtype), (x, hx))
    results = []
    for module, where, kind in ((layer, device, dtype), (double(layer), "cpu", torch.float64)):
        given = leaves(rounded, where, kind)
        results.append(gradients(module, call, *given))
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        if one is None or other is None:
            continue
        assert one.dtype == dtype
        scale = max(1.0, other.abs().max().item())
        torch.testing.assert_close(
            one.detach().double().cpu(), other.detach(), rtol=tolerance, atol=tolerance * scale
        )


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_every_option_matches_float64(
    build: Build, bidirectional: bool, num_layers: int, bias: bool, batch_first: bool
) -> None:
    layer = build(
        5, 6, num_layers=num_layers, bias=bias, batch_first=batch_first, bidirectional=bidirectional
    )
    batch = 3
    x = torch.randn(4, batch, 5, dtype=torch.float64)
    x = x.transpose(0, 1).contiguous() if batch_first else x
    check(layer, x, hidden_state(layer, batch))
    check(layer, x)


def test_the_kernels_path_is_taken_where_it_is_meant_to(
    build: Build, flavour: str, device: torch.device, request: pytest.FixtureRequest
) -> None:
    layer = build(5, 6, num_layers=2)
    y, _ = layer(torch.randn(4, 3, 5, device=device, requires_grad=True))
    y.sum().backward()
    if flavour == "hfai's kernels":
        assert type(y.grad_fn).__name__ == "LayerBackward"
        if device.type == "cpu":
            made = request.getfixturevalue("kernels_on_cpu")
            assert made == ["forward", "forward", "backward", "backward"]
    else:
        assert type(y.grad_fn).__name__ != "LayerBackward"


@pytest.mark.parametrize(
    ("dtype", "ours"), [(torch.float32, False), (torch.float16, True), (torch.bfloat16, True)]
)
def test_fp32_is_torchs_where_cudnn_is_switched_off(
    kernels_on_cpu: list[str], dtype: torch.dtype, ours: bool
) -> None:
    layer = to_hfai(nn.GRU(5, 6)).to(dtype)
    x = torch.randn(4, 3, 5, dtype=dtype)
    with torch.backends.cudnn.flags(enabled=False):
        layer(x)
    assert kernels_on_cpu == (["forward"] if ours else [])
    layer(x)
    assert kernels_on_cpu == ["forward"] * (1 + ours)


def test_padding_for_the_products_changes_nothing(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hfai.kernels.rnn.products._WORTH_PADDING", 0)
    for inputs in (5, 7, 8):
        layer = build(inputs, 6, num_layers=2, bidirectional=True)
        check(layer, torch.randn(4, 3, inputs, dtype=torch.float64), hidden_state(layer, 3))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("enforce_sorted", [False, True])
def test_packed_sequences_come_out_packed_in_the_users_order(
    build: Build, bidirectional: bool, enforce_sorted: bool
) -> None:
    layer = build(5, 6, num_layers=2, bidirectional=bidirectional)
    lengths = torch.tensor([4, 3, 3, 1] if enforce_sorted else [1, 4, 2, 3])

    def call(module: nn.Module, x: Tensor, *hx: Any) -> Any:
        packed = pack_padded_sequence(x, lengths, enforce_sorted=enforce_sorted)
        output, states = module(packed, *hx)
        assert type(output) is PackedSequence
        assert torch.equal(output.batch_sizes, packed.batch_sizes)
        for ours, given in zip(output[2:], packed[2:], strict=True):
            assert ours is given
        padded, found = pad_packed_sequence(output)
        assert torch.equal(found, lengths)
        return padded, states

    x = torch.randn(4, 4, 5, dtype=torch.float64)
    check(layer, x, hidden_state(layer, 4), call)
    check(layer, x, call=call)


@pytest.mark.parametrize("batch_first", [False, True])
def test_an_unbatched_sequence(build: Build, batch_first: bool) -> None:
    layer = build(5, 6, batch_first=batch_first, bidirectional=True)
    x = torch.randn(4, 5, dtype=torch.float64)
    check(layer, x)
    check(layer, x, pytree.tree_map(lambda state: state[:, 0], hidden_state(layer, 1)))


@pytest.mark.parametrize("hidden", [1, 7, 33, 130])
def test_any_hidden_size(build: Build, hidden: int) -> None:
    layer = build(3, hidden)
    check(layer, torch.randn(3, 2, 3, dtype=torch.float64), tolerance=1e-4)


@pytest.mark.parametrize(("steps", "batch"), [(1, 1), (1, 5), (9, 1), (2, 40)])
def test_any_number_of_steps_and_sequences(build: Build, steps: int, batch: int) -> None:
    layer = build(4, 6)
    check(layer, torch.randn(steps, batch, 4, dtype=torch.float64), hidden_state(layer, batch))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(build: Build, dtype: torch.dtype) -> None:
    layer = build(6, 8, dtype=dtype)
    tolerance = 2e-2 if dtype == torch.float16 else 1.5e-1
    check(layer, torch.randn(3, 4, 6, dtype=torch.float64), tolerance=tolerance)


def test_strided_inputs_and_states_and_an_expanded_gradient(
    build: Build, flavour: str, device: torch.device
) -> None:
    layer = build(5, 6)
    x = torch.randn(3, 5, 4, dtype=torch.float64).transpose(1, 2)
    hx = pytree.tree_map(
        lambda state: state.transpose(0, 2).contiguous().transpose(0, 2), hidden_state(layer, 4)
    )
    if flavour == "torch" and device.type == "cuda":
        pytest.skip("cuDNN refuses states that are not contiguous")
    check(layer, x, hx, lambda module, *inputs: module(*inputs)[0].sum())


def test_only_what_needs_a_gradient_gets_one(build: Build, device: torch.device) -> None:
    layer = build(5, 6, num_layers=2)
    x = torch.randn(3, 4, 5, device=device)
    expected = torch.autograd.grad(layer(x)[0].sum(), list(layer.parameters()))
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name.endswith("hh_l1"))
    layer(x)[0].sum().backward()
    for (name, parameter), gradient in zip(layer.named_parameters(), expected, strict=True):
        if name.endswith("hh_l1"):
            torch.testing.assert_close(parameter.grad, gradient)
        else:
            assert parameter.grad is None


@pytest.mark.parametrize("which", ["y", "hn"])
def test_a_loss_on_one_output_alone(build: Build, which: str) -> None:
    layer = build(5, 6, num_layers=2, bidirectional=True)

    def call(module: nn.Module, *inputs: Any) -> Any:
        y, states = module(*inputs)
        return y if which == "y" else states

    check(layer, torch.randn(3, 4, 5, dtype=torch.float64), hidden_state(layer, 4), call)


def test_gradients_of_both_biases_are_apart(build: Build, device: torch.device) -> None:
    layer = build(5, 6)
    layer(torch.randn(3, 4, 5, device=device))[0].sum().backward()
    one, other = layer.bias_ih_l0.grad, layer.bias_hh_l0.grad
    assert one.data_ptr() != other.data_ptr()
    before = other.clone()
    one.add_(1)
    assert torch.equal(other, before)


def test_gradients_accumulate_over_two_calls_of_a_shared_layer(
    build: Build, device: torch.device
) -> None:
    layer = build(5, 5)
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    check(layer, x, call=lambda module, given: module(module(given)[0]))


def test_truncated_back_propagation_carries_the_state(build: Build, device: torch.device) -> None:
    layer = build(5, 6)
    x = torch.randn(6, 4, 5, device=device)
    whole = layer(x)[0]
    first, state = layer(x[:3])
    state = pytree.tree_map(lambda tensor: tensor.detach(), state)
    second, after = layer(x[3:], state)
    torch.testing.assert_close(torch.cat([first, second]), whole, rtol=1e-5, atol=1e-5)
    tensors(after)[0].add_(1)  # the state is memory of its own
    second.sum().backward()
    torch.testing.assert_close(second, whole[3:], rtol=1e-5, atol=1e-5)


def test_backward_in_evaluation_mode(build: Build, flavour: str, device: torch.device) -> None:
    if flavour == "torch" and device.type == "cuda":
        pytest.skip("cuDNN refuses it")
    check(build(5, 6).eval(), torch.randn(3, 4, 5, dtype=torch.float64))


def test_dropout_acts_between_layers_in_training_alone(build: Build, device: torch.device) -> None:
    layer = build(5, 6, num_layers=2, dropout=0.5)
    plain = build(5, 6, num_layers=2)
    x = torch.randn(3, 4, 5, device=device)
    torch.testing.assert_close(layer.eval()(x)[0], plain(x)[0])
    layer.train()
    torch.manual_seed(3)
    first = layer(x)[0]
    torch.manual_seed(3)
    assert_same_bits(layer(x)[0].detach(), first.detach())
    assert not torch.equal(layer(x)[0], first)
    layer.dropout = 1.0
    zeros = plain.state_dict() | {
        n: torch.zeros_like(p) for n, p in plain.named_parameters() if n == "weight_ih_l1"
    }
    plain.load_state_dict(zeros)
    torch.testing.assert_close(layer(x)[0], plain(x)[0])


def test_without_gradients_nothing_is_kept(
    build: Build, flavour: str, device: torch.device
) -> None:
    layer = build(5, 6)
    x = torch.randn(3, 4, 5, device=device)
    expected = layer(x)[0].detach()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            y, _ = layer(x)
        assert not y.requires_grad
        torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)


def test_a_penalty_on_the_gradient_has_a_gradient(
    build: Build, flavour: str, device: torch.device
) -> None:
    if device.type == "cuda" and flavour != "hfai's kernels":
        pytest.skip("cuDNN has no double backward")
    layer = build(4, 5, bidirectional=True)

    def call(module: nn.Module, x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(weighted_sum(module(x)), x, create_graph=True)
        return gradient.square()

    check(layer, torch.randn(3, 2, 4, dtype=torch.float64), call=call, tolerance=1e-4)


def test_weights_replaced_by_plain_tensors_are_read(build: Build, device: torch.device) -> None:
    layer = build(5, 6)
    weight = layer.weight_hh_l0.detach().clone()
    x = torch.randn(3, 4, 5, device=device)
    mask = torch.rand_like(weight) > 0.5
    expected = build(5, 6)
    expected.weight_hh_l0.data.mul_(mask)
    # As DropConnect and weight norm do: the parameter moves aside, a tensor takes its name.
    raw = layer.weight_hh_l0
    del layer._parameters["weight_hh_l0"]
    layer.weight_hh_l0 = raw * mask
    layer._flat_weights = [getattr(layer, name) for name in layer._flat_weights_names]
    y = layer(x)[0]
    torch.testing.assert_close(y, expected(x)[0], rtol=1e-5, atol=1e-5)
    y.sum().backward()
    assert raw.grad is not None
    assert not raw.grad[~mask].any()


def test_an_optimizer_step_is_seen_by_the_next_call(build: Build, device: torch.device) -> None:
    layer = build(5, 6)
    x = torch.randn(3, 4, 5, device=device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(x)[0].sum().backward()
    optimizer.step()
    check(layer, x.double().cpu())


def test_a_nan_stays_in_its_sequence_and_after_its_step(build: Build, device: torch.device) -> None:
    layer = build(5, 6)
    x = torch.randn(4, 3, 5, device=device)
    clean = layer(x)[0]
    x[2, 1, 0] = float("nan")
    y = layer(x)[0]
    assert y[2:, 1].isnan().all()
    assert_same_bits(y[:2].detach(), clean[:2].detach())
    assert_same_bits(y[:, [0, 2]].detach(), clean[:, [0, 2]].detach())


WRONG = {
    "four dimensions": lambda x, hx: (x[None], None),
    "inputs of another width": lambda x, hx: (x[..., :-1], None),
    "another type": lambda x, hx: (x.double(), None),
    "states of another batch": lambda x, hx: (x, pytree.tree_map(lambda s: s[:, :1], hx)),
    "unbatched states": lambda x, hx: (x, pytree.tree_map(lambda s: s[:, 0], hx)),
    "states of another type": lambda x, hx: (x, pytree.tree_map(lambda s: s.double(), hx)),
    "no steps": lambda x, hx: (x[:0], None),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_torch_refuses_is_refused_in_the_same_words(
    build: Build, device: torch.device, wrong: str
) -> None:
    layer = build(5, 6)
    hx = pytree.tree_map(lambda s: s.to(device), hidden_state(layer, 4, torch.float32))
    arguments = WRONG[wrong](torch.randn(3, 4, 5, device=device), hx)
    with pytest.raises((RuntimeError, ValueError)) as ours:
        layer(*arguments)
    with pytest.raises((RuntimeError, ValueError)) as theirs:
        to_torch(layer)(*arguments)
    assert str(ours.value) == str(theirs.value)
    assert type(ours.value) is type(theirs.value)


def test_an_empty_batch_gives_an_empty_output(build: Build, device: torch.device) -> None:
    y, state = build(5, 6)(torch.randn(3, 0, 5, device=device))
    assert y.shape == (3, 0, 6)
    assert tensors(state)[0].shape == (1, 0, 6)


def test_a_projected_lstm_is_torchs(flavour: str, device: torch.device) -> None:
    layer = nn.LSTM(5, 6, proj_size=3).to(device)
    layer = layer if flavour == "torch" else to_hfai(layer)
    check(layer, torch.randn(3, 4, 5, dtype=torch.float64))
    if flavour != "torch" and torch.cuda.is_available():
        assert "proj_size" in hfai.explain(layer)[0].reason


def test_states_may_come_as_a_list(flavour: str, device: torch.device) -> None:
    layer = nn.LSTM(5, 6).to(device)
    layer = layer if flavour == "torch" else to_hfai(layer)
    x, (h0, c0) = torch.randn(3, 4, 5, device=device), hidden_state(layer, 4, torch.float32)
    h0, c0 = h0.to(device), c0.to(device)
    assert_same_bits(layer(x, [h0, c0])[0].detach(), layer(x, (h0, c0))[0].detach())
