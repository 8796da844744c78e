"""The operators under test, each as one `OperatorCase`, and what the tests do with them.

The files beside this one hold the promises that every operator keeps. Each test in them runs its
assertions twice, on torch's class and on ours, so that a change in torch shows up as well.

To add an operator, add one case to `CASES`: its two classes, the constructor's arguments, a
function that draws inputs, and, where a short formula exists, that formula in float64. Without a
formula torch's own class in float64 on the CPU is the reference. Name in `unsupported` the features
that torch's class lacks; tests that need one are skipped for that operator. `test_registry.py`
fails for an operator that has no case.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import hfai.nn
from hfai.nn import to_hfai

Feature = Literal[
    "double backward",
    "forward mode",
    "vmap",
    "script",
    "export",
    "fullgraph",
    "subclass",
    "distributed tensors",
    "a single output",
    "saving the input itself",
    "changing outputs in place",
    "a device argument in its signature",
    "fake tensors of a GPU that is not there",
    "functional calls of a shared layer",
    "staying float under dynamic quantization",
    "a single input",
    "no layers inside",
    "parameters of its own",
    "reset_parameters",
    "outputs that hang on every parameter",
    "a forward of our own",
    "full precision under autocast",
]

# Relative and absolute bounds against float64, wide enough for torch's own kernels.
TOLERANCES: Mapping[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-9, 1e-9),
    torch.float32: (2e-5, 2e-5),
    torch.float16: (4e-3, 4e-3),
    torch.bfloat16: (4e-2, 4e-2),
}


@dataclass(frozen=True)
class OperatorCase:
    """One operator in one configuration.

    Attributes:
        name: what test ids call it.
        torch_class: the class that `to_hfai` replaces.
        hfai_class: the class it is replaced by.
        draw: takes a CPU generator, returns the inputs as float64 tensors on the CPU. Dimension 0
            of each is the batch.
        function: the `torch.nn.functional` function (or torch one) that torch's class calls.
        arguments, keywords: for the constructor.
        reference: takes a float64 module of torch's class and float64 inputs, returns the outputs.
        tolerances: bounds for outputs and gradients, by dtype.
        unsupported: what torch's own class cannot do.
    """

    name: str
    torch_class: type[nn.Module]
    hfai_class: type[nn.Module]
    draw: Callable[[torch.Generator], tuple[Tensor, ...]]
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    reference: Callable[..., Any] = lambda module, *inputs: module(*inputs)
    tolerances: Mapping[torch.dtype, tuple[float, float]] = field(
        default_factory=lambda: TOLERANCES
    )
    unsupported: frozenset[Feature] = frozenset()

    def require(self, feature: Feature) -> None:
        """Skip the running test where torch's class lacks `feature`."""
        if feature in self.unsupported:
            pytest.skip(f"torch.nn.{self.torch_class.__name__} has no {feature}")


@dataclass(frozen=True)
class Operator:
    """A case and which of its two classes is meant: what a test is parametrised over."""

    case: OperatorCase
    flavour: Literal["torch", "hfai"]

    @property
    def cls(self) -> type[nn.Module]:
        return self.case.torch_class if self.flavour == "torch" else self.case.hfai_class

    def build(
        self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> nn.Module:
        """Build the layer with the same parameters for both classes, none of them 0 or 1."""
        module = self.case.torch_class(*self.case.arguments, **self.case.keywords)
        module = module.to("cpu")  # under a default device it is elsewhere
        generator = torch.Generator("cpu").manual_seed(1)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.uniform_(-0.9, 0.9, generator=generator)
        module = module.to(device, dtype)
        return to_hfai(module) if self.flavour == "hfai" else module

    def inputs(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        requires_grad: bool = True,
        seed: int = 2,
    ) -> tuple[Tensor, ...]:
        """Draw inputs: the same ones for both classes and for every device."""
        drawn = self.case.draw(torch.Generator("cpu").manual_seed(seed))
        return tuple(x.to(device, dtype).requires_grad_(requires_grad) for x in drawn)

    def require(self, feature: Feature) -> None:
        """Skip the running test where torch's class lacks `feature`."""
        self.case.require(feature)


class Results(NamedTuple):
    """The outputs of a call, and the gradients by name: input.0, input.1, …, then parameters."""

    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor | None]


def tensors(outputs: Any) -> tuple[Tensor, ...]:
    """Return the tensors in whatever a layer returned, in order."""
    return tuple(leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor))


def cotangents(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return gradients to send back: fixed numbers, alike for every dtype and device."""
    # A formula and not a generator, because vmap forbids random numbers.
    return tuple(
        (torch.arange(y.numel(), dtype=torch.float64) * 1.7).sin().view(y.shape).to(y)
        for y in outputs
    )


def weighted_sum(outputs: Any) -> Tensor:
    """Return a scalar of all outputs that no symmetry of a layer makes trivial."""
    parts = tensors(outputs)
    weights = cotangents(parts)
    return torch.stack([(y * w).sum() for y, w in zip(parts, weights, strict=True)]).sum()


def run(module: Callable[..., Any], inputs: tuple[Tensor, ...], parameters: Any = None) -> Results:
    """Call forward and backward once and return what came out, gradients of fresh `.grad`s."""
    named = dict(parameters or getattr(module, "named_parameters", dict)())
    leaves = {f"input.{i}": x for i, x in enumerate(inputs)} | named
    for leaf in leaves.values():
        leaf.grad = None
    outputs = tensors(module(*inputs))
    differentiable = tuple(y for y in outputs if y.requires_grad)
    if differentiable:
        torch.autograd.backward(differentiable, cotangents(differentiable))
    return Results(
        tuple(y.detach() for y in outputs),
        {name: None if leaf.grad is None else leaf.grad.clone() for name, leaf in leaves.items()},
    )


def run_reference(case: OperatorCase, module: nn.Module, inputs: tuple[Tensor, ...]) -> Results:
    """Return outputs and gradients in float64 for the parameters that `module` has."""
    double = reference_module(case, module)
    doubles = tuple(x.detach().double().cpu().requires_grad_(x.requires_grad) for x in inputs)
    return run(
        lambda *xs: case.reference(double, *xs), doubles, parameters=double.named_parameters()
    )


def reference_module(case: OperatorCase, module: nn.Module) -> nn.Module:
    """Return a module of torch's class in float64 on the CPU with the same parameters."""
    double = case.torch_class(*case.arguments, **case.keywords).double()
    double.load_state_dict(copy.deepcopy(module.state_dict()))
    for ours, theirs in zip(double.parameters(), module.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)
    return double


def assert_close(actual: Any, expected: Any, case: OperatorCase, dtype: torch.dtype) -> None:
    """Compare tensors, or `Results`, with float64 ones within the case's bounds for `dtype`."""
    rtol, atol = case.tolerances[dtype]
    as_double = [
        pytree.tree_map_only(Tensor, lambda t: t.detach().double().cpu(), value)
        for value in (actual, expected)
    ]
    flat = [pytree.tree_flatten(value) for value in as_double]
    assert flat[0][1] == flat[1][1], "not the same results"
    for one, other in zip(flat[0][0], flat[1][0], strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
        else:
            assert one is other


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Compare tensors, or `Results`, bit for bit; a NaN equals itself."""
    ours, theirs = (pytree.tree_flatten(value) for value in (actual, expected))
    assert ours[1] == theirs[1], "not the same results"
    for one, other in zip(ours[0], theirs[0], strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        else:
            assert one is other


def _normal(*shape: int) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    def draw(generator: torch.Generator) -> tuple[Tensor, ...]:
        return (torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu"),)

    return draw


def layer_norm_reference(module: nn.LayerNorm, x: Tensor) -> Tensor:
    """y = (x - mean) / sqrt(var + eps) * weight + bias over the last dimensions."""
    dims = tuple(range(-len(module.normalized_shape), 0))
    centred = x - x.mean(dims, keepdim=True)
    y = centred / (centred.square().mean(dims, keepdim=True) + module.eps).sqrt()
    y = y if module.weight is None else y * module.weight
    return y if module.bias is None else y + module.bias


def rms_norm_reference(module: nn.RMSNorm, x: Tensor) -> Tensor:
    """y = x / sqrt(mean(x²) + eps) * weight over the last dimensions."""
    dims = tuple(range(-len(module.normalized_shape), 0))
    # Without eps torch takes that of the type it computes in: float32 for the types we cover.
    eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
    y = x / (x.square().mean(dims, keepdim=True) + eps).sqrt()
    return y if module.weight is None else y * module.weight


# On CUDA fp32 recurrences run in TF32 unless a switch says otherwise, and errors add up over steps:
# with weights of up to 0.9 its rounding moves elements of gradients (of up to 7.5) by 5e-3, torch's
# as ours, as the same recurrence in float64 with operands rounded to 10 bits of mantissa does.
RECURRENT_TOLERANCES: Mapping[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-9, 1e-9),
    torch.float32: (3e-3, 1e-2) if torch.cuda.is_available() else (2e-5, 2e-5),
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (8e-2, 8e-2),
}
# What torch's own recurrent layers cannot do, as measured with torch 2.13 on the CPU; its CUDA ones
# have no double backward either.
UNSUPPORTED_BY_RECURRENT: frozenset[Feature] = frozenset(
    {
        "forward mode",
        "vmap",
        "export",
        "fullgraph",
        "distributed tensors",
        "a single output",
        "saving the input itself",
        "changing outputs in place",
        "a device argument in its signature",
        "fake tensors of a GPU that is not there",
        "functional calls of a shared layer",
        "staying float under dynamic quantization",
        *(("double backward",) if torch.cuda.is_available() else ()),
    }
)

# Weights drawn from ±0.9 make outputs of about 10 and gradients of about 100.
ATTENTION_TOLERANCES: Mapping[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-9, 1e-9),
    torch.float32: (1e-3, 2e-3),
    torch.float16: (5e-2, 2e-1),
    torch.bfloat16: (2e-1, 2e0),
}
# What torch's own classes cannot do, as measured with torch 2.13 on the CPU.
UNSUPPORTED_BY_ATTENTION: frozenset[Feature] = frozenset(
    {
        "export",
        "a single input",
        "a single output",
        "outputs that hang on every parameter",
        "saving the input itself",
        "reset_parameters",
        "full precision under autocast",
        "fake tensors of a GPU that is not there",
    }
)
UNSUPPORTED_BY_LAYERS: frozenset[Feature] = frozenset(
    {
        "double backward",
        "forward mode",
        "export",
        "no layers inside",
        "parameters of its own",
        "reset_parameters",
        "full precision under autocast",
        "saving the input itself",
        "distributed tensors",
        "fake tensors of a GPU that is not there",
        "staying float under dynamic quantization",
    }
)


def _each(*shapes: tuple[int, ...]) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    """Return what draws one tensor of each shape."""

    def draw(generator: torch.Generator) -> tuple[Tensor, ...]:
        return tuple(
            torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
            for shape in shapes
        )

    return draw


# Nor can torch's cells, with the same version; on CUDA their fused kernels lack forward mode.
UNSUPPORTED_BY_CELLS: frozenset[Feature] = frozenset(
    {
        "vmap",
        "export",
        "distributed tensors",
        "a single output",
        "saving the input itself",
        "changing outputs in place",
        "fake tensors of a GPU that is not there",
        "staying float under dynamic quantization",
        *(("forward mode",) if torch.cuda.is_available() else ()),
    }
)

CASES = [
    OperatorCase(
        name="LayerNorm",
        torch_class=nn.LayerNorm,
        hfai_class=hfai.nn.LayerNorm,
        arguments=(40,),
        draw=_normal(4, 6, 40),
        function=F.layer_norm,
        reference=layer_norm_reference,
    ),
    OperatorCase(
        name="LayerNorm-3x5-no-bias",
        torch_class=nn.LayerNorm,
        hfai_class=hfai.nn.LayerNorm,
        arguments=([3, 5],),
        keywords={"bias": False, "eps": 1e-3},
        draw=_normal(7, 2, 3, 5),
        function=F.layer_norm,
        reference=layer_norm_reference,
    ),
    OperatorCase(
        name="RMSNorm",
        torch_class=nn.RMSNorm,
        hfai_class=hfai.nn.RMSNorm,
        arguments=(33,),
        keywords={"eps": 1e-6},
        draw=_normal(4, 6, 33),
        function=F.rms_norm,
        reference=rms_norm_reference,
    ),
    OperatorCase(
        name="LSTM",
        torch_class=nn.LSTM,
        hfai_class=hfai.nn.LSTM,
        arguments=(10, 12),
        keywords={"batch_first": True},
        draw=_normal(4, 6, 10),
        function=torch.lstm,
        tolerances=RECURRENT_TOLERANCES,
        unsupported=UNSUPPORTED_BY_RECURRENT,
    ),
    OperatorCase(
        name="GRU-two-layers-both-directions",
        torch_class=nn.GRU,
        hfai_class=hfai.nn.GRU,
        arguments=(5, 9),
        keywords={"batch_first": True, "num_layers": 2, "bidirectional": True},
        draw=_normal(4, 3, 5),
        function=torch.gru,
        tolerances=RECURRENT_TOLERANCES,
        unsupported=UNSUPPORTED_BY_RECURRENT,
    ),
    OperatorCase(
        name="RNN-no-bias",
        torch_class=nn.RNN,
        hfai_class=hfai.nn.RNN,
        arguments=(7, 8),
        keywords={"batch_first": True, "bias": False},
        draw=_normal(4, 5, 7),
        function=torch.rnn_tanh,
        tolerances=RECURRENT_TOLERANCES,
        unsupported=UNSUPPORTED_BY_RECURRENT,
    ),
    OperatorCase(
        name="MultiheadAttention",
        torch_class=nn.MultiheadAttention,
        hfai_class=hfai.nn.MultiheadAttention,
        arguments=(16, 2),
        keywords={"batch_first": True},
        draw=_each((4, 5, 16), (4, 7, 16), (4, 7, 16)),
        function=F.multi_head_attention_forward,
        tolerances=ATTENTION_TOLERANCES,
        unsupported=UNSUPPORTED_BY_ATTENTION,
    ),
    OperatorCase(
        name="TransformerEncoderLayer",
        torch_class=nn.TransformerEncoderLayer,
        hfai_class=hfai.nn.TransformerEncoderLayer,
        arguments=(16, 2),
        keywords={"dim_feedforward": 24, "dropout": 0.0, "batch_first": True},
        draw=_each((4, 6, 16)),
        function=F.multi_head_attention_forward,
        tolerances=ATTENTION_TOLERANCES,
        unsupported=UNSUPPORTED_BY_LAYERS,
    ),
    OperatorCase(
        name="TransformerDecoderLayer",
        torch_class=nn.TransformerDecoderLayer,
        hfai_class=hfai.nn.TransformerDecoderLayer,
        arguments=(16, 2),
        keywords={
            "dim_feedforward": 24,
            "dropout": 0.0,
            "batch_first": True,
            "activation": "gelu",
        },
        draw=_each((4, 5, 16), (4, 7, 16)),
        function=F.multi_head_attention_forward,
        tolerances=ATTENTION_TOLERANCES,
        unsupported=UNSUPPORTED_BY_LAYERS | {"a single input", "a forward of our own"},
    ),
    OperatorCase(
        name="TransformerEncoder",
        torch_class=nn.TransformerEncoder,
        hfai_class=hfai.nn.TransformerEncoder,
        arguments=(
            nn.TransformerEncoderLayer(
                16, 2, dim_feedforward=24, dropout=0.0, batch_first=True, bias=False
            ),
            2,
        ),
        keywords={"enable_nested_tensor": False},
        draw=_each((4, 6, 16)),
        function=F.multi_head_attention_forward,
        tolerances=ATTENTION_TOLERANCES,
        unsupported=UNSUPPORTED_BY_LAYERS
        | {"a device argument in its signature", "a forward of our own"},
    ),
    OperatorCase(
        name="LSTMCell",
        torch_class=nn.LSTMCell,
        hfai_class=hfai.nn.LSTMCell,
        arguments=(10, 12),
        draw=_normal(6, 10),
        function=torch.lstm_cell,
        tolerances=RECURRENT_TOLERANCES,
        unsupported=UNSUPPORTED_BY_CELLS,
    ),
    OperatorCase(
        name="GRUCell",
        torch_class=nn.GRUCell,
        hfai_class=hfai.nn.GRUCell,
        arguments=(5, 9),
        draw=_normal(6, 5),
        function=torch.gru_cell,
        tolerances=RECURRENT_TOLERANCES,
        unsupported=UNSUPPORTED_BY_CELLS,
    ),
    OperatorCase(
        name="RNNCell-no-bias",
        torch_class=nn.RNNCell,
        hfai_class=hfai.nn.RNNCell,
        arguments=(7, 8),
        keywords={"bias": False},
        draw=_normal(6, 7),
        function=torch.rnn_tanh_cell,
        tolerances=RECURRENT_TOLERANCES,
        unsupported=UNSUPPORTED_BY_CELLS,
    ),
]
