"""Objects of a store (S3, Google Cloud, Azure, HTTP) by their URLs, through `obstore`.

An object is addressed by a URL whose last part is its name; the rest names the store, of which a
process has one a directory, with its connections. obstore's threads do not live on in a forked
child, where a request would wait for ever: there it is refused instead. A spawned process, to which
a reader is pickled by its URLs, makes stores of its own.
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar, TypeVar
from weakref import WeakValueDictionary

from ffrecord.format import SUFFIX
from ffrecord.store_options import StoreOptions

Result = TypeVar("Result")

# Bytes that are fetched at least when a header is read, and at most when it is read in order.
_LEAST_FETCH = 64 << 10
_MOST_FETCH = 4 << 20


class StoreObject:
    """One object as it was when it was first asked for.

    Args:
        url: Its address.
        options: How it is read.

    Attributes:
        size: Its bytes.
        version: What changes when it is written again: the store's tag, or the time.

    Raises:
        FileNotFoundError: There is no such object.
        OSError: The store does not answer, or refuses.
    """

    by_number: ClassVar[WeakValueDictionary[int, StoreObject]] = WeakValueDictionary()
    _numbers = itertools.count()

    def __init__(self, url: str, options: StoreOptions) -> None:
        self.path = url
        self.options = options
        directory, self.name = split(url)
        self.store = _store(directory, *_frozen(options))
        found = request(url, options.timeout, lambda api: api.head(self.store, self.name))
        self.size = int(found["size"])
        self.version = str(found.get("e_tag") or found.get("version") or found["last_modified"])
        self.number = next(self._numbers)
        self.by_number[self.number] = self
        self._lock = threading.Lock()
        self._ahead = (0, b"")  # where the bytes fetched last start, and they

    @contextmanager
    def access(self) -> Iterator[StoreObject]:
        """Give what can be read from while the block lasts."""
        yield self

    def pread(self, length: int, offset: int) -> bytes:
        """Return bytes of a header; reading on in order fetches ever larger pieces.

        Raises:
            OSError: They cannot be read.
        """
        length = max(0, min(length, self.size - offset))
        with self._lock:
            start, data = self._ahead
            if start <= offset and offset + length <= start + len(data):
                return data[offset - start : offset - start + length]
        fetch = max(length, _LEAST_FETCH if offset == 0 else 0)
        if data and start < offset <= start + len(data):
            fetch = max(length, min(2 * len(data), _MOST_FETCH))
        fetch = min(fetch, self.size - offset)
        if not fetch:
            return b""
        fetched = self.fetch([offset], [fetch])[0]
        with self._lock:
            self._ahead = (offset, fetched)
        return fetched[:length]

    def fetch(self, offsets: list[int], lengths: list[int]) -> list[bytes]:
        """Return ranges of the object, up to ten requests at a time.

        Raises:
            OSError: One cannot be read, or the store gave fewer bytes than it should.
        """
        pieces = request(
            self.path,
            self.options.timeout,
            lambda api: api.get_ranges(
                self.store, self.name, starts=offsets, lengths=lengths, coalesce=0
            ),
        )
        for piece, offset, length in zip(pieces, offsets, lengths, strict=True):
            if len(piece) != length:
                raise OSError(
                    errno.EIO,
                    f"the store gave {len(piece)} of {length} bytes at byte {offset}",
                    self.path,
                )
        return [bytes(piece) for piece in pieces]


def expand_url(url: str, options: StoreOptions) -> list[str]:
    """Return the record files that a URL stands for: the object, or those in a directory.

    Raises:
        FileNotFoundError: There is neither an object of that name nor one in such a directory.
        ValueError: The name of an object does not end with `.ffr`.
        OSError: The store does not answer, or refuses.
    """
    bare = url.rstrip("/")
    directory, name = split(url)
    store = _store(directory, *_frozen(options))
    if not url.endswith("/"):
        try:
            request(url, options.timeout, lambda api: api.head(store, name))
        except FileNotFoundError:
            pass
        else:
            if not name.endswith(SUFFIX) or name == SUFFIX:
                raise ValueError(f"{url}: the name of a record file ends with {SUFFIX}")
            return [url]
    listed = request(url, options.timeout, lambda api: api.list_with_delimiter(store, name + "/"))
    names = sorted(str(entry["path"]).rsplit("/", 1)[-1] for entry in listed["objects"])
    files = [f"{bare}/{name}" for name in names if name.endswith(SUFFIX)]
    if not files:
        raise FileNotFoundError(
            f"no such object: {url}, and no {SUFFIX} files in a directory of that name"
        )
    return files


def open_store(directory: str, options: StoreOptions) -> Any:
    """Return obstore's store of a directory or a bucket; the same one for the same options.

    Raises:
        ValueError: It is no store.
        ImportError: obstore is not installed.
        RuntimeError: This process was forked from one that had used a store.
    """
    return _store(directory, *_frozen(options))


def split(url: str) -> tuple[str, str]:
    """Split a URL before its last part.

    Raises:
        ValueError: It has no directory, which for a store's root is the bucket.
    """
    directory, _, name = url.rstrip("/").rpartition("/")
    if not name or not directory.partition("://")[2].strip("/"):
        raise ValueError(f"{url} names no object: give scheme://bucket/path/name{SUFFIX}")
    return directory, name


def request(url: str, timeout: float, ask: Callable[[Any], Result]) -> Result:
    """Ask a store, in Python's terms: `ask` is given obstore's functions.

    Raises:
        FileNotFoundError: There is no such object, or no such bucket.
        PermissionError: The store refuses.
        TimeoutError: It does not answer in time.
        OSError: Anything else.
        RuntimeError: This process was forked from one that had used a store.
    """
    api, errors = _obstore()
    _same_process()
    try:
        return ask(api)
    # Which of the two depends on obstore's version.
    except (errors.NotFoundError, FileNotFoundError):
        raise FileNotFoundError(errno.ENOENT, "no such object", url) from None
    except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
        raise PermissionError(errno.EACCES, f"the store refuses: {_words(error)}", url) from error
    except errors.BaseError as error:
        words = _words(error)
        if "404 Not Found" in words:
            raise FileNotFoundError(errno.ENOENT, "no such bucket or object", url) from error
        if "/latest/api/token" in words or "/latest/meta-data/" in words:
            words = (  # with no credentials given, obstore asks the cloud machine it may run on
                "no credentials for the store: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
                "give StoreOptions(config={'access_key_id': …, 'secret_access_key': …}), or "
                "{'skip_signature': 'true'} for a public bucket"
            )
            raise PermissionError(errno.EACCES, words, url) from error
        # How obstore ends a series of attempts that ran out of time.
        if "retry_timeout" in words or "timed out" in words:
            words = f"the store did not answer within {timeout:g} s: {words}"
            raise TimeoutError(errno.ETIMEDOUT, words, url) from error
        raise OSError(errno.EIO, words, url) from error


def _words(error: Exception) -> str:
    """Return an error's first line: obstore adds a dump of the causes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _frozen(options: StoreOptions) -> tuple[tuple[tuple[str, str], ...], float]:
    return tuple(sorted(options.config.items())), options.timeout


@functools.lru_cache(maxsize=64)
def _store(directory: str, config: tuple[tuple[str, str], ...], timeout: float) -> Any:
    """Return the store of a directory.

    A request is given a third of the time, its repetitions the rest: all of it ends in time.
    """
    _, errors = _obstore()
    _same_process()
    from obstore.store import from_url

    settings = dict(config)
    endpoint = settings.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL", "")
    one = timedelta(seconds=timeout / 3)
    make = functools.partial(
        from_url,
        directory,
        config=settings,
        client_options={
            "timeout": one,
            "connect_timeout": one,
            "allow_http": f"{endpoint}{directory}".startswith("http://"),
        },
        retry_config={
            "max_retries": 1000,
            "retry_timeout": timedelta(seconds=timeout * 2 / 3),
            "backoff": {
                "init_backoff": timedelta(milliseconds=50),
                "max_backoff": timedelta(seconds=1),
                "base": 2,
            },
        },
    )
    try:
        return make()
    except (errors.BaseError, ValueError) as error:
        raise ValueError(
            f"{directory} is no store that can be read ({_words(error)}): give s3://bucket/…, "
            "gs://bucket/…, az://account/container/… or https://…"
        ) from None


def _obstore() -> tuple[Any, Any]:
    try:
        import obstore
        import obstore.exceptions
    except ImportError as error:
        raise ImportError(
            f"reading from object stores needs obstore ({error}): pip install 'hfai[storage]'"
        ) from error
    return obstore, obstore.exceptions


_process: int | None = None


def _same_process() -> None:
    global _process
    if _process is None:
        _process = os.getpid()
    elif _process != os.getpid():
        raise RuntimeError(
            "this process was forked from one that has read from an object store, whose threads "
            "it does not have: start workers by spawn "
            '(DataLoader(…, multiprocessing_context="spawn"))'
        )
