"""Which engine carries, by its name."""

from __future__ import annotations

from collections.abc import Callable

from hfreduce.network.base import Network, Place


def _tcp(place: Place) -> Network:
    from hfreduce.network.tcp import TcpNetwork

    return TcpNetwork(place)


def _gloo(place: Place) -> Network:
    from hfreduce.network.gloo import GlooNetwork

    return GlooNetwork(place)


def _mpi(place: Place) -> Network:
    from hfreduce.network.mpi import MpiNetwork

    return MpiNetwork(place)


def _nccl(place: Place) -> Network:
    from hfreduce.network.nccl import NcclNetwork

    return NcclNetwork(place)


ENGINES: dict[str, Callable[[Place], Network]] = {
    "tcp": _tcp,
    "gloo": _gloo,
    "mpi": _mpi,
    "nccl": _nccl,
}


# What is on the network at a time: large enough that a message's cost is small, small enough that
# many are under way. NCCL's calls are one after the other and go in chunks of their own.
PIECE_BYTES = {"tcp": 4 << 20, "gloo": 4 << 20, "mpi": 4 << 20, "nccl": 32 << 20}


def check(name: str) -> str:
    """Return the name of an engine.

    Raises:
        ValueError: There is none of that name.
    """
    if name not in ENGINES:
        raise ValueError(f"network={name!r} is not known: use one of {', '.join(ENGINES)}")
    return name


def connect(name: str, place: Place) -> Network:
    """Connect this node to the others; all of them call it.

    Raises:
        ValueError: There is no engine of that name.
        ConnectionError: The nodes cannot reach each other.
        ImportError: The engine needs a package that is not there.
    """
    return ENGINES[check(name)](place)
