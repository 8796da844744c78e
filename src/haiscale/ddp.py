"""torch's DistributedDataParallel, with gradients averaged through hfreduce where that is the way.

    from haiscale.ddp import DistributedDataParallel       # or from hfai.nn.parallel
    model = DistributedDataParallel(model, device_ids=[local_rank])

A subclass that adds a communication hook and nothing else: buckets, unused parameters,
accumulation, `join`, checkpoints and mixed precision are torch's. What the hook needs is made with
the model, which is where torch's class has its ranks meet too; it is registered when the model is
first used, by each rank for itself, so a script that registers its own keeps it, and one rank may
run the model alone. No thread outlives the group.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import parallel

from haiscale import peers
from hfreduce import HookState, UnavailableError, average
from hfreduce.arguments import seconds
from hfreduce.exchange import through_group, timeout_of
from hfreduce.hook import WIRES
from hfreduce.reducer import DEFAULT_TIMEOUT

BACKENDS = ("auto", "hfreduce", "torch")
_log = logging.getLogger(__name__)
_Base: Any = parallel.DistributedDataParallel  # whose methods have no types
# torch.compiler.disable, without importing the compiler now.
_uncompiled: Any = getattr(torch, "_disable_dynamo", torch.compiler.disable)


class DistributedDataParallel(_Base):
    """torch's DistributedDataParallel over hfreduce.

    Args:
        module: The model, as for torch's class.
        *arguments: As for torch's class.
        backend: "hfreduce", which between machines takes models on the CPU (those on GPUs go by
            the process group, and `path` says so); "torch": the process group's own all-reduce;
            "auto": hfreduce where the ranks are on one machine and the model is on the CPU, or on
            GPUs of which none reaches another's memory (no NVLink, no PCIe peer to peer, or
            NCCL_P2P_DISABLE=1 for all ranks); else "torch".
        network: "tcp", "gloo", "mpi" or "nccl", between machines for backend="hfreduce": see
            `hfreduce.HierarchicalReducer`.
        wire: torch.bfloat16 or torch.float16: what float32 gradients are sent as; they are added in
            float32 and the average rounded once. None: as they are. Torch's path ignores it.
        **options: As for torch's class (`device_ids`, `process_group`, `find_unused_parameters` …).

    Attributes:
        path: Who averages, "hfreduce" or "torch: " and why; "" until the model is first used.

    Raises:
        ValueError: The backend is not known, or "hfreduce" is asked for where it cannot be.
        UnavailableError: "hfreduce" is asked for, and the ranks cannot share memory.
    """

    def __init__(
        self,
        module: nn.Module,
        *arguments: Any,
        backend: str = "auto",
        network: str = "tcp",
        wire: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend={backend!r} is not known: use one of {', '.join(BACKENDS)}")
        if wire not in WIRES:
            raise ValueError(f"wire={wire} is not known: use torch.bfloat16, torch.float16 or None")
        super().__init__(module, *arguments, **options)
        bare: Any = self.__dict__["reducer"]
        self.reducer = _Stoppable(bare)
        self.path = ""
        self._backend, self._network, self._wire = backend, network, wire
        self._joined = self._restored = False
        self._state: HookState | None = None
        self._why = why = self._why_torch()
        if backend == "hfreduce" and why and dist.get_world_size(self.process_group) > 1:
            raise ValueError(f"backend='hfreduce' cannot be: {why}")
        if not why:
            self._make_state()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, as torch's class does."""
        if not self.path:
            self._decide()
        return super().forward(*inputs, **kwargs)

    def join_hook(self, **kwargs: Any) -> Any:
        """Return what a rank does that has no data left, as torch's class does."""
        if not self.path:  # such a rank has to average with the others, and may never run the model
            self._decide()
        self._joined = False
        return super().join_hook(**kwargs)

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Average by a hook of one's own, as with torch's class."""
        with _Bare(self):
            super().register_comm_hook(state, hook)
        self._state = None
        self.path = f"a hook of the script's: {hook.__qualname__}"

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        with _Bare(self):
            super()._register_builtin_comm_hook(comm_hook_type)
        self._state = None
        self.path = f"a hook of torch's: {comm_hook_type}"

    def _match_all_reduce_for_bwd_pass(
        self,
    ) -> None:  # torch calls it where a rank has no data left
        self._joined = True
        super()._match_all_reduce_for_bwd_pass()

    def _make_state(self) -> None:
        """Have all ranks make what the hook needs, or learn why it cannot be."""
        if self._device_type() == "cuda" and self._backend == "auto":
            group = self.process_group
            meeting = through_group(group, seconds(timeout_of(group) or DEFAULT_TIMEOUT))
            if why := peers.why_direct(meeting, self._device()):
                self._why = why
                return
        try:
            # Between machines it has not been measured against NCCL: for who asks for it.
            network = self._network if self._backend == "hfreduce" else None
            self._state = HookState(
                self.process_group, _active_of(weakref.ref(self)), network=network, wire=self._wire
            )
            if why := self._state.unreached(self._device_type()):
                self._why, self._state = why, None
        except UnavailableError as error:
            if self._backend == "hfreduce":
                raise
            self._why = str(error)

    @_uncompiled
    def _decide(self) -> None:
        if self._restored:
            if not torch.is_grad_enabled():
                return  # one rank may do that alone; there is nothing to average yet
            self._restored = False
            if not self._why:
                self._make_state()
        if (state := self._state) is not None:
            self.register_comm_hook(state, average)
        self.path = f"torch: {self._why}" if self._why else "hfreduce"
        if self.process_group.rank() == 0:
            _log.info("DistributedDataParallel averages through %s", self.path)

    def _why_torch(self) -> str:
        """Return why the process group's own all-reduce is the way, or nothing."""
        if self._backend == "torch":
            return "it was asked for"
        if self.mixed_precision is not None:
            return "torch's mixed_precision registers hooks of its own"
        kind = self._device_type()
        if kind not in ("cpu", "cuda"):
            return f"the model is on a {kind} device"
        if dist.get_world_size(self.process_group) == 1:
            return "there is one rank"
        return ""

    def _device(self) -> torch.device:
        cpu = torch.device("cpu")
        return next((p.device for p in self.module.parameters() if p.requires_grad), cpu)

    def _device_type(self) -> str:
        return self._device().type

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        # A reducer belongs to its process, and a copy makes its own.
        state["_state"] = None
        state["_comm_hooks"] = [pair for pair in self._comm_hooks if pair[0] is not average]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.path = ""
        # One rank may read or copy a model alone, with torch's class: so the ranks meet later, when
        # the model first runs for its gradients.
        self._restored = True
        self._why = self._why_torch()
        self.reducer = _Stoppable(self.__dict__["reducer"])


def _active_of(reference: weakref.ref[DistributedDataParallel]) -> Callable[[], bool | None]:
    # torch's C++ keeps the hook's state: a reference from there would keep the model for ever.
    def active() -> bool | None:
        model = reference()
        if model is None or not model._join_config.enable:
            return None
        over_all = getattr(model, "_divide_by_initial_world_size", True)
        return None if over_all else not model._joined

    return active


class _Stoppable:
    """torch's C++ reducer, with the `stop` that scripts for the original call at their end."""

    def __init__(self, bare: Any) -> None:
        self.bare = bare

    def __getattr__(self, name: str) -> Any:
        if name == "bare":
            raise AttributeError(name)
        return getattr(self.bare, name)

    def stop(self) -> None:
        """Do nothing: there is no thread to stop."""


class _Bare:
    """Gives a model torch's reducer itself for a while, which C++ functions ask for."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model, self._kept = model, model.reducer

    def __enter__(self) -> None:
        if isinstance(self._kept, _Stoppable):
            self._model.reducer = self._kept.bare

    def __exit__(self, *_: object) -> None:
        self._model.reducer = self._kept
