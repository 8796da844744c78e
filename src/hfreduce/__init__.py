"""All-reduce through host memory: processes of one machine add tensors in memory that they share.

    dist.init_process_group("hfreduce")       # as torch.distributed's backend, or
    reducer = hfreduce.Reducer(store, rank, world_size)
    reducer.all_reduce(tensor)

Importing this registers the backend, where torch was built with torch.distributed.
"""

from __future__ import annotations

from hfreduce.backend import ProcessGroup, register
from hfreduce.errors import (
    DeadPeerError,
    LatePeerError,
    MismatchError,
    PeerError,
    UnavailableError,
)
from hfreduce.explanation import Explanation, explain
from hfreduce.handle import Handle
from hfreduce.hook import HookState, average
from hfreduce.nodes import HierarchicalReducer
from hfreduce.rates import Rate, benchmark
from hfreduce.reducer import Reducer
from hfreduce.segment import is_available

register()

__all__ = [
    "DeadPeerError",
    "Explanation",
    "Handle",
    "HierarchicalReducer",
    "HookState",
    "LatePeerError",
    "MismatchError",
    "PeerError",
    "ProcessGroup",
    "Rate",
    "Reducer",
    "UnavailableError",
    "average",
    "benchmark",
    "explain",
    "is_available",
]
