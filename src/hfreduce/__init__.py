"""All-reduce through host memory: processes of one machine add tensors in memory that they share.

    dist.init_process_group("hfreduce")       # as torch.distributed's backend, or
    reducer = hfreduce.Reducer(store, rank, world_size)
    reducer.all_reduce(tensor)
"""

from __future__ import annotations

from hfreduce.errors import DeadPeerError, LatePeerError, MismatchError, PeerError
from hfreduce.handle import Handle
from hfreduce.reducer import Reducer
from hfreduce.segment import is_available

__all__ = [
    "DeadPeerError",
    "Handle",
    "LatePeerError",
    "MismatchError",
    "PeerError",
    "Reducer",
    "is_available",
]
