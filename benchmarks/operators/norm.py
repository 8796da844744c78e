"""What the benchmarks of LayerNorm and RMSNorm share: cases, inputs, bytes and operations.

Both normalise rows of `length` elements: `rows` × `length`, whatever the input's dimensions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.harness.case import (
    DTYPE_NAMES,
    Case,
    Implementation,
    Inputs,
    Operator,
    Piece,
    Work,
)

GRID_LENGTHS = (
    *(32, 40, 64, 128, 256, 384, 768, 1000, 1024, 2048, 4096, 8192, 16384, 65536),
    200003,  # prime: nothing divides it
)
GRID_ROWS = (1, 64, 4096, 65536)
GRID_DTYPES = (torch.float32, torch.bfloat16)

# The reference works on this many elements at a time: 128 MiB a float64 temporary.
CHUNK_ELEMENTS = 1 << 24
SAMPLED_ROWS = 64  # at the start, in the middle and at the end of an input too large to check


def norm_case(shape: tuple[int, ...], dtype: torch.dtype) -> Case:
    """Return the case of an input of `shape`, normalised over its last dimension."""
    rows = 1
    for extent in shape[:-1]:
        rows *= extent
    name = f"{'x'.join(map(str, shape))} {DTYPE_NAMES[dtype]}"
    return Case(name, dtype, shape, {"rows": rows, "length": shape[-1]})


class Norm(Operator):
    """A norm over rows; LayerNorm and RMSNorm differ in their leaves, reference and peers."""

    eps: float
    leaves: tuple[str, ...]  # "x" first
    forward_operations: int  # an element
    backward_operations: int

    def cases(self) -> Sequence[Case]:
        """Return the published table's cases."""
        return [
            norm_case((25600, 1024), torch.float32),
            norm_case((25600, 1024), torch.bfloat16),
            norm_case((65536, 8192), torch.bfloat16),
            norm_case((64, 64, 64, 40), torch.float32),
            norm_case((64, 768), torch.float32),
        ]

    def grid(self) -> Sequence[Case]:
        """Return all row lengths × rows × types, smallest inputs first."""
        cases = [
            norm_case((rows, length), dtype)
            for dtype in GRID_DTYPES
            for rows in GRID_ROWS
            for length in GRID_LENGTHS
        ]
        return sorted(cases, key=lambda case: case.elements * case.dtype.itemsize)

    def input_bytes(self, case: Case) -> int:
        """Return the bytes of x, dy and the parameters."""
        parameters = len(self.leaves) - 1
        return case.dtype.itemsize * (2 * case.elements + parameters * case.sizes["length"])

    def inputs(self, case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
        """Draw x with a mean other than 0, weights near 1, biases near 0, and dy."""

        def normal(shape: Sequence[int], mean: float, deviation: float) -> Tensor:
            drawn = torch.empty(shape, dtype=case.dtype, device=device)
            return drawn.normal_(mean, deviation, generator=generator)

        length = (case.sizes["length"],)
        drawn = {"x": normal(case.shape, 0.5, 1.0)}
        for name in self.leaves[1:]:
            drawn[name] = normal(length, 1.0 if name == "weight" else 0.0, 0.2)
        leaves = {name: nn.Parameter(tensor) for name, tensor in drawn.items()}
        return Inputs(leaves, normal(case.shape, 0.0, 1.0))

    def implementations(
        self, case: Case, device: torch.device, grid: bool
    ) -> Sequence[Implementation]:
        """Return torch, ours, compiled torch (not in the grid) and the peers."""
        chosen = [
            Implementation("torch", self._bind_module(self.torch_class, case)),
            Implementation(
                "hfai",
                self._bind_module(self.hfai_class, case),
                path=lambda inputs: self._path(case, inputs),
            ),
        ]
        if not grid:
            chosen.append(self._compiled(case, device))
        return [*chosen, *self.peers(device, grid)]

    def reference(self, case: Case, inputs: Inputs, sample: bool) -> Iterator[Piece]:
        """Yield y and dx row by row, then (unless sampled) the parameters' gradients."""
        rows, length = case.sizes["rows"], case.sizes["length"]
        x = inputs.leaves["x"].detach().reshape(rows, length)
        dy = inputs.grad_output.reshape(rows, length)
        parameters = {
            name: leaf.detach().double() for name, leaf in inputs.leaves.items() if name != "x"
        }
        totals = {name: torch.zeros_like(value) for name, value in parameters.items()}
        for part in row_parts(rows, length, sample):
            y, dx, gradients = self.rows_in_float64(x[part].double(), dy[part].double(), parameters)
            cut = _rows_of(part, length)
            yield Piece("y", y, cut)
            yield Piece("dx", dx, cut)
            for name, gradient in gradients.items():
                totals[name] += gradient
        if not sample:
            for name, total in totals.items():
                yield Piece(f"d{name}", total, lambda tensor: tensor)

    def work(self, case: Case) -> tuple[Work, Work]:
        """Count x, y and parameters forward; x, dy, dx, weight and gradients backward."""
        size, n, length = case.dtype.itemsize, case.elements, case.sizes["length"]
        parameters = len(self.leaves) - 1
        return (
            Work(size * (2 * n + parameters * length), self.forward_operations * n),
            Work(size * (3 * n + (1 + parameters) * length), self.backward_operations * n),
        )

    @property
    @abstractmethod
    def torch_class(self) -> type[nn.Module]:
        """The class in `torch.nn`."""

    @property
    @abstractmethod
    def hfai_class(self) -> type[nn.Module]:
        """The class in `hfai.nn`."""

    @abstractmethod
    def functional(self, length: int, *leaves: Tensor) -> Tensor:
        """Call torch's function, as the compiled baseline does."""

    @abstractmethod
    def peers(self, device: torch.device, grid: bool) -> list[Implementation]:
        """Return other libraries' implementations."""

    @abstractmethod
    def rows_in_float64(
        self, x: Tensor, dy: Tensor, parameters: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return y, dx and these rows' share of the parameters' gradients, for float64 rows."""

    def _module(self, module_class: type[nn.Module], case: Case, inputs: Inputs) -> nn.Module:
        """Return a module whose parameters are the input set's."""
        module = module_class(case.sizes["length"], eps=self.eps, device="meta")
        for name in self.leaves[1:]:
            setattr(module, name, inputs.leaves[name])
        return module

    def _bind_module(
        self, module_class: type[nn.Module], case: Case
    ) -> Callable[[Inputs], Callable[[], Tensor]]:
        def bind(inputs: Inputs) -> Callable[[], Tensor]:
            module, x = self._module(module_class, case, inputs), inputs.leaves["x"]
            return lambda: module(x)

        return bind

    def _path(self, case: Case, inputs: Inputs) -> str:
        """Return the path that our module takes, by what it leaves in autograd's graph."""
        ours = self._module(self.hfai_class, case, inputs)
        torchs = self._module(self.torch_class, case, inputs)
        nodes = [module(inputs.leaves["x"]).grad_fn.name() for module in (ours, torchs)]
        if nodes[0] != nodes[1]:
            return "hfai"
        path = ours.explain_path()  # type: ignore[operator]
        return f"torch: {path.reason if path.taken == 'torch' else 'for this input'}"

    def _compiled(self, case: Case, device: torch.device) -> Implementation:
        if device.type != "cuda":
            return Implementation("torch.compile", _unbound, absent="compiled on a GPU only")
        import torch._functorch.config as functorch_config

        # A backward that may free what the forward saved cannot be run twice on one forward, as
        # the capture needs. The kernels are the same.
        functorch_config.donated_buffer = False
        torch.compiler.reset()  # else the shapes of earlier cases count towards its limit
        function = partial(self.functional, case.sizes["length"])
        compiled = torch.compile(function, dynamic=False, fullgraph=True)

        def bind(inputs: Inputs) -> Callable[[], Tensor]:
            leaves = tuple(inputs.leaves.values())
            return lambda: compiled(*leaves)

        return Implementation("torch.compile", bind)


def row_parts(rows: int, length: int, sample: bool) -> list[slice]:
    """Cut rows into parts of at most `CHUNK_ELEMENTS`, or choose a few at both ends and between."""
    if sample and rows > 3 * SAMPLED_ROWS:
        starts = (0, (rows - SAMPLED_ROWS) // 2, rows - SAMPLED_ROWS)
        return [slice(start, start + SAMPLED_ROWS) for start in starts]
    step = max(1, CHUNK_ELEMENTS // length)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def peer(name: str, device: torch.device, load: Callable[[], Implementation]) -> Implementation:
    """Load a peer, or say why it is absent."""
    if device.type != "cuda":
        return Implementation(name, _unbound, absent="runs on a GPU only")
    try:
        return load()
    except Exception as error:  # a peer that breaks on import is as absent as one not installed
        return Implementation(name, _unbound, absent=f"{type(error).__name__}: {error}")


def _rows_of(part: slice, length: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.reshape(-1, length)[part]


def _unbound(inputs: Inputs) -> Callable[[], Tensor]:
    raise RuntimeError("an absent implementation was called")
