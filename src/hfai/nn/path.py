"""What a layer answers when it is asked which path its calls take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Path:
    """The path that a layer's calls take, hfai's kernels or torch's own code, and the reason."""

    taken: Literal["hfai", "torch"]
    reason: str
