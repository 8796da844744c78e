"""All-reduce over several machines: within each through memory, between them through a network.

    reducer = hfreduce.HierarchicalReducer(store, rank, world_size, network="tcp")
    reducer.all_reduce(tensor)

The ranks of a node split each tensor: rank j of a node adds slice j of its node's tensors, reduces
it with the ranks j of the other nodes, and gives the sum to its node. So one sum a node goes on to
the network, carried by as many processes as the smallest node has. A large tensor goes in pieces
(pieces.py): while one is on the network the node adds the next and hands out the one before.

Sums are in the order of the ranks within a node and of the nodes between them. Those of types
narrower than float32 stay float32 until they are whole, and are rounded once: the same bits on all
ranks. Before a call moves anything its ranks compare what they call (agreement.py); a small tensor
goes with what is said then, by the first rank of each node.
"""

from __future__ import annotations

import json
import os
import secrets
import weakref
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch import distributed as dist

from hfreduce import arguments, dtypes, exchange, segment
from hfreduce.agreement import Agreement, Call, Reduction
from hfreduce.handle import Handle
from hfreduce.layout import Layout
from hfreduce.network import Network, Place, connect
from hfreduce.network.choice import PIECE_BYTES
from hfreduce.network.choice import check as check_network
from hfreduce.pieces import Pieces
from hfreduce.reducer import DEFAULT_TIMEOUT, Reducer
from hfreduce.tensors import flat
from hfreduce.worker import Worker

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# The network gives up first, and says which node: within one, ranks would blame each other.
NETWORK_SHARE = 0.8


class HierarchicalReducer:
    """One rank's end of a group whose processes run on several machines.

    Args:
        store: That all ranks reach, to find each other.
        rank: This rank, from 0.
        world_size: The number of ranks.
        timeout: Seconds, or a timedelta, that a rank may be late for a step of a collective;
            between nodes four fifths of it.
        name: Of the group, where several use one store.
        network: "tcp" or "gloo"; "mpi" where the ranks were started by it; "nccl" where each rank
            has a GPU of its own, which is the current one.
        threads: As for `Reducer`.
        piece_bytes: What is on the network at a time; None: what suits the network.
        label: How messages call this rank; None: "rank" and its number.

    Raises:
        ConnectionError: The nodes cannot reach each other, or their piece_bytes or network differ.
        ImportError: The network needs a package that is not there.
        LatePeerError: A rank did not come within the timeout.
        UnavailableError: The native engine was not built somewhere.
        ValueError: An argument makes no sense.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        timeout: float | timedelta = DEFAULT_TIMEOUT,
        name: str = "nodes",
        network: str = "tcp",
        threads: int | None = None,
        piece_bytes: int | None = None,
        label: str | None = None,
    ) -> None:
        seconds = arguments.seconds(timeout)
        arguments.check_rank(rank, world_size)
        check_network(network)
        if piece_bytes is None:
            piece_bytes = PIECE_BYTES[network]
        if piece_bytes < segment.LEAST_CHUNK_BYTES:
            raise ValueError(f"piece_bytes={piece_bytes} is less than {segment.LEAST_CHUNK_BYTES}")
        self.rank, self.world_size, self.timeout = rank, world_size, seconds
        meeting = exchange.through_store(store, rank, world_size, name, seconds)
        settings = f"network={network!r}, piece_bytes={piece_bytes}"
        mine = {"token": secrets.token_hex(8), "settings": settings}
        mine |= segment.me(label or f"rank {rank}").__dict__
        texts = [json.loads(text) for text in meeting(json.dumps(mine), None)]
        prefix = f"hfreduce/{name}/{texts[0]['token']}"
        asked = [text.pop("settings") for text in texts]
        for peer, theirs in enumerate(asked):
            texts[peer].pop("token")
            if theirs != asked[0]:  # all ranks find the same, and none waits for another
                raise ConnectionError(
                    f"rank 0 was given {asked[0]} and rank {peer} {theirs}: give all ranks the same"
                )
        members = [segment.Member(**text) for text in texts]
        segment.check_engines(members)
        self.labels = [f"{member.label} (pid {member.pid})" for member in members]
        self.layout = layout = Layout.of([member.node for member in members])
        node, place = layout.of_rank(rank)
        self.node, ranks = node, layout.nodes[node]
        self.local = Reducer(
            _prefixed(f"{prefix}/{node}", store),
            place,
            len(ranks),
            timeout=seconds,
            threads=threads,
            label=label or f"rank {rank}",
        )
        self._network: Network | None = None
        self._failure: BaseException | None = None
        column = [ranks[place] for ranks in layout.nodes] if place < layout.columns else []
        problem = ""
        if len(column) > 1:
            there = Place(
                node,
                len(column),
                [self.labels[peer] for peer in column],
                column,
                _prefixed(f"{prefix}/column {place}", store),
                NETWORK_SHARE * seconds,
            )
            try:
                self._network = connect(network, there)
            except (ConnectionError, ImportError, RuntimeError, ValueError) as error:
                problem = f"{self.labels[rank]}: {error}"
        for text in meeting(problem, None):
            if text:
                self.local.close()
                if self._network is not None:
                    self._network.close()
                raise ConnectionError(f"no network between the nodes: {text}")
        self.network = network
        self._worker = Worker(f"hfreduce-nodes-{rank}", self.local.abandon)
        self._calls = 0
        if len(layout.nodes) > 1:
            self._agreement = Agreement(self.labels, self.local, self._network, len(layout.nodes))
        self._pieces = Pieces(
            self.local, layout.columns, self._network, piece_bytes, f"hfreduce-network-{rank}"
        )
        self._process = os.getpid()
        self._end = weakref.finalize(
            self,
            _end,
            self._process,
            self.local,
            self._network,
            self._worker,
            *self._pieces.carriers,
        )

    @classmethod
    def from_group(
        cls, group: dist.ProcessGroup | None = None, *, network: str = "tcp"
    ) -> HierarchicalReducer:
        """Return a reducer for the ranks of a process group, whatever its backend.

        Args:
            group: That meets to make the reducer; None: the default group.
            network: As for the class.
        """
        store, timeout = exchange.store_of(group), exchange.timeout_of(group)
        if store is None:
            raise ValueError("the process group has no store by which its nodes could meet")
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        label = f"rank {rank} (global rank {dist.get_rank()})" if group is not None else None
        seconds = DEFAULT_TIMEOUT if timeout is None else timeout
        return cls(store, rank, world_size, timeout=seconds, network=network, label=label)

    def all_reduce(
        self, tensor: Tensor, op: object = "sum", *, async_op: bool = False
    ) -> Handle | None:
        """Reduce a tensor over all ranks of all nodes, in place.

        Args:
            tensor: Of the same type and number of elements on all ranks, on the CPU.
            op: "sum", "avg", "min" or "max", or torch's ReduceOp of that name.
            async_op: Return a handle at once.

        Raises:
            TypeError: The type is not reduced; `hfreduce.dtypes.DTYPES` has those that are.
            PeerError: Another rank died, came too late, or called something else.
        """
        self._check_process()
        dtypes.check(arguments.tensor(tensor).dtype, op)
        name = dtypes.op_name(op)
        assert name is not None
        data = flat(tensor)

        def job() -> None:
            data.load()
            self._run("all_reduce", data.elements(), name)
            data.store()

        if async_op:
            return Handle(self._worker.submit(job), self._interrupt)
        self._worker.call(job)
        return None

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._check_process()
        nothing = torch.empty(0, dtype=torch.uint8)
        self._worker.call(partial(self._run, "barrier", nothing, "sum"))

    def close(self) -> None:
        """Leave the group: calls under way end with an error, and other ranks are told.

        It is not needed: when the process ends or the reducer is no longer used, this happens.
        """
        if self._failure is None:
            self._failure = RuntimeError("this HierarchicalReducer is closed: make a new one")
        self._end()

    def __enter__(self) -> HierarchicalReducer:
        return self

    def __reduce__(self) -> str:
        raise TypeError("a HierarchicalReducer belongs to its process: make one in each")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ---- within ----

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this HierarchicalReducer belongs to process {self._process}, which forked this "
                f"one: make a new one here, or start processes with the method 'spawn'"
            )

    def _run(self, kind: str, data: Tensor, op: str) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            if len(self.layout.nodes) > 1:
                self._all_reduce(kind, data, op)
            elif kind == "barrier":
                self.local.barrier()
            else:
                self.local.all_reduce(data, op)
        except BaseException as error:
            if isinstance(error, Exception):
                self._break(error)
            else:  # a signal's: the calls after this one are not interrupted
                self._interrupt()
            # Nobody may write to the tensor when the call has ended; now that all is broken, what
            # is under way ends at once.
            self._pieces.wait(self.timeout)
            raise

    def _all_reduce(self, kind: str, data: Tensor, op: str) -> None:
        call = Call.of(self.rank, kind, op, data, self._calls)
        self._calls += 1
        how, nodes = Reduction.of(op, data.dtype, self.world_size), len(self.layout.nodes)
        small = (data, how) if how.is_small(data.numel(), nodes) and data.numel() else None
        self._agreement.reach(call, small)
        if data.numel() and small is None:
            self._pieces.all_reduce(data, how)

    def _break(self, error: BaseException) -> None:
        """Have everyone's calls fail: this node's ranks, and the others' by their network."""
        if self._failure is None:
            self._failure = error
        self.local.abandon()
        if self._network is not None:
            self._network.close()

    def _interrupt(self) -> None:
        self._break(RuntimeError("a call of this HierarchicalReducer was interrupted"))


def _end(
    process: int, local: Reducer, network: Network | None, worker: Worker, *carriers: Worker
) -> None:
    if os.getpid() != process:  # a forked child owns nothing here
        return
    local.close()
    if network is not None:
        network.close()
    worker.close()
    for carrier in carriers:
        carrier.close()


def _prefixed(prefix: str, store: Store) -> Store:
    made: Store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    return made
