"""What a user may say about reading from object stores; importing it loads nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StoreOptions:
    """How objects of a store are read.

    Attributes:
        config: obstore's settings for the kind of store, for example `{"endpoint": "http://…",
            "access_key_id": …, "secret_access_key": …, "region": …}`; what is not given is taken
            from the environment (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, …).
        timeout: Seconds after which a request that has no answer, repeated or not, is an error.
        in_flight: How many requests wait at a time, in tens.
        gap: Bytes between two ranges up to which they are fetched by one request.
        cache: A directory for blocks that were read, shared by any number of processes of a
            machine; None: no cache.
        cache_bytes: What the cache takes at most.
    """

    config: Mapping[str, str] = field(default_factory=dict, repr=False)  # has secrets
    timeout: float = 30.0
    in_flight: int = 50
    gap: int = 32 << 10
    cache: str | os.PathLike[str] | None = None
    cache_bytes: int = 16 << 30

    def __post_init__(self) -> None:
        if not self.timeout > 0:
            raise ValueError(f"timeout is {self.timeout!r}: give seconds, more than 0")
        if self.in_flight < 1:
            raise ValueError(f"in_flight is {self.in_flight!r}: give 1 or more")
        if self.gap < 0:
            raise ValueError(f"gap is {self.gap!r}: give bytes, 0 or more")


def is_url(path: object) -> bool:
    """Whether a path names an object of a store."""
    return isinstance(path, str) and "://" in path
