"""A word of host memory for each device in which a kernel says that it waited in vain.

Pinned memory: the kernel writes it over the bus, the host reads it without waiting for the device.
A kernel gives up when a value that another block owes it did not come within seconds, which takes a
fault or a device taken away in mid-launch; what it computed is then unfinished. The next call, or
`raise_if_lost`, says so, and clears the word, so that calls after that run as before.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def _word(device: int) -> Tensor:
    # A plain tensor on the host, whatever mode or default device the first call is made under.
    with torch.cuda.device(device), torch.inference_mode(False):
        return torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)


def address(device: int) -> int:
    """Return the address that kernels on `device` (an index) write to."""
    return _word(device).data_ptr()


def raise_if_lost(device: int) -> None:
    """Raise RuntimeError if a kernel on `device` gave up since the last look.

    It does not wait for kernels under way: `torch.cuda.synchronize()` first for a full answer.
    """
    word = _word(device)
    if word.item():
        word.zero_()
        raise RuntimeError(
            f"a recurrent layer's kernel on cuda:{device} gave up waiting for its own blocks, and "
            f"its output is unfinished: results since then are wrong. Another process may have "
            f"held the GPU. Run the step again, or go back to torch's kernels with "
            f"hfai.nn.to_torch(model)"
        )
