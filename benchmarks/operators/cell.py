"""What the benchmarks of LSTMCell and GRUCell share: one step of a decoder's loop.

On most of these sizes the host is what a step waits for, so the whole calls say more than the
kernels. Operations count the products alone, a multiply-add as two.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.case import DTYPE_NAMES, Case, Implementation, Inputs, Operator, Piece, Work

BATCHES = (1, 16, 64, 256, 1024)
HIDDEN = (256, 1024)
GRID_BATCHES = (1, 4, 16, 64, 256, 1024)
GRID_HIDDEN = (64, 256, 512, 1024, 2048)


def cell_case(batch: int, hidden: int, dtype: torch.dtype) -> Case:
    """Return the case of `hidden` inputs and hidden units."""
    sizes = {"batch": batch, "hidden": hidden}
    return Case(f"{batch}x{hidden} {DTYPE_NAMES[dtype]}", dtype, (batch, hidden), sizes)


class CellStep(Operator):
    """One step of a cell; the two differ in their classes, gates and states."""

    gates: int
    states: tuple[str, ...]

    @property
    @abstractmethod
    def torch_class(self) -> type[nn.RNNCellBase]:
        """The class in `torch.nn`."""

    @property
    @abstractmethod
    def hfai_class(self) -> type[nn.RNNCellBase]:
        """The class in `hfai.nn`."""

    def cases(self) -> Sequence[Case]:
        """Return the published table's cases."""
        return [
            *(cell_case(batch, hidden, torch.float32) for hidden in HIDDEN for batch in BATCHES),
            cell_case(64, 1024, torch.bfloat16),
        ]

    def grid(self) -> Sequence[Case]:
        """Return batches × hidden sizes in fp32 and bf16, smallest first."""
        cases = [
            cell_case(batch, hidden, dtype)
            for dtype in (torch.float32, torch.bfloat16)
            for batch in GRID_BATCHES
            for hidden in GRID_HIDDEN
        ]
        return sorted(cases, key=self.input_bytes)

    def input_bytes(self, case: Case) -> int:
        """Return the bytes of x, the states, dh and the parameters."""
        rows = case.elements * (2 + len(self.states))
        return case.dtype.itemsize * (rows + self._weights(case))

    def inputs(self, case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
        """Draw x, states, dh, and weights from torch's own distribution."""

        def drawn() -> Tensor:
            empty = torch.empty(case.shape, dtype=case.dtype, device=device)
            return empty.normal_(generator=generator)

        module = self._build(self.torch_class, case, device)
        bound = case.sizes["hidden"] ** -0.5
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.uniform_(-bound, bound, generator=generator)
        leaves = {name: nn.Parameter(drawn()) for name in ("x", *self.states)}
        return Inputs(leaves | dict(module.named_parameters()), drawn())

    def implementations(
        self, case: Case, device: torch.device, grid: bool
    ) -> Sequence[Implementation]:
        """Return torch and ours."""
        return [
            Implementation("torch", self._bind(self.torch_class, case)),
            Implementation(
                "hfai",
                self._bind(self.hfai_class, case),
                path=lambda inputs: self._path(case, inputs),
            ),
        ]

    def reference(self, case: Case, inputs: Inputs, sample: bool) -> Iterator[Piece]:
        """Yield h and all gradients from torch's class in float64."""
        double = {
            name: nn.Parameter(leaf.detach().double()) for name, leaf in inputs.leaves.items()
        }
        y = self._bind(self.torch_class, case)(Inputs(double, inputs.grad_output))()
        yield Piece("y", y.detach(), _whole)
        gradients = torch.autograd.grad(y, list(double.values()), inputs.grad_output.double())
        for name, gradient in zip(double, gradients, strict=True):
            yield Piece(f"d{name}", gradient, _whole)

    def work(self, case: Case) -> tuple[Work, Work]:
        """Count operands and results forward; those and all gradients backward."""
        size, weights = case.dtype.itemsize, self._weights(case)
        products = 2 * self.gates * case.sizes["hidden"] * case.elements
        unit = DTYPE_NAMES[case.dtype]
        rows = case.elements * (1 + 2 * len(self.states))
        return (
            Work(size * (rows + weights), 2 * products, unit),
            Work(size * (2 * rows + 2 * weights), 4 * products, unit),
        )

    def _weights(self, case: Case) -> int:
        return 2 * self.gates * case.sizes["hidden"] ** 2

    def _build(
        self, module_class: type[nn.RNNCellBase], case: Case, device: torch.device | str
    ) -> nn.RNNCellBase:
        hidden = case.sizes["hidden"]
        build: Any = module_class
        module: nn.RNNCellBase = build(hidden, hidden, device=device, dtype=case.dtype)
        return module

    def _bind(
        self, module_class: type[nn.RNNCellBase], case: Case
    ) -> Callable[[Inputs], Callable[[], Tensor]]:
        def bind(inputs: Inputs) -> Callable[[], Tensor]:
            module, x = self._module(module_class, case, inputs), inputs.leaves["x"]
            states = tuple(inputs.leaves[name] for name in self.states)
            if len(states) == 1:
                return lambda: module(x, states[0])
            return lambda: module(x, states)[0]

        return bind

    def _module(
        self, module_class: type[nn.RNNCellBase], case: Case, inputs: Inputs
    ) -> nn.RNNCellBase:
        """Return a module whose parameters are the input set's."""
        module = self._build(module_class, case, "meta")
        for name, leaf in inputs.leaves.items():
            if name not in ("x", *self.states):
                setattr(module, name, leaf)
        return module

    def _path(self, case: Case, inputs: Inputs) -> str:
        """Return the path that our module takes, by what it leaves in autograd's graph."""
        nodes = []
        for module_class in (self.hfai_class, self.torch_class):
            node = self._bind(module_class, case)(inputs)().grad_fn
            assert node is not None
            nodes.append(node.name())
        if nodes[0] != nodes[1]:
            return "hfai"
        path = self._module(self.hfai_class, case, inputs).explain_path()  # type: ignore[operator]
        return f"torch: {path.reason if path.taken == 'torch' else 'for this input'}"


def _whole(tensor: Tensor) -> Tensor:
    return tensor
