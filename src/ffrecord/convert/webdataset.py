"""WebDataset's tar files: each file in the archive is a record, its name the record's key.

A sample is the files that share a name up to the first dot of its last component, which stand one
after the other; their records do so, too, and are read as one piece. With `field` a sample is one
record: its file with that extension, under the sample's name.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

from ffrecord.convert.gzipped import create
from ffrecord.convert.model import Counts, Entry, Options, Source, named
from ffrecord.whole import whole_file

_BLOCK = 512


def open_source(path: Path, options: Options) -> Source:
    """Read an archive from start to end; it may be compressed by gzip, bzip2 or xz."""
    return Source(_entries(path, options.field))


def write(path: Path, source: Source, options: Options) -> Counts:
    """Write an archive; records without a key are named by their place as ten digits and ".bin".

    Compressed by gzip if its name ends with "gz". Equal records give equal bytes.

    Raises:
        ValueError: Two records have one name; unpacking would keep one of them.
    """
    names: set[str] = set()
    with (
        whole_file(path) as work,
        create(work, path.name.endswith("gz")) as file,
        tarfile.open(fileobj=file, mode="w") as archive,
    ):
        for name, data in named(source.entries, ".bin"):
            if name in names:
                raise ValueError(f"two records would be {name!r} in {path}: give other keys")
            names.add(name)
            content = bytes(data)
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = 0o644
            archive.addfile(member, io.BytesIO(content))
            _forget_headers(archive)
    return Counts(len(names))


def split_name(name: str) -> tuple[str, str]:
    """Split a file's name into its sample's name and its field: at the first dot after a slash."""
    directory, slash, base = name.rpartition("/")
    key, _, field = base.partition(".")
    return f"{directory}{slash}{key}", field


def _entries(path: Path, field: str | None) -> Iterator[Entry]:
    found = False
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                _forget_headers(archive)
                if member.isdir():
                    continue
                if not member.isfile():
                    raise ValueError(
                        f"{path}: {member.name} is neither a file nor a directory: "
                        "make the archive without links"
                    )
                key, extension = split_name(member.name)
                if field is not None and extension != field:
                    continue
                found = True
                file = archive.extractfile(member)
                assert file is not None
                yield Entry(file.read(), member.name if field is None else key)
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"{path} is damaged, cut short, or no tar file: {error}") from error
    if not _is_ended(path):
        raise ValueError(f"{path} is cut short: a tar file ends with a block of zeros")
    if field is not None and not found:
        raise ValueError(f"no sample in {path} has a file with the extension {field!r}")


def _forget_headers(archive: tarfile.TarFile) -> None:
    """Drop what Python's tarfile keeps of every file: a kilobyte each."""
    archive.members = []  # type: ignore[attr-defined]


def _is_ended(path: Path) -> bool:
    """Say whether an archive has its end, which Python's reader does not ask for."""
    with open(path, "rb") as file:
        if not tarfile.is_tarfile(path) or _is_compressed(file.read(6)):
            return True
        file.seek(-min(_BLOCK, path.stat().st_size), io.SEEK_END)
        return not any(file.read())


def _is_compressed(head: bytes) -> bool:
    return head.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ"))
