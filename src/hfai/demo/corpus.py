"""The text: the sources of Python's own standard library, packed once into one file of bytes.

Every machine that can run this has them, several megabytes of code and English that people wrote.
Left out are what a distribution may or may not install (site-packages, tests) and what programs
wrote (the tables under `encodings`, pydoc's topics, build settings), which would be different
everywhere or too easy to guess.

The pack lies in the user's cache directory. Its name holds Python's version and a fingerprint of
the files it was made of; its last 32 bytes are the SHA-256 of the rest, checked on every reading.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hfai.demo.atomic import replacing

ByteArray = npt.NDArray[np.uint8]

LEFT_OUT_DIRECTORIES = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "idle_test",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
    }
)
DIGEST_BYTES = hashlib.sha256().digest_size
HELD_OUT_SHARE = 0.05
LEAST_BYTES = 1_000_000


@dataclass(frozen=True)
class Corpus:
    """The packed text.

    Attributes:
        training: the bytes to train on.
        held_out: the bytes of the last files, which training never sees.
        digest: SHA-256 of all of it, in hexadecimal.
        note: one line for the user where the cache could not be used, else None.
    """

    training: ByteArray
    held_out: ByteArray
    digest: str
    note: str | None = None


def load_corpus(cache: Path | None = None, root: Path | None = None) -> Corpus:
    """Return the packed corpus; pack it first if the cache does not hold it whole.

    Safe to call from several processes at once. Where the cache cannot be written the pack is used
    from memory and `note` says so.

    Args:
        cache: the directory of the pack; `cache_directory()` by default.
        root: the directory of the sources; that of Python's standard library by default.

    Raises:
        ValueError: `root` holds too little Python source to train on.
    """
    cache = cache_directory() if cache is None else cache
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    files = _list_sources(root)
    pack = cache / f"python-{platform.python_version()}-{_fingerprint(root, files)}.bytes"
    payload = _read_pack(pack)
    note = None
    if payload is None:
        payload = b"".join((root / file).read_bytes() for file in files)
        if len(payload) < LEAST_BYTES:
            raise ValueError(
                f"{root} holds only {len(payload):,} bytes of Python source, and the demo needs "
                f"{LEAST_BYTES:,}: run it with a Python whose standard library is installed as "
                f"files"
            )
        try:
            _write_pack(pack, payload)
        except OSError as error:
            note = f"the corpus stays in memory, its cache cannot be written: {error}"
    return _split(payload, note)


def cache_directory() -> Path:
    """Return the directory of hfai's packed corpora: `$XDG_CACHE_HOME/hfai/corpus` or its default.

    As the XDG Base Directory Specification says, a relative `$XDG_CACHE_HOME` is ignored.
    """
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = chosen if chosen.is_absolute() else Path.home() / ".cache"
    return base / "hfai" / "corpus"


def unigram_entropy(corpus: ByteArray) -> float:
    """Return the entropy of single bytes, in nats: the loss of guessing by frequency alone."""
    counts = np.bincount(corpus, minlength=256)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _list_sources(root: Path) -> list[Path]:
    """List the source files below `root`, relative to it, in a fixed order that mixes packages.

    The order is that of a hash of the path, so that the held-out end is a sample of all packages.
    """
    files = []
    for directory, below, names in os.walk(root):
        below[:] = [name for name in below if name not in LEFT_OUT_DIRECTORIES]
        files += [
            (Path(directory) / name).relative_to(root)
            for name in names
            if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    return sorted(files, key=lambda file: hashlib.sha256(file.as_posix().encode()).digest())


def _fingerprint(root: Path, files: Sequence[Path]) -> str:
    """Hash names, sizes and times of change, which stand for the contents without reading them."""
    digest = hashlib.sha256()
    for file in files:
        status = (root / file).stat()
        digest.update(f"{file.as_posix()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _read_pack(pack: Path) -> bytes | None:
    """Return the payload of `pack`, or None where there is none or it is not whole."""
    try:
        content = pack.read_bytes()
    except OSError:
        return None
    payload, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    return payload if hashlib.sha256(payload).digest() == digest else None


def _write_pack(pack: Path, payload: bytes) -> None:
    pack.parent.mkdir(parents=True, exist_ok=True)
    with replacing(pack) as file:
        file.write(payload)
        file.write(hashlib.sha256(payload).digest())


def _split(payload: bytes, note: str | None) -> Corpus:
    content = np.frombuffer(payload, dtype=np.uint8)
    boundary = round(len(content) * (1 - HELD_OUT_SHARE))
    digest = hashlib.sha256(payload).hexdigest()
    return Corpus(content[:boundary], content[boundary:], digest, note)
