"""Parameters in a row on the host, and this rank's shard of them: what HostAdamW works on.

Parameters on the CPU that are float32 or float64 are their own master weights: the step writes to
them, and their gradients stay where the average arrived. Others are copied and rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hfreduce.network.point_to_point import cut

CHUNK = 1 << 16  # elements that are compared at a time, so that they stay in the cache


@dataclass
class Segment:
    """The part of a parameter that lies in this rank's shard.

    Attributes:
        index: Of the parameter in its bucket.
        low: Where it begins in the shard, in elements.
        high: Where it ends there.
        master: Its elements, in float32 or wider: a view of the shard's, or of the parameter.
        gradient: Their averaged gradient, likewise.
    """

    index: int
    low: int
    high: int
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
        is_direct: Whether parameters are their own master weights.
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
        self.exact = torch.float64 if dtype == torch.float64 else torch.float32
        self._on_host = params[0].device.type == "cpu"
        self.is_direct = self._on_host and dtype == self.exact
        self._shares_gradient = self._on_host and sent == self.exact
        size = self._own.numel()
        self._master = torch.empty(0 if self.is_direct else size, dtype=self.exact)
        self.gradient = (
            self._arrived if self._shares_gradient else torch.empty(size, dtype=self.exact)
        )
        self._kept: Tensor | None = None  # gradients that others are about to arrive over
        at = 0
        self._within: list[tuple[int, int]] = []  # of each parameter's elements, this shard's
        for param, (low, high) in zip(self.params, self._ranges(), strict=True):
            before = max(0, self.begin - at)
            self._within.append((before, before + high - low))
            at += param.numel()
        self.segments = [
            Segment(
                index,
                low,
                high,
                torch.empty(0) if self.is_direct else self._master[low:high],
                self.gradient[low:high],
            )
            for index, (low, high) in enumerate(self._ranges())
            if low < high
        ]
        if self.is_direct:
            self.bind()

    def bind(self) -> None:
        """Have direct segments lie where the parameters' elements are now.

        Someone may have given a parameter other memory. Views of it count their writes with the
        parameter, so that autograd notices them.
        """
        for segment in self.segments:
            # torch's fused step takes what it is given as contiguous.
            now = self.part(segment, self.params[segment.index].detach()).contiguous()
            now.grad, segment.master = segment.master.grad, now

    def load_parameters(self) -> None:
        """Take this rank's shard from the parameters as they are now."""
        self._copy(self.values, self.params)
        self._wait()
        if not self.is_direct:
            self._master.copy_(self._own)

    def copy_masters(self) -> Tensor:
        """Return this rank's master weights, of a bucket that is not direct."""
        return self._master.clone()

    def take_changes(self, masters: Tensor | None = None) -> None:
        """Bring master weights, or a copy, to the parameters' values where those are others.

        Someone may have written to the parameters, in ways that leave no trace but the values
        (`param.data`). An element's master weight holds as long as it rounds to the parameter.
        Uses the memory of this rank's shard: not while that is on its way.

        Args:
            masters: The copy; None: the master weights themselves.
        """
        masters = self._master if masters is None else masters
        parts = [self.part(segment, self.params[segment.index]) for segment in self.segments]
        if not self._on_host:
            for part, segment in zip(parts, self.segments, strict=True):
                self._own[segment.low : segment.high].copy_(part, non_blocking=True)
            self._wait()
        for part, segment in zip(parts, self.segments, strict=True):
            low, high = segment.low, segment.high
            now, held = part if self._on_host else self._own[low:high], masters[low:high]
            if now.dtype == held.dtype:
                held.copy_(now)
                continue
            for new, old in zip(torch.split(now, CHUNK), torch.split(held, CHUNK), strict=True):
                rounded = old.to(new.dtype)
                if not _have_same_bits(rounded, new):
                    old.copy_(torch.where(rounded == new, old, new.to(old.dtype)))

    def part(self, segment: Segment, whole: Tensor) -> Tensor:
        """Return the elements of a segment out of something that has its parameter's shape."""
        low, high = self._within[segment.index]
        return whole.reshape(-1)[low:high]

    def load_gradients(self, keep: bool = False) -> None:
        """Bring the gradients into a row; parameters without one have zeros there.

        Args:
            keep: Gradients that were averaged before may be needed still: see `keep_gradient`.
        """
        self._kept = self.gradient.clone() if keep and self._shares_gradient else None
        self._copy(self._gradients, [param.grad for param in self.params])
        self._wait()

    def take_gradient(self, segment: Segment) -> None:
        """Widen a segment of this rank's averaged shard for the step."""
        if not self._shares_gradient:
            segment.gradient.copy_(self._arrived[segment.low : segment.high])

    def keep_gradient(self, segment: Segment) -> None:
        """Leave a segment's gradient as it was before the average that has arrived."""
        if self._kept is not None:
            segment.gradient.copy_(self._kept[segment.low : segment.high])

    def give_shard(self) -> None:
        """Round this rank's stepped shard to the parameters' type, in the row."""
        for segment in self.segments:
            self._own[segment.low : segment.high].copy_(segment.master)

    def store_parameters(self) -> None:
        """Write all shards into the parameters, where they are not there already."""
        at, in_place = 0, self._in_place()
        for index, param in enumerate(self.params):
            values = self.values[at : at + param.numel()]
            if index in in_place:
                low, high = self._within[index]
                elements = param.detach().view(-1)
                elements[:low].copy_(values[:low])
                elements[high:].copy_(values[high:])
            else:
                param.copy_(values.view(param.shape), non_blocking=True)
            at += param.numel()

    @property
    def is_in_place(self) -> bool:
        """Whether the step has written to the parameters themselves, all of this shard."""
        return self.is_direct and len(self._in_place()) == len(self.segments)

    def _in_place(self) -> set[int]:
        """Return the parameters, by index, whose memory the step wrote to."""
        return {
            segment.index
            for segment in self.segments
            if self.is_direct
            and segment.master.untyped_storage().data_ptr()
            == self.params[segment.index].untyped_storage().data_ptr()
        }

    def store_all(self) -> None:
        """Write the whole row into the parameters."""
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


def _have_same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare in words as large as fit: torch compares narrow floats one by one."""
    for word in (torch.int64, torch.int32, torch.int16):
        each = word.itemsize // a.element_size()
        if each and not any(t.numel() % each or t.storage_offset() % each for t in (a, b)):
            return torch.equal(a.view(word), b.view(word))
    return torch.equal(a, b)


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
