"""The compiled LayerNorm kernels: one program a configuration, made on first use and kept."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from hfai.kernels import jit
from hfai.kernels.layer_norm import plan

ADD_PARTIALS_THREADS = 1024
# Partial sums of dweight and dbias that the blocks for long rows leave behind.
LONG_ROW_GROUPS_PER_MULTIPROCESSOR = 4


@dataclass(frozen=True)
class ForwardProgram:
    """The forward kernel of one configuration."""

    kernel: jit.Kernel
    rows_per_cluster: int

    def enqueue(self, stream: int, rows: int, *arguments: int | float) -> None:
        """Launch on a raw stream, one block or cluster for every `rows_per_cluster` rows."""
        clusters = -(-rows // self.rows_per_cluster)
        self.kernel.launch(clusters * self.kernel.cluster, stream, *arguments, rows)


@dataclass(frozen=True)
class ResidentBackward:
    """Backward for rows that stay on the chip: one persistent kernel."""

    kernel: jit.Kernel
    add_partials: jit.Kernel
    rows_per_cluster: int

    def groups(self, rows: int) -> int:
        """Return how many partial sums the grid leaves: one a block, or cluster of blocks."""
        resident = max(1, self.kernel.resident_blocks // self.kernel.cluster)
        return min(resident, -(-rows // self.rows_per_cluster))

    def enqueue(self, stream: int, rows: int, groups: int, *pointers: int) -> None:
        """Launch on a raw stream; the pointers are those of backward.cu, in its order."""
        self.kernel.launch(groups * self.kernel.cluster, stream, *pointers, rows)


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
        wanted = -(-LONG_ROW_GROUPS_PER_MULTIPROCESSOR * self.multiprocessors // self.tiles)
        return max(1, min(wanted, rows // 32))

    def enqueue(self, stream: int, rows: int, groups: int, *pointers: int) -> None:
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


@functools.cache
def forward(
    device: int,
    row_length: int,
    x_dtype: torch.dtype,
    y_dtype: torch.dtype,
    affine_dtype: torch.dtype | None,
    has_weight: bool,
    has_bias: bool,
    centered: bool,
    aligned: bool,
) -> ForwardProgram:
    """Return the forward program of a configuration, compiled and loaded on `device`."""
    limits = jit.device_limits(device)
    types = {"X": x_dtype, "Y": y_dtype, "W": affine_dtype or torch.float32}
    constants: dict[str, int | bool] = {
        "ROW_LENGTH": row_length,
        "ALIGNED": aligned,
        "CENTERED": centered,
        "HAS_WEIGHT": has_weight,
        "HAS_BIAS": has_bias,
    }
    layout = plan.forward_plan(row_length, x_dtype.itemsize, y_dtype.itemsize, limits)
    if layout is None:
        constants |= {
            "VECTOR": plan.vector_length(row_length, x_dtype.itemsize, y_dtype.itemsize),
            "THREADS": plan.LONG_ROW_THREADS,
            "NEED_DWEIGHT": False,
            "NEED_DBIAS": False,
        }
        text = jit.program_text("layer_norm/long_rows.cu", constants, types)
        name = "hfai_layer_norm_forward_long"
        return ForwardProgram(jit.load(text, name, device, block=plan.LONG_ROW_THREADS), 1)
    text = jit.program_text("layer_norm/forward.cu", constants | layout.constants(), types)
    kernel = jit.load(
        text, "hfai_layer_norm_forward", device, block=layout.threads, cluster=layout.cluster
    )
    return ForwardProgram(kernel, layout.rows_per_cluster)


@functools.cache
def backward(
    device: int,
    row_length: int,
    x_dtype: torch.dtype,
    y_dtype: torch.dtype,
    affine_dtype: torch.dtype | None,
    has_weight: bool,
    centered: bool,
    aligned: bool,
    need_dx: bool,
    need_dweight: bool,
    need_dbias: bool,
) -> ResidentBackward | LongBackward:
    """Return the backward program of a configuration, compiled and loaded on `device`."""
    limits = jit.device_limits(device)
    types = {"X": x_dtype, "Y": y_dtype, "W": affine_dtype or torch.float32}
    constants: dict[str, int | bool] = {
        "ROW_LENGTH": row_length,
        "ALIGNED": aligned,
        "CENTERED": centered,
        "HAS_WEIGHT": has_weight,
        "NEED_DWEIGHT": need_dweight,
        "NEED_DBIAS": need_dbias,
    }
    add_partials = _add_partials(device, types["W"])
    weight_bytes = types["W"].itemsize if has_weight else 0
    layout = plan.backward_plan(
        row_length,
        x_dtype.itemsize,
        y_dtype.itemsize,
        weight_bytes,
        limits,
        aligned,
    )
    if layout is not None:
        constants |= {"NEED_DX": need_dx, **layout.constants()}
        text = jit.program_text("layer_norm/backward.cu", constants, types)
        kernel = jit.load(
            text,
            "hfai_layer_norm_backward",
            device,
            block=layout.threads,
            shared_bytes=layout.shared_bytes(
                row_length, x_dtype.itemsize, y_dtype.itemsize, weight_bytes
            ),
            cluster=layout.cluster,
        )
        return ResidentBackward(kernel, add_partials, layout.rows_per_cluster)
    vector = plan.vector_length(row_length, x_dtype.itemsize, y_dtype.itemsize)
    threads = plan.LONG_ROW_THREADS
    constants |= {"HAS_BIAS": need_dbias, "VECTOR": vector, "THREADS": threads}
    text = jit.program_text("layer_norm/long_rows.cu", constants, types)

    def load(name: str) -> jit.Kernel:
        return jit.load(text, f"hfai_layer_norm_{name}", device, block=threads)

    return LongBackward(
        dx=load("backward_long") if need_dx else None,
        columns=load("columns") if need_dweight or need_dbias else None,
        add_partials=add_partials,
        multiprocessors=limits.multiprocessors,
        tiles=-(-row_length // (32 * vector)),
    )


@functools.cache
def _add_partials(device: int, dtype: torch.dtype) -> jit.Kernel:
    constants: dict[str, int | bool] = {"THREADS": ADD_PARTIALS_THREADS}
    text = jit.program_text("layer_norm/column_sums.cu", constants, {"W": dtype})
    return jit.load(text, "hfai_layer_norm_add_partials", device, block=ADD_PARTIALS_THREADS)
