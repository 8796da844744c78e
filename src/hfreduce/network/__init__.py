"""Between nodes: what carries the sum of one node's ranks to the other nodes.

`Network` is the whole interface, and each engine is a file: tcp (which needs nothing), gloo (there
in every torch), mpi (where mpi4py is), nccl (where each process has a GPU). An engine that sends
and receives has the all-reduce of `point_to_point.py`; one that reduces by itself brings its own.
"""

from __future__ import annotations

from hfreduce.network.base import Network, Place
from hfreduce.network.choice import ENGINES, connect

__all__ = ["ENGINES", "Network", "Place", "connect"]
