"""The compiled attention kernels: made on first use for one shape and kind of masks, and kept."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from hfai.kernels import jit
from hfai.kernels.attention import hopper, plan
from hfai.kernels.attention.hopper import HopperBackwardPlan, HopperForwardPlan, HopperWeightsPlan
from hfai.kernels.attention.masking import Masking
from hfai.kernels.attention.plan import BackwardPlan, ForwardPlan, WeightsPlan
from hfai.kernels.attention.precision import is_split

AnyForward = ForwardPlan | HopperForwardPlan
AnyBackward = BackwardPlan | HopperBackwardPlan
AnyWeights = WeightsPlan | HopperWeightsPlan
AnyPlan = AnyForward | AnyBackward | AnyWeights
P = TypeVar("P", AnyForward, AnyBackward, AnyWeights)

_COMMON = ("tensor_cores.cuh", "attention/tiles.cuh", "attention/scores.cuh")
_HOPPER = ("warpgroup.cuh", *_COMMON, "attention/swizzled.cuh", "attention/scaled.cuh")
_SOURCES: dict[type, tuple[str, ...]] = {
    ForwardPlan: (*_COMMON, "attention/forward.cu"),
    BackwardPlan: (*_COMMON, "attention/backward.cu"),
    WeightsPlan: (*_COMMON, "attention/weights.cuh", "attention/weights.cu"),
    HopperForwardPlan: (*_HOPPER, "attention/hopper_forward.cu"),
    HopperBackwardPlan: (*_HOPPER, "attention/hopper_backward.cu"),
    HopperWeightsPlan: (*_HOPPER, "attention/weights.cuh", "attention/hopper_weights.cu"),
}


class MaskKind(enum.IntEnum):
    """How a mask's elements lie in memory; the values are those of scores.cuh."""

    NONE = 0
    BOOLEAN = 1
    ADDED = 2
    ADDED_FLOAT = 3


@dataclass(frozen=True)
class Program(Generic[P]):
    """A loaded kernel and the plan it was made by."""

    plan: P
    kernel: jit.Kernel


def kind_of(mask: Tensor | None) -> MaskKind:
    """Return how a mask is read. fp32 is ADDED_FLOAT whatever q's dtype: one program less."""
    if mask is None:
        return MaskKind.NONE
    if mask.dtype is torch.bool:
        return MaskKind.BOOLEAN
    return MaskKind.ADDED_FLOAT if mask.dtype is torch.float32 else MaskKind.ADDED


def sources_of(plan: AnyPlan) -> tuple[str, ...]:
    """Return the sources of a plan's kernel, as `jit.program_text` takes them."""
    return _SOURCES[type(plan)]


def architecture_of(plan: AnyPlan) -> str | None:
    """Return the architecture a plan's kernel is for, or None where it is any device's own."""
    is_hoppers = isinstance(plan, HopperForwardPlan | HopperBackwardPlan | HopperWeightsPlan)
    return hopper.ARCHITECTURE if is_hoppers else None


def types_of(plan: AnyPlan, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the types of a plan's kernel, as `jit.program_text` takes them."""
    if architecture_of(plan) is None:
        return {"T": dtype}
    return {"T": torch.float16 if dtype is torch.float32 else dtype, "IO": dtype}


def mask_constants(
    causal: bool, mask: MaskKind, key_mask: MaskKind, ragged: bool, sum_apart: bool = False
) -> dict[str, int | bool]:
    """Return what scores.cuh takes by these names."""
    return {
        "CAUSAL": causal,
        "MASK": int(mask),
        "KEY_MASK": int(key_mask),
        "RAGGED": ragged,
        "SUM_APART": sum_apart,
    }


# By device, dtype, rows, keys, head dimension and masks: all that tells programs apart.
_Key = tuple[object, ...]
_forward: dict[_Key, Program[AnyForward]] = {}
_backward: dict[_Key, Program[AnyBackward]] = {}
_weights: dict[_Key, Program[AnyWeights]] = {}
# Lengths that make the same tiles share a kernel.
_kernels: dict[_Key, jit.Kernel] = {}


def _key(q: Tensor, k: Tensor, masking: Masking) -> _Key:
    return (
        q.get_device(),
        q.dtype,
        q.shape[1],
        k.shape[1],
        q.shape[3],
        masking.causal,
        None if masking.attn_mask is None else masking.attn_mask.dtype,
        None if masking.key_padding_mask is None else masking.key_padding_mask.dtype,
        is_split(q.dtype),
    )


def forward(q: Tensor, k: Tensor, masking: Masking) -> Program[AnyForward]:
    """Return the forward program for such tensors.

    Raises:
        ValueError: no plan fits them (`call.supports` says so beforehand).
    """
    key = _key(q, k, masking)
    program = _forward.get(key)
    if program is None:
        chosen = plan.choose_forward(*_shape(q, k))
        if chosen is None:
            raise _no_plan(q, k)
        keys = chosen.chunk * chosen.chunks
        program = _forward[key] = load_forward(
            chosen, q.dtype, q.get_device(), _constants(q, masking, keys != k.shape[1])
        )
    return program


def backward(q: Tensor, k: Tensor, masking: Masking) -> Program[AnyBackward]:
    """Return the backward program for such tensors; raises as `forward`."""
    key = _key(q, k, masking)
    program = _backward.get(key)
    if program is None:
        chosen = plan.choose_backward(*_shape(q, k))
        if chosen is None:
            raise _no_plan(q, k)
        keys = chosen.key_block * chosen.key_blocks
        program = _backward[key] = load_backward(
            chosen, q.dtype, q.get_device(), _constants(q, masking, keys != k.shape[1])
        )
    return program


def weights(
    q: Tensor, k: Tensor, masking: Masking, averaged: bool, sum_apart: bool
) -> Program[AnyWeights]:
    """Return the program of the weights for such tensors; raises as `forward`."""
    key = (*_key(q, k, masking), averaged, sum_apart)
    program = _weights.get(key)
    if program is None:
        chosen = plan.choose_weights(*_shape(q, k), averaged)
        if chosen is None:
            raise _no_plan(q, k)
        constants = _constants(q, masking, False)  # weights beyond the last key are not stored
        constants |= {"AVERAGED": averaged, "ALIGNED": k.shape[1] % 8 == 0, "SUM_APART": sum_apart}
        program = _weights[key] = load_weights(chosen, q.dtype, q.get_device(), constants)
    return program


def load_forward(
    plan: AnyForward, dtype: torch.dtype, device: int, constants: dict[str, int | bool]
) -> Program[AnyForward]:
    """Compile and load forward's source for a plan; `constants` are SPLIT and the masks'."""
    return Program(plan, _load("hfai_attention_forward", plan, dtype, device, constants))


def load_backward(
    plan: AnyBackward, dtype: torch.dtype, device: int, constants: dict[str, int | bool]
) -> Program[AnyBackward]:
    """Compile and load backward's source for a plan; `constants` are SPLIT and the masks'."""
    return Program(plan, _load("hfai_attention_backward", plan, dtype, device, constants))


def load_weights(
    plan: AnyWeights, dtype: torch.dtype, device: int, constants: dict[str, int | bool]
) -> Program[AnyWeights]:
    """Compile and load the weights' source; `constants` as for forward, AVERAGED and ALIGNED."""
    return Program(plan, _load("hfai_attention_weights", plan, dtype, device, constants))


def _load(
    name: str,
    plan: AnyPlan,
    dtype: torch.dtype,
    device: int,
    constants: dict[str, int | bool],
) -> jit.Kernel:
    key = (plan, dtype, device, *sorted(constants.items()))
    kernel = _kernels.get(key)
    if kernel is None:
        text = jit.program_text(
            sources_of(plan), plan.constants() | constants, types_of(plan, dtype)
        )
        kernel = _kernels[key] = jit.load(
            text,
            name,
            device,
            block=plan.threads,
            shared_bytes=plan.shared_bytes,
            architecture=architecture_of(plan),
        )
    return kernel


def _constants(q: Tensor, masking: Masking, ragged: bool) -> dict[str, int | bool]:
    masks = mask_constants(
        masking.causal,
        kind_of(masking.attn_mask),
        kind_of(masking.key_padding_mask),
        ragged,
        masking.adds_numbers,
    )
    return masks | {"SPLIT": is_split(q.dtype)}


def _shape(q: Tensor, k: Tensor) -> tuple[int, torch.dtype, int, int, jit.DeviceLimits, bool]:
    limits = jit.device_limits(q.get_device())
    return q.shape[3], q.dtype, q.shape[1], k.shape[1], limits, is_split(q.dtype)


def _no_plan(q: Tensor, k: Tensor) -> ValueError:
    return ValueError(
        f"no attention kernel for {q.shape[1]} rows, {k.shape[1]} keys and a head dimension of "
        f"{q.shape[3]} in {q.dtype} fits this device; ask hfai.kernels.attention.supports first"
    )
