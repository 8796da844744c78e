"""LayerNorm's programs for the host: what node.cpp is run on where there is no GPU.

A configuration of device -1 describes functions of the host in place of kernels. They are called
with the same grid and the same parameters that a launch would have, read and write the tensors by
address, and compute in float64. So everything of node.cpp but the driver's own call is at work:
which program, which addresses, which grid, what is allocated, saved and returned.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor

from hfai.kernels.layer_norm import programs
from hfai.kernels.layer_norm.programs import Configuration

Function = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.POINTER(ctypes.c_void_p))
CLUSTER = 2
ROWS_PER_CLUSTER = 3
MOST_GROUPS = 4


def _numbers(parameters: object, count: int) -> list[int]:
    """Return the first `count` eight-byte parameters."""
    return [ctypes.c_uint64.from_address(parameters[i]).value for i in range(count)]  # type: ignore[index]


def _tensor(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the memory at an address as a tensor."""
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = (ctypes.c_char * size).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


@dataclass(eq=False)
class HostConfiguration(Configuration):
    """A configuration whose programs are functions of the host; `calls` lists what was run."""

    kind: int = programs.RESIDENT_KIND
    calls: list[tuple[str, int]] = field(default_factory=list)
    made: list[tuple[bool, ...]] = field(default_factory=list)
    refuse: Exception | None = None
    """Raised in place of making a program."""
    _functions: list[object] = field(default_factory=list)

    def forward(  # type: ignore[override]
        self, aligned: bool, few_rows: bool
    ) -> SimpleNamespace:
        """Describe the forward function."""
        self._make(aligned, few_rows)
        described = (
            programs.FORWARD_KIND,
            ROWS_PER_CLUSTER,
            0,
            0,
            0,
            *self._kernel(self._forward_),
        )
        return SimpleNamespace(description=lambda: described)

    def backward(  # type: ignore[override]
        self, aligned: bool, few_rows: bool, need_dx: bool, need_dweight: bool, need_dbias: bool
    ) -> SimpleNamespace:
        """Describe the backward functions of `kind`."""
        self._make(aligned, few_rows, need_dx, need_dweight, need_dbias)
        needs = (need_dx, need_dweight, need_dbias)
        add = self._kernel(self._add_partials)
        if few_rows:
            numbers = (programs.FEW_ROWS_KIND, ROWS_PER_CLUSTER, 5, 0, 0)
            kernels = self._kernel(lambda grid, p: self._few_rows(grid, p, *needs))
        elif self.kind == programs.RESIDENT_KIND:
            numbers = (self.kind, ROWS_PER_CLUSTER, MOST_GROUPS, 0, 0)
            kernels = self._kernel(lambda grid, p: self._resident(grid, p, *needs)) + add
        else:
            numbers = (self.kind, 2, MOST_GROUPS, 7, 0)
            columns = self._kernel(lambda grid, p: self._columns(grid, p, *needs))
            kernels = self._kernel(self._dx) + add + columns
        return SimpleNamespace(description=lambda: (*numbers, *kernels))

    def _make(self, *flags: bool) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.made.append(flags)

    def _kernel(self, run: Callable[[int, object], None]) -> tuple[int, ...]:
        function = Function(run)
        self._functions.append(function)
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None
        return (address, -1, 32, 0, CLUSTER, 0)

    def _x_hat(self, x: int, mean: int, rstd: int, rows: int) -> tuple[Tensor, Tensor]:
        values = _tensor(x, (rows, self.row_length), self.x_dtype).double()
        means = _tensor(mean, (rows, 1), torch.float32).double() if self.centered else 0.0
        scale = _tensor(rstd, (rows, 1), torch.float32).double()
        return (values - means) * scale, scale

    def _affine(self, address: int) -> Tensor | None:
        if not address:
            return None
        assert self.affine_dtype is not None
        return _tensor(address, (self.row_length,), self.affine_dtype)

    def _forward_(self, grid: int, parameters: object) -> None:
        x, weight, bias, y, mean, rstd, _, rows = _numbers(parameters, 8)
        assert grid == -(-rows // ROWS_PER_CLUSTER) * CLUSTER
        eps_address = parameters[6]  # type: ignore[index]
        (eps,) = struct.unpack("f", ctypes.string_at(eps_address, 4))
        values = _tensor(x, (rows, self.row_length), self.x_dtype).double()
        means = values.mean(1, keepdim=True) if self.centered else torch.zeros(rows, 1).double()
        scale = ((values - means).square().mean(1, keepdim=True) + eps).rsqrt()
        result = (values - means) * scale
        if weight:
            result = result * self._affine(weight)
        if bias:
            result = result + self._affine(bias)
        _tensor(y, (rows, self.row_length), self.y_dtype).copy_(result)
        if rstd:
            _tensor(rstd, (rows, 1), torch.float32).copy_(scale)
        if mean and self.centered:
            _tensor(mean, (rows, 1), torch.float32).copy_(means)
        self.calls.append(("forward", grid))

    def _write_dx(self, pointers: list[int], rows: int) -> None:
        dy, x, weight, mean, rstd, dx = pointers
        x_hat, scale = self._x_hat(x, mean, rstd, rows)
        g = _tensor(dy, (rows, self.row_length), self.y_dtype).double()
        if weight:
            g = g * self._affine(weight)
        result = g - x_hat * (g * x_hat).mean(1, keepdim=True)
        if self.centered:
            result = result - g.mean(1, keepdim=True)
        _tensor(dx, (rows, self.row_length), self.x_dtype).copy_(result * scale)

    def _sums(self, pointers: list[int], rows: int) -> tuple[Tensor, Tensor]:
        dy, x, mean, rstd = pointers
        x_hat, _ = self._x_hat(x, mean, rstd, rows)
        g = _tensor(dy, (rows, self.row_length), self.y_dtype).double()
        return g * x_hat, g

    def _few_rows(self, grid: int, p: object, dx: bool, dweight: bool, dbias: bool) -> None:
        pointers = _numbers(p, 9)
        rows = pointers[-1]
        assert grid == (3 + dx * -(-rows // ROWS_PER_CLUSTER)) * CLUSTER  # 5 column blocks
        assert [bool(pointer) for pointer in pointers[5:8]] == [dx, dweight, dbias]
        if dx:
            self._write_dx(pointers[:6], rows)
        by_row = self._sums([pointers[0], pointers[1], pointers[3], pointers[4]], rows)
        for needed, address, terms in zip((dweight, dbias), pointers[6:8], by_row, strict=True):
            if needed:
                out = self._affine(address)
                assert out is not None
                out.copy_(terms.sum(0))
        self.calls.append(("few rows", grid))

    def _resident(self, grid: int, p: object, dx: bool, dweight: bool, dbias: bool) -> None:
        pointers = _numbers(p, 9)
        rows = pointers[-1]
        groups = min(MOST_GROUPS, -(-rows // ROWS_PER_CLUSTER))
        assert grid == groups * CLUSTER
        assert bool(pointers[5]) == dx
        if dx:
            self._write_dx(pointers[:6], rows)
        sources = [pointers[0], pointers[1], pointers[3], pointers[4]]
        self._partials(sources, rows, groups, pointers[6:8], dweight, dbias)
        self.calls.append(("resident", grid))

    def _dx(self, grid: int, p: object) -> None:
        pointers = _numbers(p, 7)
        assert grid == pointers[-1]
        self._write_dx(pointers[:6], grid)
        self.calls.append(("dx", grid))

    def _columns(self, grid: int, p: object, dx: bool, dweight: bool, dbias: bool) -> None:
        *pointers, rows, groups = _numbers(p, 8)
        assert groups == max(1, min(MOST_GROUPS, rows // 2))
        assert grid == 7 * groups
        self._partials(pointers[:4], rows, groups, pointers[4:], dweight, dbias)
        self.calls.append(("columns", grid))

    def _partials(
        self,
        sources: list[int],
        rows: int,
        groups: int,
        addresses: list[int],
        dweight: bool,
        dbias: bool,
    ) -> None:
        both = dweight and dbias
        assert both == (addresses[0] != addresses[1])
        terms = self._sums(sources, rows)
        slots = ((dweight, addresses[0], terms[0]), (dbias, addresses[1], terms[1]))
        for needed, address, by_row in slots:
            if needed:
                out = _tensor(address, (groups, self.row_length), torch.float32)
                for group in range(groups):
                    out[group].copy_(by_row[group::groups].sum(0))

    def _add_partials(self, grid: int, p: object) -> None:
        first, second, dfirst, dsecond, row_length, groups = _numbers(p, 6)
        sums = 1 if first == second else 2
        assert row_length == self.row_length
        assert grid == -(-row_length // 32) * sums
        for source, target in {(first, dfirst), (second, dsecond)}:
            out = self._affine(target)
            assert out is not None
            out.copy_(_tensor(source, (groups, row_length), torch.float32).sum(0))
        self.calls.append(("add partials", grid))
