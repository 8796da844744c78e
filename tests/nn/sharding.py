"""FSDP of both generations over one process on the CPU, also where there is a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh


def shard_fsdp1(model: nn.Module) -> nn.Module:
    """Wrap in FullyShardedDataParallel; parameters keep their names."""
    cpu = torch.device("cpu")
    return fsdp.FullyShardedDataParallel(model, device_id=cpu, use_orig_params=True)


def shard_fsdp2(model: nn.Module) -> nn.Module:
    """Apply `fully_shard`, which gives the model a class derived from its own."""
    sharded: nn.Module = fsdp.fully_shard(model, mesh=DeviceMesh("cpu", [0]))
    return sharded


def ignore_fsdp_warnings(test: object) -> object:
    """Mark a test so that what FSDP says about one process does not fill the summary."""
    for message in ("FSDP will not shard", "FSDP is switching to use"):
        test = pytest.mark.filterwarnings(f"ignore:{message}")(test)
    return pytest.mark.filterwarnings("ignore:.*FullyShardedDataParallel.*:FutureWarning")(test)
