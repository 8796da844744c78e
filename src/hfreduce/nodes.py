"""All-reduce over several machines: within each through memory, between them through a network.

    reducer = hfreduce.HierarchicalReducer(store, rank, world_size, network="gloo")
    reducer.all_reduce(tensor)

The ranks of a node split each tensor: rank j of a node adds slice j of its node's tensors, reduces
it with the ranks j of the other nodes, and gives the sum to its node. So one sum a node goes on to
the network, carried by as many processes as the smallest node has. A large tensor goes in pieces:
while one is on the network the node adds the next and hands out the one before.

Sums are in the order of the ranks within a node and of the nodes between them, rounded once at each
of the two: the same bits on all ranks, and as many errors as one more rounding for narrow types.
"""

from __future__ import annotations

import json
import os
import secrets
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch import distributed as dist

from hfreduce import arguments, dtypes, exchange, segment
from hfreduce.handle import Handle
from hfreduce.network import Network, Place, connect
from hfreduce.network.choice import check as check_network
from hfreduce.network.point_to_point import cut
from hfreduce.reducer import DEFAULT_TIMEOUT, Reducer
from hfreduce.tensors import flat
from hfreduce.worker import Worker

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Of a piece: large enough that a message's cost is small, small enough that many are under way.
PIECE_BYTES = 4 << 20
# Pieces on the network at once, so that the link is busy while one's halves change over.
LANES = 2
# The network gives up first, and says which node: within one, ranks would blame each other.
NETWORK_SHARE = 0.8


@dataclass(frozen=True)
class Layout:
    """Who sits where.

    Attributes:
        nodes: The ranks of each node, in order; nodes in the order of their first ranks.
        columns: How many ranks of each node take part in the network: as many as the smallest has.
    """

    nodes: list[list[int]]
    columns: int

    @classmethod
    def of(cls, names: Sequence[str]) -> Layout:
        """Return the layout of ranks whose nodes have these names."""
        found: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            found.setdefault(name, []).append(rank)
        nodes = list(found.values())
        return cls(nodes, min(map(len, nodes)))

    def of_rank(self, rank: int) -> tuple[int, int]:
        """Return a rank's node and its place there."""
        node = next(i for i, ranks in enumerate(self.nodes) if rank in ranks)
        return node, self.nodes[node].index(rank)


class HierarchicalReducer:
    """One rank's end of a group whose processes run on several machines.

    Args:
        store: That all ranks reach, to find each other.
        rank: This rank, from 0.
        world_size: The number of ranks.
        timeout: Seconds, or a timedelta, that a rank may be late for a step of a collective;
            between nodes four fifths of it.
        name: Of the group, where several use one store.
        network: "gloo", or "mpi" where the ranks were started by it.
        threads: As for `Reducer`.
        piece_bytes: What is on the network at a time.
        label: How messages call this rank; None: "rank" and its number.

    Raises:
        ConnectionError: The nodes cannot reach each other.
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
        network: str = "gloo",
        threads: int | None = None,
        piece_bytes: int = PIECE_BYTES,
        label: str | None = None,
    ) -> None:
        seconds = arguments.seconds(timeout)
        arguments.check_rank(rank, world_size)
        check_network(network)
        if piece_bytes < segment.LEAST_CHUNK_BYTES:
            raise ValueError(f"piece_bytes={piece_bytes} is less than {segment.LEAST_CHUNK_BYTES}")
        self.rank, self.world_size, self.timeout = rank, world_size, seconds
        self._piece_bytes = piece_bytes
        meeting = exchange.through_store(store, rank, world_size, name, seconds)
        mine = {"token": secrets.token_hex(8)} | segment.me(label or f"rank {rank}").__dict__
        texts = [json.loads(text) for text in meeting(json.dumps(mine), None)]
        prefix = f"hfreduce/{name}/{texts[0].pop('token')}"
        for text in texts:
            text.pop("token", None)
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
        self._carriers = [Worker(f"hfreduce-network-{rank}-{lane}") for lane in range(LANES)]
        self._process = os.getpid()
        self._end = weakref.finalize(
            self, _end, self._process, self.local, self._network, self._worker, *self._carriers
        )

    @classmethod
    def from_group(
        cls, group: dist.ProcessGroup | None = None, *, network: str = "gloo"
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
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this HierarchicalReducer belongs to process {self._process}, which forked this "
                f"one: make a new one here, or start processes with the method 'spawn'"
            )
        dtypes.check(arguments.tensor(tensor).dtype, op)
        name = dtypes.op_name(op)
        assert name is not None
        data = flat(tensor)

        def job() -> None:
            data.load()
            self._all_reduce(data.elements(), name)
            data.store()

        if async_op:
            return Handle(self._worker.submit(job), self._interrupt)
        self._worker.call(job)
        return None

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.all_reduce(torch.zeros(self.layout.columns, dtype=torch.uint8))

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

    def _all_reduce(self, data: Tensor, op: str) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            even = len({len(ranks) for ranks in self.layout.nodes}) == 1
            # An average of averages, where all nodes have as many ranks.
            step = "sum" if op == "avg" and not even else op
            self._pieces(data, step)
            if step != op:
                data.div_(self.world_size)
        except BaseException as error:
            self._break(error)
            raise

    def _pieces(self, data: Tensor, op: str) -> None:
        each = self._piece_bytes // data.element_size()
        pieces = [self._slices(piece) for piece in torch.split(data, each)]
        if len(pieces) <= 1:
            for slices in pieces or [self._slices(data)]:
                own = slices[self.local.rank]
                if self.local.world_size > 1:
                    self.local.reduce_scatter(own, slices, op)
                self._carry(own, op)
                if self.local.world_size > 1:
                    self.local.all_gather(slices, own)
            return
        scattered: list[Handle | None] = []
        carried: list[Future[None]] = []
        gathered: list[Handle | None] = []
        for step in range(len(pieces) + 2):
            if step < len(pieces):
                slices = pieces[step]
                scattered.append(
                    self.local.reduce_scatter(slices[self.local.rank], slices, op, async_op=True)
                )
            if 1 <= step <= len(pieces):
                _wait(scattered[step - 1])
                own = pieces[step - 1][self.local.rank]
                lane = (step - 1) % LANES
                carried.append(self._carriers[lane].submit(partial(self._carry, own, op, lane)))
            if step >= 2:
                carried[step - 2].result()
                slices = pieces[step - 2]
                gathered.append(
                    self.local.all_gather(slices, slices[self.local.rank], async_op=True)
                )
        for handle in gathered:
            _wait(handle)

    def _slices(self, piece: Tensor) -> list[Tensor]:
        """Return each local rank's part of a piece: none for ranks without a network."""
        empty = [piece[:0]] * (self.local.world_size - self.layout.columns)
        return cut(piece, self.layout.columns) + empty

    def _carry(self, own: Tensor, op: str, lane: int = 0) -> None:
        if self._network is not None:
            self._network.all_reduce(own, op, lane)

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


def _wait(handle: Handle | None) -> None:
    assert handle is not None
    handle.wait()


def _prefixed(prefix: str, store: Store) -> Store:
    made: Store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    return made
