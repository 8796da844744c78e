"""`hfreduce.explain()`: what this machine offers, which path a group takes, and why."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed as dist

from hfreduce import segment, topology
from hfreduce.backend import ProcessGroup
from hfreduce.nodes import HierarchicalReducer
from hfreduce.reducer import Reducer


@dataclass(frozen=True)
class Explanation:
    """Facts by their names; `str()` and `print` give them as lines."""

    facts: dict[str, str]

    def __str__(self) -> str:
        width = max(map(len, self.facts))
        return "\n".join(f"{name:<{width}}  {text}" for name, text in self.facts.items())


def explain(
    group: Reducer | HierarchicalReducer | dist.ProcessGroup | None = None,
) -> Explanation:
    """Say what this machine offers and, of a group, how its collectives go and why.

    Args:
        group: A reducer of either kind or a process group; None: the default process group, if
            there is one. It is only looked at: no collective runs, and a group that has made no
            reducer makes none.
    """
    facts = {"engine": _engine(), "processors": _processors(), "GPUs": _gpus()}
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is not None:
        facts |= _group(group)
    return Explanation(facts)


def _engine() -> str:
    if segment.MISSING:
        return f"not there ({segment.MISSING}): install hfai on Linux with a C++ compiler"
    from hfreduce import _engine

    asked = os.environ.get("HFREDUCE_INSTRUCTIONS", "")
    there = _engine.instruction_sets()
    why = " by HFREDUCE_INSTRUCTIONS" if asked else ", the best this processor has"
    return f"adds with {asked or there[0]}{why}; there are {', '.join(there)}"


def _processors() -> str:
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    return f"{topology.processors()} for this process, {max(1, len(nodes))} NUMA node(s)"


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none"
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    if not pairs:
        return "1"
    direct = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    best = "NCCL has direct ways" if direct == len(pairs) else "some data goes through the host"
    return f"{count}, peer access in {direct} of {len(pairs)} directions: {best}"


def _group(group: Reducer | HierarchicalReducer | dist.ProcessGroup) -> dict[str, str]:
    if isinstance(group, HierarchicalReducer):
        return _nodes(group)
    if isinstance(group, Reducer):
        return _reducer(group)
    if not isinstance(group, ProcessGroup):
        return {"group": f"of {dist.get_backend(group)}: hfreduce has no part in it by itself"}
    if group.unavailable:
        return {"group": f"gloo does the work: {group.unavailable}"}
    if not group.has_reducer:
        return {"group": "of hfreduce, not used yet: its first collective decides"}
    return _reducer(group.reducer)


def _nodes(reducer: HierarchicalReducer) -> dict[str, str]:
    layout = reducer.layout
    nodes = "; ".join(str(ranks) for ranks in layout.nodes)
    if len(layout.nodes) == 1:
        path = "memory that the ranks share: all are on one machine"
    else:
        path = (
            f"memory within a machine, {reducer.network} between them, by {layout.columns} rank(s) "
            f"of each"
        )
    return {
        "group": f"rank {reducer.rank} of {reducer.world_size}; the machines' ranks: {nodes}",
        "path": path,
        "tensors on GPUs": "not taken: a process group's own all-reduce (NCCL) does them",
        "timeout": f"{reducer.timeout:g} s without progress",
    }


def _reducer(reducer: Reducer) -> dict[str, str]:
    settings = reducer.settings
    facts = {
        "group": f"rank {reducer.rank} of {reducer.world_size}: {', '.join(reducer.labels)}",
        "path": "memory that the ranks share: all are on this machine and have the engine",
        "memory": (
            f"{reducer.nbytes / 2**20:.1f} MiB: {settings.slots} slots of "
            f"{settings.chunk_bytes >> 10} KiB for each rank and thread"
        ),
        "threads": f"{settings.threads} for each rank",
        "waiting": (
            "looks for microseconds, then sleeps"
            if topology.processors() >= reducer.world_size
            else "sleeps at once: ranks share processors"
        ),
        "timeout": f"{reducer.timeout:g} s without progress",
    }
    for index, gpu in reducer.gpus.items():
        how = "streams wait for words" if gpu.flags else "the host waits for events"
        facts[f"GPU {index}"] = f"copy engines, {gpu.settings.chunk_bytes >> 10} KiB a chunk; {how}"
    return facts
