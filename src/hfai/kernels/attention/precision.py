"""How fp32 is multiplied: by torch's switch for matrix products, read on every call."""

from __future__ import annotations

import torch

_fp32_precision = getattr(torch._C, "_get_fp32_precision_getter", None)


def allows_tf32() -> bool:
    """Return whether torch's switch lets fp32 matrix products run in TF32."""
    if _fp32_precision is not None:  # torch 2.9 and later; the old switch then may raise
        return bool(_fp32_precision("cuda", "matmul") == "tf32")
    return bool(torch.backends.cuda.matmul.allow_tf32)


def is_split(dtype: torch.dtype) -> bool:
    """Return whether products are made in three parts, which keeps fp32's own accuracy."""
    return dtype is torch.float32 and not allows_tf32()
