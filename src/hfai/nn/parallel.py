"""Data parallel training: the original's name for what stands in `haiscale.ddp`."""

from haiscale.ddp import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
