"""The compiled kernels of one configuration: made on first use, and kept."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hfai.kernels import jit
from hfai.kernels.residual_norm import plan

FORWARD = ["residual_norm/rows.cuh", "residual_norm/forward.cu"]
BACKWARD = ["residual_norm/rows.cuh", "residual_norm/backward.cu"]
SUM_THREADS = 1024  # of hfai_residual_norm_add_partials, as backward.cu has it
SUM_BYTES = 4 * 33 * SUM_THREADS // 32


@dataclass(frozen=True)
class Types:
    """Element types: of branch, residual, their sum, y, and the parameters."""

    branch: torch.dtype
    residual: torch.dtype
    y: torch.dtype
    parameters: torch.dtype

    @property
    def z(self) -> torch.dtype:
        """Of residual + branch, as torch promotes them."""
        return torch.promote_types(self.branch, self.residual)

    @property
    def widest(self) -> int:
        """Bytes of the widest element that a row consists of."""
        return max(t.itemsize for t in (self.branch, self.residual, self.y))

    def names(self) -> dict[str, torch.dtype]:
        """Return the types by the names that the sources use."""
        return {
            "B": self.branch,
            "R": self.residual,
            "Z": self.z,
            "Y": self.y,
            "W": self.parameters,
        }


@dataclass(frozen=True)
class Loaded:
    """A kernel and the layout that it was compiled for."""

    kernel: jit.Kernel
    layout: plan.Plan


@dataclass(eq=False)
class Configuration:
    """All that fixes which kernels a call takes, and those kernels once they were needed."""

    device: int
    row_length: int
    types: Types
    has_weight: bool
    has_bias: bool
    has_branch_bias: bool
    dropout: bool
    _kernels: dict[tuple[object, ...], Loaded] = field(default_factory=dict, repr=False)

    @property
    def stream(self) -> int:
        """The current raw stream of the device."""
        stream: int = torch._C._cuda_getCurrentRawStream(self.device)
        return stream

    def forward(self) -> Loaded:
        """Return the forward kernel."""
        return self._get(("forward",))

    def backward(self, need_affine: bool, need_branch_bias: bool) -> Loaded:
        """Return the backward kernel that makes these sums over rows beside dresidual, dbranch."""
        return self._get(("backward", need_affine, need_branch_bias))

    def add_partials(self) -> Loaded:
        """Return the kernel that adds what the blocks of the backward kernel summed up."""
        return self._get(("sums",))

    def _get(self, key: tuple[object, ...]) -> Loaded:
        loaded = self._kernels.get(key)
        if loaded is None:  # of two threads that make one, the first one's is kept
            loaded = self._kernels.setdefault(key, self._make(*key))
        return loaded

    def _make(
        self, which: object, need_affine: object = True, need_branch_bias: object = True
    ) -> Loaded:
        length, widest = self.row_length, self.types.widest
        constants: dict[str, int | bool] = {"DROPOUT": self.dropout, "HAS_WEIGHT": self.has_weight}
        if which == "forward":
            layout = plan.forward_plan(length, widest)
            constants |= {"HAS_BIAS": self.has_bias, "HAS_BRANCH_BIAS": self.has_branch_bias}
            constants |= layout.constants()
            name, block, shared_bytes = "forward", layout.threads, layout.forward_bytes()
            return Loaded(self._load(FORWARD, constants, name, block, shared_bytes, False), layout)
        layout = plan.backward_plan(length, widest)
        constants |= {"BLOCKS": layout.blocks, **layout.constants()}
        constants |= {"NEED_AFFINE": bool(need_affine), "NEED_BRANCH_BIAS": bool(need_branch_bias)}
        if which == "backward":
            name, block, shared_bytes = "backward", layout.threads, layout.backward_bytes()
        else:
            name, block, shared_bytes = "add_partials", SUM_THREADS, SUM_BYTES
        overlap = which == "sums"
        return Loaded(self._load(BACKWARD, constants, name, block, shared_bytes, overlap), layout)

    def _load(
        self,
        sources: list[str],
        constants: dict[str, int | bool],
        name: str,
        block: int,
        shared_bytes: int,
        overlap: bool,
    ) -> jit.Kernel:
        text = jit.program_text(sources, constants, self.types.names())
        return jit.load(
            text,
            f"hfai_residual_norm_{name}",
            self.device,
            block=block,
            shared_bytes=shared_bytes,
            overlap=overlap,
        )
