"""Object stores: S3, Google Cloud, Azure, HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ffrecord import StoreOptions
from ffrecord.store import open_store, request
from hfai.checkpoint.storage.remote import Store

_PART = 16 << 20  # bytes of a part of an upload
_UPLOADS = 4  # parts at a time


class ObjectStore(Store):
    """A bucket.

    Args:
        url: Of the bucket.
        options: How it is reached.
    """

    def __init__(self, url: str, options: StoreOptions | None) -> None:
        self._url, self._options = url, options or StoreOptions()

    def _ask(self, name: str, ask: Any) -> Any:
        store = open_store(self._url, self._options)
        return request(f"{self._url}/{name}", self._options.timeout, lambda api: ask(api, store))

    def put(self, name: str, data: bytes) -> None:
        """Write an object in one step."""
        self._ask(name, lambda api, store: api.put(store, name, data))

    def get(self, name: str) -> bytes:
        """Return an object."""
        return bytes(self._ask(name, lambda api, store: api.get(store, name).bytes()))

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """Return bytes of an object."""
        found = self._ask(
            name, lambda api, store: api.get_range(store, name, start=start, length=length)
        )
        return bytes(found)

    def size(self, name: str) -> int:
        """Return an object's bytes."""
        return int(self._ask(name, lambda api, store: api.head(store, name))["size"])

    def list(self, prefix: str) -> dict[str, int]:
        """Return all objects below a name: the rest of their names, and sizes."""

        def ask(api: Any, store: Any) -> dict[str, int]:
            rows = (row for batch in api.list(store, prefix=prefix + "/") for row in batch)
            return {str(row["path"])[len(prefix) + 1 :]: int(row["size"]) for row in rows}

        found: dict[str, int] = self._ask(prefix, ask)
        return found

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects."""
        if names:
            self._ask(names[0], lambda api, store: api.delete(store, list(names)))

    def open(self, name: str) -> Any:
        """Return a file to write, which appears when it is closed."""
        return _Upload(self, name)


class _Upload:
    """An upload in parts; errors are Python's."""

    def __init__(self, bucket: ObjectStore, name: str) -> None:
        self._bucket, self._name = bucket, name
        self._writer = bucket._ask(
            name,
            lambda api, store: api.open_writer(
                store, name, buffer_size=_PART, max_concurrency=_UPLOADS
            ),
        )

    def write(self, data: bytes) -> None:
        self._bucket._ask(self._name, lambda api, store: self._writer.write(data))

    def close(self) -> None:
        self._bucket._ask(self._name, lambda api, store: self._writer.close())

    def abandon(self) -> None:
        """Leave it unfinished: the object does not appear. The store keeps the parts for a while.

        Most stores are told once, for a whole bucket, to remove unfinished uploads after some days.
        """
        self._writer = None
