"""The compiled LayerNorm kernels: made on first use for one configuration, and kept."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from hfai.kernels import jit
from hfai.kernels.layer_norm import plan

FORWARD = ["layer_norm/forward.cu"]
BACKWARD = ["layer_norm/columns.cuh", "layer_norm/backward.cu"]
LONG_ROWS = ["layer_norm/columns.cuh", "layer_norm/long_rows.cu"]
ADD_PARTIALS = ["layer_norm/column_sums.cu"]

ADD_PARTIALS_THREADS = 1024
# Up to here the time of a single row counts, and backward is one launch.
FEW_ROWS = 128
# Partial sums of dweight and dbias that the blocks for long rows leave behind.
LONG_ROW_GROUPS_PER_MULTIPROCESSOR = 4
LEAST_ROWS_IN_A_GROUP = 32

# What node.cpp calls these programs, and how it reads them: the kind, four numbers that the grid
# follows from, and each kernel's description.
FORWARD_KIND, RESIDENT_KIND, FEW_ROWS_KIND, LONG_KIND = range(4)
NO_KERNEL = (0, 0, 0, 0, 0, 0)


def _description(
    kind: int, numbers: tuple[int, ...], *kernels: jit.Kernel | None
) -> tuple[int, ...]:
    padding = (0,) * (4 - len(numbers))
    described = (NO_KERNEL if kernel is None else kernel.description for kernel in kernels)
    return (kind, *numbers, *padding, *itertools.chain.from_iterable(described))


@dataclass(frozen=True)
class ForwardProgram:
    """The forward kernel of one configuration."""

    kernel: jit.Kernel
    rows_per_cluster: int

    def blocks(self, rows: int) -> int:
        """Return the grid that covers so many rows."""
        return -(-rows // self.rows_per_cluster) * self.kernel.cluster

    def description(self) -> tuple[int, ...]:
        """Return this program as node.cpp reads it."""
        return _description(FORWARD_KIND, (self.rows_per_cluster,), self.kernel)


@dataclass(frozen=True)
class ResidentBackward:
    """Backward for rows that stay on the chip: one persistent kernel."""

    kernel: jit.Kernel
    add_partials: jit.Kernel
    rows_per_cluster: int

    def groups(self, rows: int) -> int:
        """Return how many partial sums the grid leaves: one a block, or cluster of blocks."""
        return min(self._most_groups, -(-rows // self.rows_per_cluster))

    @property
    def _most_groups(self) -> int:
        return max(1, self.kernel.resident_blocks // self.kernel.cluster)

    def description(self) -> tuple[int, ...]:
        """Return this program as node.cpp reads it."""
        numbers = (self.rows_per_cluster, self._most_groups)
        return _description(RESIDENT_KIND, numbers, self.kernel, self.add_partials)

    def launch(self, stream: int, rows: int, groups: int, *pointers: int) -> None:
        """Launch on a raw stream; the pointers are those of backward.cu, in its order."""
        self.kernel.launch(groups * self.kernel.cluster, stream, *pointers, rows)


@dataclass(frozen=True)
class FewRowsBackward:
    """Backward for so few rows that the launches count: one kernel for all three gradients."""

    kernel: jit.Kernel
    rows_per_cluster: int
    need_dx: bool
    column_blocks: int

    def launch(self, stream: int, rows: int, *pointers: int) -> None:
        """Launch on a raw stream; the pointers are those of backward.cu, in its order."""
        cluster = self.kernel.cluster
        clusters = -(-self.column_blocks // cluster)
        if self.need_dx:
            clusters += -(-rows // self.rows_per_cluster)
        self.kernel.launch(clusters * cluster, stream, *pointers, rows)

    def description(self) -> tuple[int, ...]:
        """Return this program as node.cpp reads it."""
        numbers = (self.rows_per_cluster, self.column_blocks)
        return _description(FEW_ROWS_KIND, numbers, self.kernel)


@dataclass(frozen=True)
class LongBackward:
    """Backward for longer rows: one kernel for dx, one for the sums over rows."""

    dx: jit.Kernel | None
    columns: jit.Kernel | None
    add_partials: jit.Kernel
    multiprocessors: int
    tiles: int

    def groups(self, rows: int) -> int:
        """Return in how many stretches of rows the columns are summed."""
        return max(1, min(self._most_groups, rows // LEAST_ROWS_IN_A_GROUP))

    @property
    def _most_groups(self) -> int:
        return -(-LONG_ROW_GROUPS_PER_MULTIPROCESSOR * self.multiprocessors // self.tiles)

    def description(self) -> tuple[int, ...]:
        """Return this program as node.cpp reads it."""
        numbers = (LEAST_ROWS_IN_A_GROUP, self._most_groups, self.tiles)
        return _description(LONG_KIND, numbers, self.dx, self.add_partials, self.columns)

    def launch(self, stream: int, rows: int, groups: int, *pointers: int) -> None:
        """Launch on a raw stream; the pointers are those of backward.cu, in its order."""
        dy, x, weight, mean, rstd, dx, dweight_partial, dbias_partial = pointers
        if self.dx is not None:
            self.dx.launch(rows, stream, dy, x, weight, mean, rstd, dx, rows)
        if self.columns is not None:
            self.columns.launch(
                self.tiles * groups,
                stream,
                dy,
                x,
                mean,
                rstd,
                dweight_partial,
                dbias_partial,
                rows,
                groups,
            )


Backward: TypeAlias = ResidentBackward | FewRowsBackward | LongBackward


Run: TypeAlias = Callable[[Tensor, "Tensor | None", "Tensor | None", float], "Tensor | None"]


@dataclass(eq=False)
class Configuration:
    """All that fixes which kernels a call takes, and those kernels once they were needed."""

    device: int
    shape: tuple[int, ...]
    row_length: int
    x_dtype: torch.dtype
    y_dtype: torch.dtype
    affine_dtype: torch.dtype | None
    """Of weight and bias; None where there is neither."""
    has_weight: bool
    has_bias: bool
    centered: bool
    """True for LayerNorm, False for RMSNorm."""
    run: Run = field(init=False, repr=False)
    """(x, weight, bias, eps) -> y, differentiably: autograd.py's or node.cpp's. It returns None
    where a tensor does not fit (`autograd.fits`): the call is torch's then."""
    _forward: dict[tuple[bool, ...], ForwardProgram] = field(default_factory=dict, repr=False)
    _backward: dict[tuple[bool, ...], Backward] = field(default_factory=dict, repr=False)

    def forward(self, aligned: bool, few_rows: bool) -> ForwardProgram:
        """Return the forward program.

        Args:
            aligned: all addresses are multiples of 16 bytes.
            few_rows: at most `FEW_ROWS` of them.
        """
        key = (aligned, few_rows)
        program = self._forward.get(key)
        if program is None:  # of two threads that make one, the first one's is kept
            program = self._forward.setdefault(key, self._make_forward(*key))
        return program

    def backward(
        self, aligned: bool, few_rows: bool, need_dx: bool, need_dweight: bool, need_dbias: bool
    ) -> Backward:
        """Return the backward program that makes the gradients that are needed.

        Args:
            aligned: all addresses are multiples of 16 bytes.
            few_rows: at most `FEW_ROWS` of them.
            need_dx: whether x needs a gradient.
            need_dweight: whether weight needs one.
            need_dbias: whether bias needs one.
        """
        key = (aligned, few_rows, need_dx, need_dweight, need_dbias)
        program = self._backward.get(key)
        if program is None:
            program = self._backward.setdefault(key, self._make_backward(*key))
        return program

    def _types(self) -> dict[str, torch.dtype]:
        return {"X": self.x_dtype, "Y": self.y_dtype, "W": self.affine_dtype or torch.float32}

    def _constants(self, aligned: bool) -> dict[str, int | bool]:
        return {
            "ROW_LENGTH": self.row_length,
            "ALIGNED": aligned,
            "CENTERED": self.centered,
            "HAS_WEIGHT": self.has_weight,
        }

    def _make_forward(self, aligned: bool, few_rows: bool) -> ForwardProgram:
        x_bytes, y_bytes = self.x_dtype.itemsize, self.y_dtype.itemsize
        limits = jit.device_limits(self.device)
        layout = plan.forward_plan(self.row_length, x_bytes, y_bytes, limits, few_rows)
        if few_rows and layout == plan.forward_plan(self.row_length, x_bytes, y_bytes, limits):
            return self.forward(aligned, False)
        constants = self._constants(aligned) | {"HAS_BIAS": self.has_bias}
        if layout is None:
            unused = {"NEED_DWEIGHT": False, "NEED_DBIAS": False, "STRIPS": 1}
            text = self._long_rows(constants | unused)
            return ForwardProgram(self._load_long(text, "forward_long"), 1)
        text = jit.program_text(FORWARD, constants | layout.constants(), self._types())
        kernel = jit.load(
            text,
            "hfai_layer_norm_forward",
            self.device,
            block=layout.threads,
            cluster=layout.cluster,
        )
        return ForwardProgram(kernel, layout.rows_per_cluster)

    def _make_backward(
        self, aligned: bool, few_rows: bool, need_dx: bool, need_dweight: bool, need_dbias: bool
    ) -> Backward:
        types = self._types()
        limits = jit.device_limits(self.device)
        sizes = (
            self.row_length,
            self.x_dtype.itemsize,
            self.y_dtype.itemsize,
            types["W"].itemsize if self.has_weight else 0,
        )
        layout = plan.backward_plan(*sizes, limits, aligned, few_rows)
        constants = self._constants(aligned) | {
            "NEED_DWEIGHT": need_dweight,
            "NEED_DBIAS": need_dbias,
        }
        vector = plan.vector_length(*sizes[:3])
        strips = 1 if layout is not None else plan.strips(vector)
        tiles = -(-self.row_length // (32 * vector * strips))
        constants["STRIPS"] = strips
        if layout is not None:
            constants |= {"NEED_DX": need_dx, "FEW_ROWS": few_rows, **layout.constants()}
            kernel = jit.load(
                jit.program_text(BACKWARD, constants, types),
                "hfai_layer_norm_backward",
                self.device,
                block=layout.threads,
                shared_bytes=layout.shared_bytes(*sizes),
                cluster=layout.cluster,
            )
            if few_rows:
                column_blocks = tiles if need_dweight or need_dbias else 0
                return FewRowsBackward(kernel, layout.rows_per_cluster, need_dx, column_blocks)
            add_partials = _add_partials(self.device, types["W"])
            return ResidentBackward(kernel, add_partials, layout.rows_per_cluster)
        text = self._long_rows(constants | {"HAS_BIAS": False})
        sums = need_dweight or need_dbias
        return LongBackward(
            dx=self._load_long(text, "backward_long") if need_dx else None,
            columns=self._load_long(text, "columns") if sums else None,
            add_partials=_add_partials(self.device, types["W"]),
            multiprocessors=limits.multiprocessors,
            tiles=tiles,
        )

    def _long_rows(self, constants: dict[str, int | bool]) -> str:
        vector = plan.vector_length(self.row_length, self.x_dtype.itemsize, self.y_dtype.itemsize)
        constants = constants | {"VECTOR": vector, "THREADS": plan.LONG_ROW_THREADS}
        return jit.program_text(LONG_ROWS, constants, self._types())

    def _load_long(self, text: str, name: str) -> jit.Kernel:
        name = f"hfai_layer_norm_{name}"
        return jit.load(text, name, self.device, block=plan.LONG_ROW_THREADS)


@functools.cache
def _add_partials(device: int, dtype: torch.dtype) -> jit.Kernel:
    constants: dict[str, int | bool] = {"THREADS": ADD_PARTIALS_THREADS}
    text = jit.program_text(ADD_PARTIALS, constants, {"W": dtype})
    return jit.load(
        text, "hfai_layer_norm_add_partials", device, block=ADD_PARTIALS_THREADS, overlap=True
    )
