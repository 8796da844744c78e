"""The text: the sources of Python's own standard library, packed once into record files.

Every machine that can run this has them, several megabytes of code and English that people wrote.
Left out are what a distribution may or may not install (site-packages, tests) and what programs
wrote (the tables under `encodings`, pydoc's topics, build settings), which would be different
everywhere or too easy to guess.

A record is a window of text. There are two files, of the windows to train on and of those held out,
in the user's cache directory. Their names hold Python's version, a fingerprint of the sources and
the length of a window; every record's checksum is compared on every loading.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ffrecord import DamagedFileError, FileReader, FileWriter

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
FORMAT = "hfai-demo-text-1"
HELD_OUT_SHARE = 0.05
LEAST_BYTES = 1_000_000


@dataclass(frozen=True)
class Corpus:
    """The packed text.

    Attributes:
        training: the record file of the windows to train on.
        held_out: that of the windows of the last sources, which training never sees.
        training_bytes: in all records of `training`.
        held_out_bytes: in all records of `held_out`.
        counts: how often each byte occurs in `training`, shape (256,).
        digest: SHA-256 of all of the text, in hexadecimal.
        note: one line for the user where the cache could not be used, else None.
        temporary: what removes the files in that case.
    """

    training: Path
    held_out: Path
    training_bytes: int
    held_out_bytes: int
    counts: npt.NDArray[np.int64]
    digest: str
    note: str | None = None
    temporary: tempfile.TemporaryDirectory[str] | None = None


def load_corpus(length: int, cache: Path | None = None, root: Path | None = None) -> Corpus:
    """Return the text packed in windows; pack it first if the cache does not hold it whole.

    Safe to call from several processes at once. Where the cache cannot be written the files lie in
    a temporary directory for as long as the corpus is used, and `note` says so.

    Args:
        length: bytes in a window; a rest of the text that fills none is left out.
        cache: the directory of the files; `cache_directory()` by default.
        root: the directory of the sources; that of Python's standard library by default.

    Raises:
        ValueError: `root` holds too little Python source to train on.
        OSError: neither the cache nor a temporary directory can be written.
    """
    cache = cache_directory() if cache is None else cache
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    files = _list_sources(root)
    name = f"python-{platform.python_version()}-{_fingerprint(root, files)}-{length}"
    corpus = _open_pack(cache, name)
    if corpus is not None:
        return corpus
    text = b"".join((root / file).read_bytes() for file in files)
    if len(text) < LEAST_BYTES:
        raise ValueError(
            f"{root} holds only {len(text):,} bytes of Python source, and the demo needs "
            f"{LEAST_BYTES:,}: run it with a Python whose standard library is installed as "
            f"files"
        )
    note, temporary = None, None
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _write_pack(cache, name, text, length)
    except OSError as error:
        temporary = tempfile.TemporaryDirectory(prefix="hfai-corpus-")
        note = f"the text is packed in {temporary.name}, its cache cannot be written: {error}"
        cache = Path(temporary.name)
        _write_pack(cache, name, text, length)
    corpus = _open_pack(cache, name, note, temporary)
    if corpus is None:
        raise OSError(f"the text that was just packed in {cache} cannot be read back whole")
    return corpus


def cache_directory() -> Path:
    """Return the directory of hfai's packed corpora: `$XDG_CACHE_HOME/hfai/corpus` or its default.

    As the XDG Base Directory Specification says, a relative `$XDG_CACHE_HOME` is ignored.
    """
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = chosen if chosen.is_absolute() else Path.home() / ".cache"
    return base / "hfai" / "corpus"


def unigram_entropy(counts: npt.NDArray[np.int64]) -> float:
    """Return the entropy of single bytes, in nats: the loss of guessing by frequency alone.

    Args:
        counts: how often each byte occurs.
    """
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def write_windows(path: Path, text: ByteArray, length: int, digest: str) -> None:
    """Write a record file of the windows of `length` bytes in `text`, one after the other."""
    metadata = {"format": FORMAT, "length": length, "sha256": digest}
    rows = text[: len(text) // length * length].reshape(-1, length)
    with FileWriter(path, len(rows), metadata=metadata) as writer:
        writer.write(rows)


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


def _paths(directory: Path, name: str) -> tuple[Path, Path]:
    return directory / f"{name}-training.ffr", directory / f"{name}-held-out.ffr"


def _open_pack(
    directory: Path,
    name: str,
    note: str | None = None,
    temporary: tempfile.TemporaryDirectory[str] | None = None,
) -> Corpus | None:
    """Check both files to the last byte; return None where they are not there or not whole."""
    paths = _paths(directory, name)
    counts, digests = [], []
    try:
        for path in paths:
            with FileReader(path) as reader:
                metadata = reader.get_metadata(0) or {}
                if metadata.get("format") != FORMAT:
                    return None
                digests.append(str(metadata.get("sha256")))
                counts.append(_count_bytes(reader))
    except (OSError, DamagedFileError):
        return None
    if digests[0] != digests[1]:
        return None
    sizes = [int(count.sum()) for count in counts]
    return Corpus(paths[0], paths[1], sizes[0], sizes[1], counts[0], digests[0], note, temporary)


def _count_bytes(reader: FileReader) -> npt.NDArray[np.int64]:
    counts = np.zeros(256, np.int64)
    for first, last in reader.pieces():
        piece = np.concatenate(reader.read(range(first, last), writable=False))
        counts += np.bincount(piece, minlength=256)
    return counts


def _write_pack(directory: Path, name: str, text: bytes, length: int) -> None:
    content = np.frombuffer(text, dtype=np.uint8)
    boundary = round(len(content) * (1 - HELD_OUT_SHARE))
    digest = hashlib.sha256(text).hexdigest()
    training, held_out = _paths(directory, name)
    write_windows(training, content[:boundary], length, digest)
    write_windows(held_out, content[boundary:], length, digest)
