"""Which formats there are, and which one a path is of."""

from __future__ import annotations

from pathlib import Path

_SUFFIX = ".ffr"  # ffrecord.format's; that module takes numpy along

FORMATS = {
    "ffrecord": "ffrecord.convert.records",
    "folder": "ffrecord.convert.folder",
    "webdataset": "ffrecord.convert.webdataset",
    "tfrecord": "ffrecord.convert.tfrecord",
    "lmdb": "ffrecord.convert.lmdb",
    "array_record": "ffrecord.convert.array_record",
    "huggingface": "ffrecord.convert.huggingface",
}
"""The module of each format."""

_SUFFIXES = {
    _SUFFIX: "ffrecord",
    ".tar": "webdataset",
    ".tar.gz": "webdataset",
    ".tgz": "webdataset",
    ".tfrecord": "tfrecord",
    ".tfrecords": "tfrecord",
    ".tfrecord.gz": "tfrecord",
    ".lmdb": "lmdb",
    ".mdb": "lmdb",
    ".array_record": "array_record",
    ".arrayrecord": "array_record",
}


def detect_source(path: Path) -> str:
    """Return the format of what is at a path, by its name and the names in it.

    Raises:
        ValueError: It could be anything.
    """
    if path.is_dir():
        names = {entry.name for entry in path.iterdir()}
        if "data.mdb" in names:
            return "lmdb"
        if names & {"state.json", "dataset_dict.json"} and any(
            name.endswith(".arrow") or name in ("dataset_info.json", "dataset_dict.json")
            for name in names
        ):
            return "huggingface"
        shown = {name for name in names if not name.startswith(".")}
        parts = {name for name in shown if name.endswith(_SUFFIX)}
        if path.name.endswith(_SUFFIX) or (parts and parts == shown):
            return "ffrecord"
        if parts:
            raise ValueError(
                f"{path} has record files and others ({min(shown - parts)}): say which are meant "
                "(--from, source_format): ffrecord or folder"
            )
        return "folder"
    return _by_suffix(path, "--from, source_format")


def detect_target(path: Path) -> str:
    """Return the format that a new path's name asks for.

    Raises:
        ValueError: It asks for none.
    """
    return _by_suffix(path, "--to, target_format")


def _by_suffix(path: Path, option: str) -> str:
    for suffix, name in _SUFFIXES.items():
        if path.name.endswith(suffix):
            return name
    raise ValueError(
        f"{path}: the name tells no format; say which ({option}): {', '.join(FORMATS)}"
    )
