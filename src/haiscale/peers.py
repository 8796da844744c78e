"""Whether the GPUs of a group's ranks reach each other's memory, so that NCCL is the way.

Where they do (NVLink, or PCIe peer to peer), NCCL copies between them directly and is several times
as fast as anything that goes through the host. Where they do not, NCCL goes through the host too,
with kernels, and hfreduce is faster from some MiB on.

A process can only ask about GPUs that it sees. Ranks tell each other what they found, and all come
to the same answer.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

import torch

from hfreduce import topology
from hfreduce.exchange import Exchange


@dataclass(frozen=True)
class Place:
    """What a rank knows of its GPU.

    Attributes:
        node: The machine.
        gpu: Its own number, the same in all processes.
        seen: The numbers of the GPUs that this process sees.
        reached: Of these, those whose memory its own GPU can reach.
        forbidden: Whether NCCL is told not to.
    """

    node: str
    gpu: str
    seen: list[str]
    reached: list[str]
    forbidden: bool


def of(device: torch.device) -> Place:
    """Return what this rank knows of its GPU."""
    own = torch.cuda.current_device() if device.index is None else device.index
    numbers = [
        str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())
    ]
    reached = [
        number
        for i, number in enumerate(numbers)
        if i != own and torch.cuda.can_device_access_peer(own, i)
    ]
    forbidden = os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0")
    return Place(topology.node(), numbers[own], numbers, reached, forbidden)


def why_direct(exchange: Exchange, device: torch.device) -> str:
    """Return why NCCL is the way between the ranks' GPUs, or nothing; all ranks call it together.

    Args:
        exchange: Between the ranks.
        device: This rank's GPU.
    """
    texts = exchange(json.dumps(asdict(of(device))), None)
    return decide([Place(**json.loads(text)) for text in texts])


def decide(places: list[Place]) -> str:
    """Return why NCCL is the way between GPUs in these places, or nothing."""
    if any(place.node != places[0].node for place in places):
        return "the ranks are on several machines"
    if len({place.gpu for place in places}) < len(places):
        return "ranks share a GPU"
    if all(place.forbidden for place in places):
        return ""
    for rank, place in enumerate(places):
        for peer, other in enumerate(places[:rank]):
            if other.gpu in place.reached or place.gpu in other.reached:
                return f"the GPUs of ranks {peer} and {rank} reach each other's memory"
            if other.gpu not in place.seen and place.gpu not in other.seen:
                return (
                    f"ranks {peer} and {rank} do not see each other's GPU, and so cannot ask "
                    f"whether these reach each other's memory"
                )
    return ""
