"""The bytes of a checkpoint: the only module that knows them. It needs no torch.

A checkpoint is a directory (in an object store: the objects below a prefix):

    COMMIT                     written last; without it there is no checkpoint
    state.json                 what is no tensor, and where tensors belong in it
    rank-00000.safetensors     tensors written by rank 0; a file of the safetensors format
    rank-00000.json            the index of that file: every tensor's place and hashes
    rank-00001.safetensors     and so on, for each rank of the job that saved

In an object store, whose objects cannot be renamed together, all names but COMMIT begin with the
generation and a dash, so that two writers never mix. Byte for byte: docs/checkpoint-format.md.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import xxhash

from hfai.checkpoint.errors import CheckpointError, DamagedCheckpointError, nested_too_deeply

FORMAT = "hfai-checkpoint"
VERSION = 1
COMMIT = "COMMIT"
STATE = "state.json"
ALIGNMENT = 4096
CHUNK = 4 << 20  # bytes of a tensor that have a hash of their own
PAD = "__pad__"  # the entries of a shard file that fill it up to the next multiple of ALIGNMENT
_HASH = 16  # hexadecimal digits
_NAME = re.compile(r"rank-\d{5,}\.(safetensors|json)")

# torch's name of a type -> the name in the safetensors format, bytes of an item. Types that the
# format has no name for are written as U8.
DTYPES: dict[str, tuple[str, int]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fnuz": ("U8", 1),
    "float8_e5m2fnuz": ("U8", 1),
    "float8_e8m0fnu": ("U8", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "complex64": ("U8", 8),
    "complex128": ("U8", 16),
}


def shard_name(rank: int) -> str:
    """Return the name of a rank's tensors."""
    return f"rank-{rank:05d}.safetensors"


def index_name(rank: int) -> str:
    """Return the name of a rank's index."""
    return f"rank-{rank:05d}.json"


def is_name(name: str) -> bool:
    """Whether a file beside COMMIT has such a name."""
    return name == STATE or _NAME.fullmatch(name) is not None


def digest(data: Any) -> str:
    """Return the XXH3-64 of bytes, 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


class Slice(NamedTuple):
    """A box of a tensor, as it lies in one shard file.

    Attributes:
        name: Of the tensor.
        dtype: torch's name of its type, without "torch.".
        shape: Of the whole tensor.
        offsets: Where the box begins in it.
        sizes: Of the box.
        begin: Its first byte in the file.
        length: Its bytes: row-major, back to back.
        hashes: XXH3-64 of each `chunk` bytes, 16 hexadecimal digits each, back to back.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int
    length: int
    hashes: str = ""


@dataclass(frozen=True)
class Index:
    """What one rank has written.

    Attributes:
        generation: Of the save that it belongs to.
        rank: Who wrote it.
        file: Its shard file; "" where it has no tensors.
        size: Bytes of the shard file.
        header: Bytes of the shard file before its first tensor.
        header_hash: Of those.
        slices: In the order of the file.
        aliases: A name -> the name of the tensor that it shares all of its memory with.
        own: Encoded values of this rank.
        chunk: Bytes that have a hash of their own.
    """

    generation: str
    rank: int
    file: str
    size: int
    header: int
    header_hash: str
    slices: tuple[Slice, ...]
    aliases: Mapping[str, str]
    own: Mapping[str, Any] = field(default_factory=dict)
    chunk: int = CHUNK

    def encode(self) -> bytes:
        """Return the bytes of the index file."""
        rows = [
            [s.name, s.dtype, s.shape, s.offsets, s.sizes, s.begin, s.length, s.hashes]
            for s in self.slices
        ]
        content = {
            "format": FORMAT,
            "version": VERSION,
            "generation": self.generation,
            "rank": self.rank,
            "file": self.file,
            "size": self.size,
            "header": self.header,
            "header_xxh3": self.header_hash,
            "chunk": self.chunk,
            "tensors": rows,
            "aliases": dict(self.aliases),
            "own": dict(self.own),
        }
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def decode_index(data: bytes, path: str) -> Index:
    """Return an index from its bytes, whose hash has been compared.

    Raises:
        DamagedCheckpointError: It makes no sense.
    """
    try:
        content = json.loads(data)
        _need_version(content, path)
        index = Index(
            content["generation"],
            content["rank"],
            content["file"],
            content["size"],
            content["header"],
            content["header_xxh3"],
            tuple(
                Slice(
                    name, dtype, tuple(shape), tuple(offsets), tuple(sizes), begin, length, hashes
                )
                for name, dtype, shape, offsets, sizes, begin, length, hashes in content["tensors"]
            ),
            content["aliases"],
            content["own"],
            content["chunk"],
        )
        if index.chunk < 1:
            raise ValueError(f"its chunks have {index.chunk} bytes")
        for piece in index.slices:
            _check_slice(piece, index)
    except RecursionError as error:
        raise nested_too_deeply(path) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise DamagedCheckpointError(f"{path} is no index: {error}", path=path) from error
    return index


def _check_slice(piece: Slice, index: Index) -> None:
    items = 1
    for offset, size, whole in zip(piece.offsets, piece.sizes, piece.shape, strict=True):
        if not 0 <= offset <= offset + size <= whole:
            raise ValueError(f"{piece.name}: a slice lies outside its tensor")
        items *= size
    chunks = -(-piece.length // index.chunk)
    fits = index.header <= piece.begin <= piece.begin + piece.length <= index.size
    if piece.length != items * DTYPES[piece.dtype][1] or len(piece.hashes) != _HASH * chunks:
        raise ValueError(f"{piece.name}: length or number of hashes is wrong")
    if not fits:
        raise ValueError(f"{piece.name} lies outside its file")


def hash_of(piece: Slice, chunk: int) -> str:
    """Return the hash of a slice's chunk of this number."""
    return hashes_of(piece.hashes, chunk, 1)


def hashes_of(hashes: str, first: int, count: int) -> str:
    """Return the hashes of some chunks, back to back."""
    return hashes[_HASH * first : _HASH * (first + count)]


def hash_count(hashes: str) -> int:
    """Return how many hashes lie back to back in a text."""
    return len(hashes) // _HASH


@dataclass(frozen=True)
class Commit:
    """The record that makes a directory a checkpoint.

    Attributes:
        generation: Of the save: every file belongs to the same.
        world: How many ranks wrote.
        files: Each file's size and, except for shards, whose chunks have their own, its hash.
        created: Time in UTC, ISO 8601.
        step: The training's, if it was given.
        epoch: The training's, if it was given.
        versions: Of what wrote it.
    """

    generation: str
    world: int
    files: Mapping[str, tuple[int, str]]
    created: str
    step: int | None = None
    epoch: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the bytes of the commit record: one line of JSON, one line with its hash."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "generation": self.generation,
            "world": self.world,
            "created": self.created,
            "step": self.step,
            "epoch": self.epoch,
            "versions": dict(self.versions),
            "files": {name: list(entry) for name, entry in sorted(self.files.items())},
        }
        body = json.dumps(content, separators=(",", ":")).encode() + b"\n"
        return body + digest(body).encode() + b"\n"

    @property
    def prefix(self) -> str:
        """What names of the other files begin with: nothing, or the generation in a store."""
        return f"{self.generation}-" if f"{self.generation}-{STATE}" in self.files else ""


def decode_commit(data: bytes, path: str) -> Commit:
    """Return a commit record from its bytes.

    Raises:
        DamagedCheckpointError: Its hash does not match, or it makes no sense.
        CheckpointError: It is of a newer version.
    """
    body, _, last = data.rpartition(b"\n")[0].rpartition(b"\n")
    body += b"\n"
    if not data.endswith(b"\n") or last != digest(body).encode():
        raise DamagedCheckpointError(
            f"{path} is damaged: its hash does not match. Use an earlier checkpoint", path=path
        )
    try:
        content = json.loads(body)
        _need_version(content, path)
        return Commit(
            content["generation"],
            content["world"],
            {name: (size, found) for name, (size, found) in content["files"].items()},
            content["created"],
            content["step"],
            content["epoch"],
            content["versions"],
        )
    except RecursionError as error:
        raise nested_too_deeply(path) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise DamagedCheckpointError(f"{path} is no commit record: {error}", path=path) from error


def _need_version(content: Mapping[str, Any], path: str) -> None:
    found = content["format"], content["version"]
    if found[0] != FORMAT:
        raise ValueError(f"its format is {found[0]!r}, not {FORMAT!r}")
    if found[1] != VERSION:
        raise CheckpointError(
            f"{path} is of version {found[1]} of the format, and this hfai reads version "
            f"{VERSION}: read it with a newer hfai"
        )


class Layout(NamedTuple):
    """Where slices lie in a shard file.

    Attributes:
        header: The bytes before the first tensor, a multiple of ALIGNMENT.
        slices: With their places, in the order of the file, without hashes.
        size: Bytes of the whole file.
    """

    header: bytes
    slices: tuple[Slice, ...]
    size: int


def lay_out(slices: Iterable[Slice], generation: str, rank: int) -> Layout:
    """Place slices in a shard file.

    Those of ALIGNMENT bytes and more begin at multiples of it, and come first; the gaps are entries
    of their own, because the safetensors format allows no bytes between its tensors. The smaller
    ones follow, those of large items first, so that each is aligned to its item.

    Args:
        slices: Their `begin` is ignored.
        generation: Of the save.
        rank: Who writes the file.
    """
    order = sorted(
        slices,
        key=lambda s: (s.length < ALIGNMENT, -DTYPES[s.dtype][1], s.name, s.offsets),
    )
    entries: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "version": str(VERSION),
            "generation": generation,
            "rank": str(rank),
        }
    }
    places, at, pads = [], 0, 0
    for piece in order:
        code, item = DTYPES[piece.dtype]
        shape = [*piece.sizes, item] if code == "U8" and item > 1 else list(piece.sizes)
        entries[_key(piece)] = _entry(code, shape, at, piece.length)
        places.append(at)
        at += piece.length
        gap = -at % ALIGNMENT if piece.length >= ALIGNMENT else 0
        if gap:
            entries[f"{PAD}{pads}"] = _entry("U8", [gap], at, gap)
            at += gap
            pads += 1
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    placed = tuple(
        piece._replace(begin=len(header) + place)
        for piece, place in zip(order, places, strict=True)
    )
    return Layout(header, placed, len(header) + at)


def _entry(code: str, shape: list[int], begin: int, length: int) -> dict[str, Any]:
    return {"dtype": code, "shape": shape, "data_offsets": [begin, begin + length]}


def _key(piece: Slice) -> str:
    """Return the name of a slice in its shard file: where it is not all of its tensor, with it."""
    if piece.sizes == piece.shape:
        return piece.name
    spans = ",".join(f"{o}:{o + s}" for o, s in zip(piece.offsets, piece.sizes, strict=True))
    return f"{piece.name}[{spans}]"
