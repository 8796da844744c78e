"""The interface that an operator's benchmark fills in.

An operator names its cases, makes inputs, lists implementations of the same function, knows that
function in float64, and counts the least work the function takes. Everything else (checking,
timing, reporting) is the harness's and knows nothing of any operator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPE_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float64: "fp64",
}

# An output whose relative error in the 2-norm exceeds this computes another function: several
# times what rounding the operands and the result to the type can cause, far below any real fault.
TOLERANCE = {
    torch.float32: 1e-4,
    torch.float16: 4e-3,
    torch.bfloat16: 2e-2,
    torch.float64: 1e-12,
}


@dataclass(frozen=True)
class Case:
    """One problem to measure.

    Attributes:
        name: as `--cases` selects it and as tables print it.
        dtype: of the input.
        shape: of the input.
        sizes: the operator's own names for what varies (rows, length, batch, …); plots use them.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    sizes: Mapping[str, int]

    @property
    def elements(self) -> int:
        """The number of elements of the input."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count


@dataclass(frozen=True)
class Work:
    """The least work one call takes: each input read once, each output written once.

    Attributes:
        bytes: moved through device memory.
        operations: floating-point operations.
        unit: what does the operations, one of `harness.ceiling.UNITS`.
    """

    bytes: int
    operations: int
    unit: str = "fp32"


@dataclass(frozen=True)
class Inputs:
    """One set of operands: leaves that require a gradient, by name, and the output's gradient."""

    leaves: Mapping[str, Tensor]
    grad_output: Tensor

    @property
    def bytes(self) -> int:
        """The memory that the set occupies."""
        return sum(t.nbytes for t in (*self.leaves.values(), self.grad_output))


@dataclass(frozen=True)
class Implementation:
    """One way to compute the operator.

    Attributes:
        name: "hfai", "torch", "torch.compile", or a peer's.
        bind: prepares a call on one set of inputs; the call takes nothing and returns the output,
            differentiable with respect to the set's leaves.
        absent: why it cannot run on this machine; empty where it can.
        overwrites_grad_output: its backward writes into the gradient that it is given, so it
            must get a copy.
        path: says which path the call takes on a set of inputs ("hfai", or "torch: reason"), for an
            implementation that has several.
    """

    name: str
    bind: Callable[[Inputs], Callable[[], Tensor]]
    absent: str = ""
    overwrites_grad_output: bool = False
    path: Callable[[Inputs], str] | None = None


@dataclass(frozen=True)
class Piece:
    """A part of the float64 reference.

    Attributes:
        output: "y", or "d" and a leaf's name.
        expected: the part's values, float64, on the inputs' device.
        select: cuts the same part out of an implementation's output.
    """

    output: str
    expected: Tensor
    select: Callable[[Tensor], Tensor]


class Operator(ABC):
    """What the harness asks of an operator."""

    name: str

    @abstractmethod
    def cases(self) -> Sequence[Case]:
        """Return the named cases, those of the published table."""

    @abstractmethod
    def grid(self) -> Sequence[Case]:
        """Return the cases of `--grid`, smallest first, so that a run cut short has most of it."""

    @abstractmethod
    def input_bytes(self, case: Case) -> int:
        """Return the memory that one set of `inputs` takes."""

    @abstractmethod
    def inputs(self, case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
        """Draw one set of random inputs."""

    @abstractmethod
    def implementations(
        self, case: Case, device: torch.device, grid: bool
    ) -> Sequence[Implementation]:
        """Return torch first, then ours ("hfai"), then the others; the grid leaves some out."""

    @abstractmethod
    def reference(self, case: Case, inputs: Inputs, sample: bool) -> Iterator[Piece]:
        """Compute outputs and gradients in float64, in pieces of bounded memory.

        With `sample`, only a few pieces, for inputs too large to check in full.
        """

    @abstractmethod
    def work(self, case: Case) -> tuple[Work, Work]:
        """Return the least work of the forward and of the backward pass."""

    def least_ms(self, case: Case) -> float:
        """Return a time that no call is below, where `work` gives a floor far below it."""
        return 0.0

    def tolerance(self, case: Case) -> float:
        """Return the relative error above which an output is wrong."""
        return TOLERANCE[case.dtype]
