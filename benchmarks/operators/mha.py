"""MultiheadAttention: torch, fused attention assembled by hand and compiled, and ours.

Operations count the products alone, a multiply-add as two: forward 4 of E by E for each row and 2
of a head's scores, backward twice the former and 2.5 times the latter (the scores once more). Bytes
are x, y and the parameters; the weights besides where they are asked for. All cases are
self-attention, batch first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hfai.nn
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

Kind = Literal["plain", "causal", "padded"]
KINDS: tuple[Kind, ...] = ("plain", "causal", "padded")
GRID_LENGTHS = (16, 32, 64, 100, 128, 197, 256, 512, 1024, 4096)
GRID_HEAD_DIMS = (32, 64, 80, 128)
GRID_HEADS = 8
GRID_TOKENS = 16384
REFERENCE_SCORES = (
    1 << 26
)  # of float64, for a part of the batch: half a GiB each time they are made
TOLERANCE_TF32 = 5e-3
LEAVES = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")


def mha_case(
    batch: int,
    length: int,
    features: int,
    heads: int,
    dtype: torch.dtype,
    *,
    need_weights: bool = True,
    ieee: bool = False,
    kind: Kind = "plain",
) -> Case:
    """Return the case of `batch` sequences of `length` rows of `features`."""
    name = f"{batch}x{length}x{features}, {heads} heads, {DTYPE_NAMES[dtype]}"
    name += " ieee" if ieee else ""
    name += "" if kind == "plain" else f", {kind}"
    name += "" if need_weights else ", no weights"
    sizes = {"batch": batch, "length": length, "features": features, "heads": heads}
    sizes |= {"ieee": int(ieee), "need_weights": int(need_weights), "kind": KINDS.index(kind)}
    return Case(name, dtype, (batch, length, features), sizes)


class MHA(Operator):
    """`torch.nn.MultiheadAttention` on q = k = v."""

    name = "mha"

    def cases(self) -> Sequence[Case]:
        """Return the published table's cases: the default call, which returns averaged weights."""
        bf16, fp32 = torch.bfloat16, torch.float32
        shapes = ((200, 256, 1024, 16), (5000, 64, 512, 8))
        return [
            case
            for shape in shapes
            for case in (
                mha_case(*shape, bf16),
                mha_case(*shape, bf16, need_weights=False),
                mha_case(*shape, fp32),
                mha_case(*shape, fp32, ieee=True),
            )
        ]

    def grid(self) -> Sequence[Case]:
        """Return lengths × head dimensions × masks in bf16 and fp32, without weights.

        What models have most comes first, so that a run cut short has that: heads of 64 and calls
        without masks, then heads of 64 with masks and other heads without, then the rest.
        """
        cases = [
            mha_case(
                GRID_TOKENS // length,
                length,
                GRID_HEADS * head,
                GRID_HEADS,
                dtype,
                need_weights=False,
                kind=kind,
            )
            for length in GRID_LENGTHS
            for head in GRID_HEAD_DIMS
            for kind in KINDS
            for dtype in (torch.bfloat16, torch.float32)
        ]
        return sorted(cases, key=_rarity)

    def input_bytes(self, case: Case) -> int:
        """Return the bytes of x, dy and the parameters."""
        return case.dtype.itemsize * (2 * case.elements + 4 * case.sizes["features"] ** 2)

    def inputs(self, case: Case, device: torch.device, generator: torch.Generator) -> Inputs:
        """Draw x, dy, and weights from the distribution that torch's module starts from."""
        features = case.sizes["features"]

        def drawn(*shape: int, bound: float = 0.0) -> Tensor:
            empty = torch.empty(shape, dtype=case.dtype, device=device)
            if bound:
                return empty.uniform_(-bound, bound, generator=generator)
            return empty.normal_(generator=generator)

        bound = features**-0.5
        parameters = (
            drawn(3 * features, features, bound=(6 / (4 * features)) ** 0.5),
            drawn(3 * features, bound=bound),
            drawn(features, features, bound=bound),
            drawn(features, bound=bound),
        )
        leaves = {"x": nn.Parameter(drawn(*case.shape))}
        leaves |= {n: nn.Parameter(p) for n, p in zip(LEAVES, parameters, strict=True)}
        return Inputs(leaves, drawn(*case.shape))

    def implementations(
        self, case: Case, device: torch.device, grid: bool
    ) -> Sequence[Implementation]:
        """Return torch, ours and the compiled peer, torch's switch for TF32 set as the case asks.

        The peer returns no weights, whatever the case asks for.
        """
        torch.backends.cuda.matmul.allow_tf32 = not case.sizes["ieee"]
        found = [
            Implementation("torch", self._bind(nn.MultiheadAttention, case)),
            Implementation(
                "hfai",
                self._bind(hfai.nn.MultiheadAttention, case),
                path=lambda inputs: self._path(case, inputs),
            ),
        ]
        return found if grid else [*found, self._assembled(case, device)]

    def reference(self, case: Case, inputs: Inputs, sample: bool) -> Iterator[Piece]:
        """Yield y and all gradients in float64, of a part of the batch at a time."""
        double = {name: leaf.detach().double() for name, leaf in inputs.leaves.items()}
        parameters = {name: nn.Parameter(double[name]) for name in LEAVES}
        length, heads = case.sizes["length"], case.sizes["heads"]
        step = max(1, REFERENCE_SCORES // (heads * length * length))
        for start in range(0, case.sizes["batch"], step):
            part = slice(start, start + step)
            x = nn.Parameter(double["x"][part])
            y = attention_by_formula(x, parameters, heads, _allowed(case, x.device, part))
            torch.autograd.backward(y, inputs.grad_output[part].double())
            yield Piece("y", y.detach(), operator.itemgetter(part))
            assert x.grad is not None
            yield Piece("dx", x.grad, operator.itemgetter(part))
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            yield Piece(f"d{name}", parameter.grad, operator.itemgetter(...))

    def work(self, case: Case) -> tuple[Work, Work]:
        """Count x, y, the parameters and weights forward; these and their gradients backward."""
        size, features, length = case.dtype.itemsize, case.sizes["features"], case.sizes["length"]
        rows = case.sizes["batch"] * length
        products = 2 * rows * 4 * features**2
        scores = 2 * 2 * rows * length * features
        unit = DTYPE_NAMES[case.dtype]
        if case.dtype == torch.float32 and not case.sizes["ieee"]:
            unit = "tf32"
        returned = rows * length if case.sizes["need_weights"] else 0
        parameters = 4 * features**2
        return (
            Work(size * (2 * case.elements + parameters + returned), products + scores, unit),
            Work(
                size * (3 * case.elements + 2 * parameters),
                2 * products + scores * 5 // 2,
                unit,
            ),
        )

    def tolerance(self, case: Case) -> float:
        """Return the relative error above which an output is wrong."""
        if case.dtype == torch.float32 and not case.sizes["ieee"]:
            return TOLERANCE_TF32
        return TOLERANCE[case.dtype]

    def _bind(
        self, module_class: type[nn.MultiheadAttention], case: Case
    ) -> Callable[[Inputs], Callable[[], Tensor]]:
        options = call_options(case)

        def bind(inputs: Inputs) -> Callable[[], Tensor]:
            module, x = self._module(module_class, case, inputs), inputs.leaves["x"]
            given = {
                name: value.to(x.device) if isinstance(value, Tensor) else value
                for name, value in options.items()
            }

            def call() -> Tensor:
                y: Tensor = module(x, x, x, **given)[0]
                return y

            return call

        return bind

    def _module(
        self, module_class: type[nn.MultiheadAttention], case: Case, inputs: Inputs
    ) -> nn.MultiheadAttention:
        """Return a module whose parameters are the input set's."""
        module = module_class(
            case.sizes["features"], case.sizes["heads"], batch_first=True, device="meta"
        )
        for name in LEAVES:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, inputs.leaves[name])
        return module

    def _path(self, case: Case, inputs: Inputs) -> str:
        """Return the path that our module takes, by what it leaves in autograd's graph."""
        names = [
            _nodes(self._bind(cls, case)(inputs)())
            for cls in (hfai.nn.MultiheadAttention, nn.MultiheadAttention)
        ]
        ours = sorted(names[0] - names[1])
        return f"hfai: {ours[0]}" if ours else "torch: for this input"

    def _assembled(self, case: Case, device: torch.device) -> Implementation:
        """Return what a user can assemble from torch's parts: SDPA on views, compiled."""
        name = "compiled SDPA"
        if device.type != "cuda":
            return Implementation(name, _unbound, absent="compiled on a GPU only")
        import torch._functorch.config as functorch_config

        # A backward that may free what the forward saved cannot be run twice on one forward, as
        # the capture needs. The kernels are the same.
        functorch_config.donated_buffer = False
        torch.compiler.reset()
        function = partial(assembled, case.sizes["heads"])
        compiled = torch.compile(function, dynamic=False, fullgraph=True)

        def bind(inputs: Inputs) -> Callable[[], Tensor]:
            leaves = tuple(inputs.leaves.values())
            return lambda: compiled(*leaves)

        return Implementation(name, bind)


def assembled(heads: int, x: Tensor, w_in: Tensor, b_in: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Compute attention as a careful user of torch writes it."""
    batch, length, features = x.shape
    qkv = F.linear(x, w_in, b_in).view(batch, length, 3, heads, features // heads)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    made = F.scaled_dot_product_attention(q, k, v)
    return F.linear(made.transpose(1, 2).reshape(batch, length, features), w, b)


def call_options(case: Case) -> dict[str, Any]:
    """Return the keywords of a case's call; masks are on the CPU."""
    length, kind = case.sizes["length"], KINDS[case.sizes["kind"]]
    options: dict[str, Any] = {"need_weights": bool(case.sizes["need_weights"])}
    if kind == "causal":
        options["attn_mask"] = torch.ones(length, length, dtype=torch.bool).triu(1)
        options["is_causal"] = True
    if kind == "padded":
        options["key_padding_mask"] = torch.arange(length) >= _lengths(case)[:, None]
    return options


def attention_by_formula(
    x: Tensor, parameters: dict[str, nn.Parameter], heads: int, allowed: Tensor | None
) -> Tensor:
    """Compute y = softmax(q kᵀ / √D) v for each head, between the two linear maps.

    Args:
        x: [batch, length, features].
        parameters: by the names of `LEAVES`.
        heads: over how many the features are split.
        allowed: which keys a row sees, broadcast to [batch, heads, length, length]; None for all.
    """
    batch, length, features = x.shape
    qkv = F.linear(x, parameters["in_proj_weight"], parameters["in_proj_bias"])
    q, k, v = qkv.view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    scores = q @ k.transpose(-2, -1) * (features // heads) ** -0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    rows = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, features)
    return F.linear(rows, parameters["out_proj.weight"], parameters["out_proj.bias"])


def _allowed(case: Case, device: torch.device, part: slice) -> Tensor | None:
    options = call_options(case)
    if "key_padding_mask" in options:
        padding: Tensor = options["key_padding_mask"][part, None, None]
        return padding.logical_not().to(device)
    if "attn_mask" in options:
        mask: Tensor = options["attn_mask"]
        return mask.logical_not().to(device)
    return None


def _lengths(case: Case) -> Tensor:
    """Return a length between half and all of the rows for each sequence, the same each time."""
    length = case.sizes["length"]
    return length - torch.arange(case.sizes["batch"]) * 7919 % (length // 2)


def _rarity(case: Case) -> int:
    """Return 0 for what models have most, and more for what they have less."""
    sizes = case.sizes
    return (sizes["features"] // sizes["heads"] != 64) + (KINDS[sizes["kind"]] != "plain")


def _nodes(y: Tensor) -> set[str]:
    """Return the names of the nodes up to four steps before an output."""
    found: set[str] = set()
    level = [y.grad_fn]
    for _ in range(5):
        found |= {node.name() for node in level if node is not None}
        level = [n for node in level if node is not None for n, _ in node.next_functions]
    return found


def _unbound(inputs: Inputs) -> Callable[[], Tensor]:
    raise RuntimeError("an absent implementation was called")
