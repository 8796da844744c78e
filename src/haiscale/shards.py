"""Parameters in a row on the host, and this rank's shard of them: what HostAdamW works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hfreduce.network.point_to_point import cut

CHUNK = 1 << 16  # elements that are compared at a time, so that they stay in the cache


@dataclass(frozen=True)
class Segment:
    """The part of a parameter that lies in this rank's shard.

    Attributes:
        index: Of the parameter in its bucket.
        master: Its elements, in float32 or wider: a view of the shard's.
        gradient: Their averaged gradient, likewise.
    """

    index: int
    master: Tensor
    gradient: Tensor


class Bucket:
    """Parameters of one type whose elements lie in a row, in equal shards, one for each rank.

    Args:
        params: On one device, of one type.
        wire: What float32 gradients are sent as; None: as they are.
        rank: Whose shard is this process's.
        world_size: The number of shards.

    Attributes:
        shards: Of the parameters on their way back, by rank; in their type.
        gradient_shards: Of the gradients on their way out, by rank; in the wire's type.
        segments: This rank's.
    """

    def __init__(
        self, params: Sequence[Tensor], wire: torch.dtype | None, rank: int, world_size: int
    ) -> None:
        self.params = list(params)
        dtype = params[0].dtype
        sent = wire if wire is not None and dtype == torch.float32 else dtype
        count = sum(param.numel() for param in params)
        pinned = params[0].is_cuda
        self.values = torch.zeros(count, dtype=dtype, pin_memory=pinned)
        # A gradient is not needed any more when its parameter comes back: they share memory.
        self._gradients = (
            self.values if sent == dtype else torch.zeros(count, dtype=sent, pin_memory=pinned)
        )
        self.shards, self.gradient_shards = (
            cut(whole, world_size) for whole in (self.values, self._gradients)
        )
        self._own = self.shards[rank]
        self._arrived = self.gradient_shards[rank]
        self.begin = sum(shard.numel() for shard in self.shards[:rank])
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        self.master = torch.empty(self._own.numel(), dtype=exact)
        self.gradient = torch.empty(self._own.numel(), dtype=exact)
        self._places = [(low, high) for low, high in self._ranges() if low < high]
        self.segments = [
            Segment(index, self.master[low:high], self.gradient[low:high])
            for index, (low, high) in enumerate(self._ranges())
            if low < high
        ]
        at = 0
        self._within: list[tuple[int, int]] = []  # of each parameter's elements, this shard's
        for param, (low, high) in zip(self.params, self._ranges(), strict=True):
            before = max(0, self.begin - at)
            self._within.append((before, before + high - low))
            at += param.numel()

    def load_parameters(self) -> None:
        """Take this rank's shard from the parameters as they are now."""
        self._copy(self.values, self.params)
        self._wait()
        self.master.copy_(self._own)

    def take_changes(self, masters: Tensor) -> None:
        """Bring master weights, or a copy, to the parameters' values where those are others.

        Someone may have written to the parameters, in ways that leave no trace but the values
        (`param.data`). An element's master weight holds as long as it rounds to the parameter.
        Uses the memory of this rank's shard: not while that is on its way.
        """
        on_host = self.params[0].device.type == "cpu"
        parts = [self.part(segment, self.params[segment.index]) for segment in self.segments]
        if not on_host:
            for part, (low, high) in zip(parts, self._places, strict=True):
                self._own[low:high].copy_(part, non_blocking=True)
            self._wait()
        for part, (low, high) in zip(parts, self._places, strict=True):
            now, held = part if on_host else self._own[low:high], masters[low:high]
            if now.dtype == held.dtype:
                held.copy_(now)
                continue
            for new, old in zip(torch.split(now, CHUNK), torch.split(held, CHUNK), strict=True):
                rounded = old.to(new.dtype)
                if not torch.equal(rounded, new):
                    old.copy_(torch.where(rounded == new, old, new.to(old.dtype)))

    def part(self, segment: Segment, whole: Tensor) -> Tensor:
        """Return the elements of a segment out of something that has its parameter's shape."""
        low, high = self._within[segment.index]
        return whole.reshape(-1)[low:high]

    def load_gradients(self) -> None:
        """Bring the gradients into a row; parameters without one have zeros there."""
        self._copy(self._gradients, [param.grad for param in self.params])
        self._wait()

    def take_gradient(self, segment: Segment) -> None:
        """Widen a segment of this rank's averaged shard for the step."""
        low = segment.gradient.storage_offset()
        segment.gradient.copy_(self._arrived[low : low + segment.gradient.numel()])

    def give_shard(self) -> None:
        """Round this rank's stepped shard to the parameters' type."""
        self._own.copy_(self.master)

    def store_parameters(self) -> None:
        """Write all shards into the parameters."""
        at = 0
        for param in self.params:
            values = self.values[at : at + param.numel()].view(param.shape)
            param.copy_(values, non_blocking=True)
            at += param.numel()

    def spread(self, whole: Tensor) -> list[Tensor]:
        """Return each parameter's part of something that lies in a row, in its shape."""
        parts = torch.split(whole, [param.numel() for param in self.params])
        return [part.view(p.shape).clone() for part, p in zip(parts, self.params, strict=True)]

    def _ranges(self) -> list[tuple[int, int]]:
        """Return where each parameter begins and ends in this rank's shard."""
        ranges, at, size = [], -self.begin, self._own.numel()
        for param in self.params:
            ranges.append((max(0, min(size, at)), max(0, min(size, at + param.numel()))))
            at += param.numel()
        return ranges

    def _copy(self, row: Tensor, values: Sequence[Tensor | None]) -> None:
        at = 0
        for param, value in zip(self.params, values, strict=True):
            part = row[at : at + param.numel()].view(param.shape)
            if value is None:
                part.zero_()
            else:
                part.copy_(value, non_blocking=True)
            at += param.numel()

    def _wait(self) -> None:
        if self.params[0].is_cuda:
            torch.cuda.current_stream(self.params[0].device).synchronize()


def buckets_of(
    params: Sequence[Tensor], wire: torch.dtype | None, rank: int, world_size: int, nbytes: int
) -> list[Bucket]:
    """Return the buckets of one group's parameters, the last parameters first.

    Args:
        params: Of the group.
        wire: As for `Bucket`.
        rank: As for `Bucket`.
        world_size: As for `Bucket`.
        nbytes: What a bucket holds at most, unless it holds one parameter.
    """
    found: list[list[Tensor]] = []
    size, last = 0, None
    for param in reversed(params):  # gradients are ready in about that order
        kind = param.dtype, param.device
        if kind != last or size + param.nbytes > nbytes:
            found.append([])
            size, last = 0, kind
        found[-1].append(param)
        size += param.nbytes
    return [Bucket(bucket, wire, rank, world_size) for bucket in found]
