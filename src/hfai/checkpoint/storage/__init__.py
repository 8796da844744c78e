"""Where checkpoints lie: one small interface, and one file for each kind of place.

`locate` gives the place of a path or URL.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hfai.checkpoint.storage.base import Failure, File, Location, Run, Sink, Writer
from hfai.checkpoint.storage.local import LocalLocation

if TYPE_CHECKING:
    from ffrecord import StoreOptions

__all__ = ["Failure", "File", "Location", "Run", "Sink", "Writer", "locate"]

PathLike = str | os.PathLike[str]


def locate(path: PathLike, options: StoreOptions | None = None) -> Location:
    """Return the place that a path or URL names.

    Args:
        path: A path of this machine's file system, or a URL: s3://, gs://, az:// and https:// go
            through obstore, other schemes through fsspec.
        options: For object stores.
    """
    text = os.fspath(path)
    if isinstance(text, bytes):
        raise TypeError(f"a path is a str or a pathlib.Path, not {path!r}")
    if not text:
        raise ValueError("the path is empty: name a directory")
    if "://" not in text:
        return LocalLocation(text)
    if text.startswith("file://"):
        return LocalLocation(text.removeprefix("file://"))
    from hfai.checkpoint.storage.remote import locate as locate_remote

    return locate_remote(text, options)
