"""What the benchmarks of LSTM, GRU and RNN share: cases, inputs, bytes and operations.

Operations count the products alone, a multiply-add as two: forward those with the input's and the
recurrent weights, backward twice as many. The floor that they give is far below what a sequence
allows: each step waits for the one before, whatever the rate of the unit.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.case import (
    DTYPE_NAMES,
    TOLERANCE,
    Case,
    Implementation,
    Inputs,
    Operator,
    Piece,
    Work,
)

GRID_HIDDEN = (64, 128, 192, 256, 384, 512, 768, 985, 1024, 1536, 2048)
GRID_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
GRID_STEPS = 200
# Each grid is two sweeps: hidden sizes at these batches, batches at these hidden sizes.
SWEPT_AT_BATCHES = (4, 32)
SWEPT_AT_HIDDEN = (256, 1024)
# TF32 keeps 10 bits of mantissa, and a recurrence adds errors up.
TOLERANCE_TF32 = 5e-3
BARRIER_MS = 0.95e-3  # of the whole grid, measured on an H200
WIDER = 4  # tolerance of the half-precision types beside that of an operator of one pass


def recurrent_case(
    steps: int,
    batch: int,
    hidden: int,
    dtype: torch.dtype,
    *,
    ieee: bool = False,
    layers: int = 1,
    directions: int = 1,
) -> Case:
    """Return the case of `hidden` inputs and hidden units."""
    name = f"{steps}x{batch}x{hidden} {DTYPE_NAMES[dtype]}"
    name += " ieee" if ieee else ""
    name += f", {layers} layers" if layers > 1 else ""
    name += ", both directions" if directions > 1 else ""
    sizes = {"steps": steps, "batch": batch, "hidden": hidden, "ieee": int(ieee)}
    sizes |= {"layers": layers, "directions": directions}
    return Case(name, dtype, (steps, batch, hidden), sizes)


class Recurrent(Operator):
    """A recurrent layer; the three differ in their classes and gates."""

    gates: int

    @property
    @abstractmethod
    def torch_class(self) -> type[nn.RNNBase]:
        """The class in `torch.nn`."""

    @property
    @abstractmethod
    def hfai_class(self) -> type[nn.RNNBase]:
        """The class in `hfai.nn`."""

    def cases(self) -> Sequence[Case]:
        """Return the published table's cases."""
        return [
            recurrent_case(1000, 4, 985, torch.float32),
            recurrent_case(1000, 4, 985, torch.float32, ieee=True),
            recurrent_case(1000, 4, 985, torch.bfloat16),
            recurrent_case(400, 32, 256, torch.float32, layers=2, directions=2),
        ]

    def grid(self) -> Sequence[Case]:
        """Return both sweeps in fp32 (torch's default) and bf16, smallest first."""
        cases = [
            recurrent_case(GRID_STEPS, batch, hidden, dtype)
            for dtype in (torch.float32, torch.bfloat16)
            for batch in GRID_BATCHES
            for hidden in GRID_HIDDEN
            if batch in SWEPT_AT_BATCHES or hidden in SWEPT_AT_HIDDEN
        ]
        return sorted(cases, key=self.input_bytes)

    def input_bytes(self, case: Case) -> int:
        """Return the bytes of x, dy and the parameters."""
        weights = self._products(case) // (case.sizes["steps"] * case.sizes["batch"])
        return case.dtype.itemsize * (case.elements * (1 + case.sizes["directions"]) + weights)

    def inputs(self, case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
        """Draw x, dy, and weights from torch's own distribution, packed as cuDNN wants them."""

        def drawn(*shape: int) -> Tensor:
            empty = torch.empty(shape, dtype=case.dtype, device=device)
            return empty.normal_(generator=generator)

        module = self._build(self.torch_class, case, device)
        bound = case.sizes["hidden"] ** -0.5
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.uniform_(-bound, bound, generator=generator)
        leaves = {"x": nn.Parameter(drawn(*case.shape)), **dict(module.named_parameters())}
        steps, batch, hidden = case.shape
        return Inputs(leaves, drawn(steps, batch, hidden * case.sizes["directions"]))

    def implementations(
        self, case: Case, device: torch.device, grid: bool
    ) -> Sequence[Implementation]:
        """Return torch and ours, having set torch's switch for TF32 as the case asks.

        No peer has a case of ours: FlashRNN's kernels refuse sizes such as 985, take the input's
        product ready-made, and know neither layers nor directions.
        """
        torch.backends.cudnn.allow_tf32 = not case.sizes["ieee"]
        return [
            Implementation("torch", self._bind(self.torch_class, case)),
            Implementation(
                "hfai",
                self._bind(self.hfai_class, case),
                path=lambda inputs: self._path(case, inputs),
            ),
        ]

    def reference(self, case: Case, inputs: Inputs, sample: bool) -> Iterator[Piece]:
        """Yield y and all gradients from torch's class in float64."""
        double = {
            name: nn.Parameter(leaf.detach().double()) for name, leaf in inputs.leaves.items()
        }
        y = self._bind(self.torch_class, case)(Inputs(double, inputs.grad_output))()
        yield Piece("y", y.detach(), _whole)
        gradients = torch.autograd.grad(y, list(double.values()), inputs.grad_output.double())
        for name, gradient in zip(double, gradients, strict=True):
            yield Piece(f"d{name}", gradient, _whole)

    def work(self, case: Case) -> tuple[Work, Work]:
        """Count x, y and weights forward; those, dx, dy and gradients of the weights backward."""
        size, directions = case.dtype.itemsize, case.sizes["directions"]
        products = self._products(case)
        weights = products // (case.sizes["steps"] * case.sizes["batch"])
        unit = DTYPE_NAMES[case.dtype]
        if case.dtype == torch.float32 and not case.sizes["ieee"]:
            unit = "tf32"
        return (
            Work(size * (case.elements * (1 + directions) + weights), 2 * products, unit),
            Work(size * (case.elements * 2 * (1 + directions) + 2 * weights), 4 * products, unit),
        )

    def least_ms(self, case: Case) -> float:
        """Return the time of a barrier a step: nobody's replay needs many input sets to be long."""
        return BARRIER_MS * case.sizes["steps"] * case.sizes["layers"]

    def tolerance(self, case: Case) -> float:
        """Return the relative error above which an output is wrong."""
        if case.dtype == torch.float32:
            return TOLERANCE[case.dtype] if case.sizes["ieee"] else TOLERANCE_TF32
        return WIDER * TOLERANCE[case.dtype]

    def _products(self, case: Case) -> int:
        """Return the multiply-adds of all layers' products in one forward pass."""
        hidden, directions = case.sizes["hidden"], case.sizes["directions"]
        a_row = 0
        for layer in range(case.sizes["layers"]):
            inputs = hidden * (directions if layer else 1)
            a_row += directions * self.gates * hidden * (inputs + hidden)
        return a_row * case.sizes["steps"] * case.sizes["batch"]

    def _build(
        self, module_class: type[nn.RNNBase], case: Case, device: torch.device | str
    ) -> nn.RNNBase:
        sizes = case.sizes
        # Through Any: the three classes' constructors say `*args, **kwargs`.
        build: Any = module_class
        module: nn.RNNBase = build(
            sizes["hidden"],
            sizes["hidden"],
            num_layers=sizes["layers"],
            bidirectional=sizes["directions"] > 1,
            device=device,
            dtype=case.dtype,
        )
        return module

    def _bind(
        self, module_class: type[nn.RNNBase], case: Case
    ) -> Callable[[Inputs], Callable[[], Tensor]]:
        def bind(inputs: Inputs) -> Callable[[], Tensor]:
            module, x = self._module(module_class, case, inputs), inputs.leaves["x"]
            return lambda: module(x)[0]

        return bind

    def _module(self, module_class: type[nn.RNNBase], case: Case, inputs: Inputs) -> nn.RNNBase:
        """Return a module whose parameters are the input set's."""
        module = self._build(module_class, case, "meta")
        for name, leaf in inputs.leaves.items():
            if name != "x":
                setattr(module, name, leaf)
        return module

    def _path(self, case: Case, inputs: Inputs) -> str:
        """Return the path that our module takes, by what it leaves in autograd's graph."""
        ours = self._module(self.hfai_class, case, inputs)
        torchs = self._module(self.torch_class, case, inputs)
        nodes = [_nodes(module(inputs.leaves["x"])[0]) for module in (ours, torchs)]
        if nodes[0] != nodes[1]:
            return "hfai"
        path = ours.explain_path()  # type: ignore[operator]
        return f"torch: {path.reason if path.taken == 'torch' else 'for this input'}"


def _nodes(y: Tensor) -> list[str]:
    """Return the names of the last two nodes before an output."""
    node = y.grad_fn
    assert node is not None
    return [node.name(), *(n.name() for n, _ in node.next_functions[:1] if n is not None)]


def _whole(tensor: Tensor) -> Tensor:
    return tensor
