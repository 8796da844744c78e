"""Values that are no tensors, as JSON; the tensors among them by name.

What JSON has no word for is an object with one member whose name begins with "$":

    {"$tensor": name}                      a tensor of the shard files
    {"$array": name}                       the same, as a NumPy array
    {"$tuple": [...]}, {"$set": [...]}, {"$frozenset": [...]}
    {"$dict": [[key, value], ...]}         keys that are no strings, or begin with "$"
    {"$float": "nan" | "inf" | "-inf"}
    {"$complex": [real, imaginary]}
    {"$bytes": base64}
    {"$numpy": [type, value]}              a NumPy scalar
    {"$dtype": name}, {"$device": name}    of torch

Nothing else is taken: no object whose class would have to be found again to load it. Containers are
at most MOST_LEVELS deep, so that what was saved can be loaded below any usual number of open calls.

Shard files are safetensors files, so that names of tensors are what that format can have.
"""

from __future__ import annotations

import base64
import contextlib
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from hfai.checkpoint.errors import UndecodableError, nested_too_deeply

# Gives the tensor a name refers to.
Fetch = Callable[[str], torch.Tensor]
_PLAIN = (type(None), bool, int, str)
# Containers in containers. A level takes up to three of the interpreter's 1000 calls.
MOST_LEVELS = 100
_MOST_SHOWN = 80  # characters of the way to what is too deep
_MOST_BITS = 14_000  # of an int; Python reads and writes no more than 4300 digits unless told to


def encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a value as JSON types.

    Args:
        value: Any of the above, nested.
        name: Of the value: tensors below it are named by the way to them, "name/key/0".
        tensors: Gets the tensors.

    Raises:
        TypeError: Something in it is none of them.
        ValueError: It contains itself, is nested too deeply, or names of tensors are not unique or
            none that safetensors files can have.
    """
    return _Encoder(tensors).encode(value, name)


class _Encoder:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._open: set[int] = set()

    def encode(self, value: Any, name: str) -> Any:
        if type(value) is int and value.bit_length() > _MOST_BITS:
            raise ValueError(
                f"{name} is an int of {value.bit_length()} bits: at most {_MOST_BITS} are stored; "
                "give bytes (int.to_bytes) or a string"
            )
        if type(value) in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._keep(name, value)}
        simple = _encode_simple(value)
        if simple is not None:
            return simple
        if type(value) in (np.ndarray, np.memmap):  # others have more than their items
            if value.dtype.kind not in "biufc":
                raise TypeError(f"{name} is an array of {value.dtype}: give numbers or bool")
            if value.dtype.itemsize > (16 if value.dtype.kind == "c" else 8):
                raise TypeError(
                    f"{name} is an array of {value.dtype}, which torch has no type for: convert it "
                    "to float64 or complex128"
                )
            native = np.array(value, dtype=value.dtype.newbyteorder("="), order="C")
            return {"$array": self._keep(name, torch.from_numpy(native))}
        if id(value) in self._open:
            raise ValueError(f"{name} contains itself")
        if len(self._open) >= MOST_LEVELS:
            shown = name if len(name) <= _MOST_SHOWN else f"{name[:_MOST_SHOWN]}…"
            raise ValueError(
                f"{shown} is nested too deeply: at most {MOST_LEVELS} lists, tuples, sets or dicts "
                "in each other are stored"
            )
        self._open.add(id(value))
        try:
            return self._encode_container(value, name)
        finally:
            self._open.discard(id(value))

    def _encode_container(self, value: Any, name: str) -> Any:
        if type(value) in (list, tuple, torch.Size, set, frozenset):
            items = [self.encode(item, f"{name}/{at}") for at, item in enumerate(value)]
            if type(value) is list:
                return items
            return {_MARKS.get(type(value), "$tuple"): items}
        if type(value) in (dict, OrderedDict, defaultdict):
            plain = all(type(key) is str and not key.startswith("$") for key in value)
            if plain:
                return {key: self.encode(item, f"{name}/{key}") for key, item in value.items()}
            pairs = [
                [self.encode(key, f"{name}/a key"), self.encode(item, f"{name}/{key}")]
                for key, item in value.items()
            ]
            return {"$dict": pairs}
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise TypeError(
            f"{name} is a {kind}, which is not stored: give tensors, arrays, numbers, strings, "
            "bytes, None, and lists, tuples, sets or dicts of them (of an object, its state_dict())"
        )

    def _keep(self, name: str, tensor: torch.Tensor) -> str:
        if name in self._tensors:
            raise ValueError(f"two tensors would be named {name!r}: rename one of the keys")
        need_storable(name)
        self._tensors[name] = tensor
        return name


def need_storable(name: str) -> None:
    """Refuse a name of a tensor that safetensors files cannot have.

    Raises:
        ValueError: It is the format's own, or no Unicode text.
    """
    if name == _METADATA or name.endswith(f"/{_METADATA}"):
        raise ValueError(
            f"the tensor {name!r} has a name that safetensors files use for themselves "
            f"({_METADATA}): rename it"
        )
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"the tensor {name!r} has a name with lone surrogates, which is no Unicode text and "
            "cannot be in a safetensors file: rename it"
        ) from None


def _encode_simple(value: Any) -> Any:
    """Return a value without parts as JSON, or None where it is something else."""
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if type(value) is complex:
        return {"$complex": [_encode_simple(value.real), _encode_simple(value.imag)]}
    if type(value) in (bytes, bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        item = value.item()
        # A long double does not fit a Python float.
        if value.dtype.itemsize <= 8 or (value.dtype.kind == "c" and value.dtype.itemsize <= 16):
            plain = item if isinstance(item, (bool, int)) else _encode_simple(item)
            return {"$numpy": [value.dtype.name, plain]}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    return None


def decode(value: Any, fetch: Fetch, name: str = "a value") -> Any:
    """Return what `encode` was given; all tuples are tuples, all dicts dicts.

    Args:
        value: JSON types.
        fetch: Called for each tensor.
        name: Of the value, for messages.

    Raises:
        UndecodableError: It is nothing that `encode` makes.
        CheckpointError: It is nested too deeply for the calls that are open.
    """
    with _decoding(name):
        return _decode(value, fetch)


@contextlib.contextmanager
def _decoding(name: str) -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise nested_too_deeply(name) from error
    except (TypeError, ValueError, IndexError) as error:
        raise UndecodableError(f"{name} cannot be decoded: {error}") from error


def _decode(value: Any, fetch: Fetch) -> Any:
    if isinstance(value, list):
        return [_decode(item, fetch) for item in value]
    if not isinstance(value, dict):
        return value
    mark = next(iter(value), "")
    if not mark.startswith("$"):
        return {key: _decode(item, fetch) for key, item in value.items()}
    if len(value) != 1 or mark not in _DECODERS:
        raise ValueError(f"the mark {mark!r} is not known")
    return _DECODERS[mark](value[mark], fetch)


def is_dict(encoded: Any) -> bool:
    """Whether an encoded value is a dict."""
    if not isinstance(encoded, dict):
        return False
    return "$dict" in encoded or not next(iter(encoded), "").startswith("$")


def members(encoded: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the members of an encoded dict, still encoded, whatever its keys are."""
    if "$dict" not in encoded:
        return dict(encoded)
    with _decoding("a dict"):
        return {_decode(key, _no_tensor): value for key, value in encoded["$dict"]}


def _no_tensor(name: str) -> torch.Tensor:
    raise ValueError(f"{name} is a tensor that is a key of a dict")


def names_in(value: Any, name: str = "a value") -> list[str]:
    """Return the names of all tensors in encoded values, in order; errors are those of `decode`."""
    found: list[str] = []

    def fetch(tensor: str) -> torch.Tensor:
        found.append(tensor)
        return _NOTHING

    decode(value, fetch, name)
    return found


def _decode_numpy(value: Any, fetch: Fetch) -> Any:
    return np.dtype(value[0]).type(_decode(value[1], fetch))


def _decode_dtype(value: Any, fetch: Fetch) -> Any:
    found = getattr(torch, str(value), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no type {value!r}")
    return found


def _decode_array(value: Any, fetch: Fetch) -> Any:
    # Where the file is not read (the meta device), there is no array either.
    tensor = fetch(value)
    return tensor if tensor.is_meta else tensor.cpu().numpy()


def _decode_device(value: Any, fetch: Fetch) -> Any:
    try:
        return torch.device(value)
    except RuntimeError as error:
        raise ValueError(f"torch has no device {value!r}") from error


_NOTHING = torch.empty(0)
_METADATA = "__metadata__"
_MARKS: Mapping[type, str] = {set: "$set", frozenset: "$frozenset"}
_DECODERS: Mapping[str, Callable[[Any, Fetch], Any]] = {
    "$tensor": lambda value, fetch: fetch(value),
    "$array": _decode_array,
    "$tuple": lambda value, fetch: tuple(_decode(item, fetch) for item in value),
    "$set": lambda value, fetch: {_decode(item, fetch) for item in value},
    "$frozenset": lambda value, fetch: frozenset(_decode(item, fetch) for item in value),
    "$dict": lambda value, fetch: {_decode(k, fetch): _decode(v, fetch) for k, v in value},
    "$float": lambda value, fetch: float(value),
    "$complex": lambda value, fetch: complex(*(_decode(part, fetch) for part in value)),
    "$bytes": lambda value, fetch: base64.b64decode(value),
    "$numpy": _decode_numpy,
    "$dtype": _decode_dtype,
    "$device": _decode_device,
}
