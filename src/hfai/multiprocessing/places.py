"""Which of all processes this one is, from the environment variables that launchers set.

`WORLD_SIZE` and `RANK` mean two things. torchrun counts processes with them, and says so by setting
`LOCAL_RANK` and `LOCAL_WORLD_SIZE` as well. Cluster schedulers that start one script a machine
count machines with them, and the script starts a process for each GPU; they set `MASTER_ADDR`, or
in its older form `MASTER_IP`. Which of the two holds is read from what is there, and said.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_PORT = 29500  # torch's


@dataclass(frozen=True)
class Place:
    """A process among all.

    Attributes:
        rank: Among all processes.
        world_size: The number of all processes.
        local_rank: Among those of this machine.
        local_world_size: The number of those of this machine.
        node: This machine, from 0.
        nodes: The number of machines.
        address: Where processes meet.
        port: Where processes meet.
        convention: What the environment's numbers count: "processes" (torchrun), "nodes", or
            "nothing" (they are not there: this machine is all).
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    nodes: int
    address: str
    port: int
    convention: str

    @property
    def init_method(self) -> str:
        """What `torch.distributed.init_process_group` takes under this name."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"tcp://{host}:{self.port}"

    def __str__(self) -> str:
        means = {
            "processes": "WORLD_SIZE and RANK count processes, as torchrun sets them",
            "nodes": "WORLD_SIZE and RANK count machines",
            "nothing": "no WORLD_SIZE: this machine is all",
        }[self.convention]
        return (
            f"rank {self.rank} of {self.world_size}: process {self.local_rank} of "
            f"{self.local_world_size} on machine {self.node} of {self.nodes}, meeting at "
            f"{self.address}:{self.port} ({means})"
        )


def place(
    local_rank: int | None = None,
    nprocs: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> Place:
    """Return which of all processes this one is.

    Args:
        local_rank: What `spawn` gave the process; None: what torchrun says.
        nprocs: The number of processes on each machine; None: what torchrun or `spawn` says.
        environ: The environment; None: the process's own.

    Raises:
        ValueError: The environment contradicts itself, or says too little.
    """
    env = os.environ if environ is None else environ
    if "LOCAL_RANK" in env and "LOCAL_WORLD_SIZE" in env:
        return _by_processes(env, local_rank, nprocs)
    if nprocs is None:
        nprocs = _number(env, "HFAI_NPROCS", None)
    if local_rank is None or nprocs is None:
        raise ValueError(
            "LOCAL_RANK and LOCAL_WORLD_SIZE are not set: start with torchrun, or give "
            "place(local_rank, nprocs) what hfai.multiprocessing.spawn gave the process"
        )
    if not 0 <= local_rank < nprocs:
        raise ValueError(f"local_rank={local_rank} is not in 0 … {nprocs - 1} (nprocs={nprocs})")
    nodes = _number(env, "WORLD_SIZE", 1)
    node = _number(env, "RANK", 0)
    assert nodes is not None
    assert node is not None
    if not 0 <= node < nodes:
        raise ValueError(f"RANK={node} is not in 0 … {nodes - 1} (WORLD_SIZE={nodes} machines)")
    address = env.get("MASTER_ADDR") or env.get("MASTER_IP")
    if nodes > 1 and not address:
        raise ValueError(
            f"WORLD_SIZE={nodes} machines, but neither MASTER_ADDR nor MASTER_IP says where to meet"
        )
    return Place(
        rank=node * nprocs + local_rank,
        world_size=nodes * nprocs,
        local_rank=local_rank,
        local_world_size=nprocs,
        node=node,
        nodes=nodes,
        address=address or "127.0.0.1",
        port=_number(env, "MASTER_PORT", DEFAULT_PORT) or DEFAULT_PORT,
        convention="nodes" if "WORLD_SIZE" in env else "nothing",
    )


def _by_processes(env: Mapping[str, str], local_rank: int | None, nprocs: int | None) -> Place:
    numbers = {
        name: _number(env, name, None)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    }
    for name, value in numbers.items():
        if value is None:
            raise ValueError(f"LOCAL_RANK is set as by torchrun, but {name} is not")
    rank, world, local, local_world = (value or 0 for value in numbers.values())
    for name, given, said in (
        ("local_rank", local_rank, local),
        ("nprocs", nprocs, local_world),
    ):
        if given is not None and given != said:
            raise ValueError(
                f"{name}={given}, but torchrun started this process as LOCAL_RANK={local} of "
                f"LOCAL_WORLD_SIZE={local_world}: use torchrun or spawn, not both"
            )
    if not (0 <= local < local_world <= world and 0 <= rank < world):
        raise ValueError(
            f"RANK={rank}, WORLD_SIZE={world}, LOCAL_RANK={local} and "
            f"LOCAL_WORLD_SIZE={local_world} contradict each other"
        )
    return Place(
        rank=rank,
        world_size=world,
        local_rank=local,
        local_world_size=local_world,
        node=_number(env, "GROUP_RANK", rank // local_world) or 0,
        nodes=world // local_world,
        address=env.get("MASTER_ADDR") or env.get("MASTER_IP") or "127.0.0.1",
        port=_number(env, "MASTER_PORT", DEFAULT_PORT) or DEFAULT_PORT,
        convention="processes",
    )


def _number(env: Mapping[str, str], name: str, default: int | None) -> int | None:
    text = env.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a whole number") from None
