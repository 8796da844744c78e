"""Values that are no tensors, as JSON; the tensors among them by name.

What JSON has no word for is an object with one member whose name begins with "$":

    {"$tensor": name}                      a tensor of the shard files
    {"$array": name}                       the same, as a NumPy array
    {"$tuple": [...]}, {"$set": [...]}
    {"$dict": [[key, value], ...]}         keys that are no strings, or begin with "$"
    {"$float": "nan" | "inf" | "-inf"}
    {"$complex": [real, imaginary]}
    {"$bytes": base64}
    {"$numpy": [type, value]}              a NumPy scalar
    {"$dtype": name}, {"$device": name}    of torch

Nothing else is taken: no object whose class would have to be found again to load it.
"""

from __future__ import annotations

import base64
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

# Gives the tensor a name refers to.
Fetch = Callable[[str], torch.Tensor]
_PLAIN = (type(None), bool, int, str)
_MOST_BITS = 14_000  # of an int; Python reads and writes no more than 4300 digits unless told to


def encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a value as JSON types.

    Args:
        value: Any of the above, nested.
        name: Of the value: tensors below it are named by the way to them, "name/key/0".
        tensors: Gets the tensors.

    Raises:
        TypeError: Something in it is none of them.
        ValueError: It contains itself, or two ways to tensors have one name.
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
            return {"$set" if isinstance(value, (set, frozenset)) else "$tuple": items}
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
        self._tensors[name] = tensor
        return name


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


def decode(value: Any, fetch: Fetch) -> Any:
    """Return what `encode` was given; all tuples are tuples, all dicts dicts.

    Args:
        value: JSON types.
        fetch: Called for each tensor.

    Raises:
        ValueError: It is nothing that `encode` makes.
    """
    if isinstance(value, list):
        return [decode(item, fetch) for item in value]
    if not isinstance(value, dict):
        return value
    mark = next(iter(value), "")
    if not mark.startswith("$"):
        return {key: decode(item, fetch) for key, item in value.items()}
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
    return {decode(key, _no_tensor): value for key, value in encoded["$dict"]}


def _no_tensor(name: str) -> torch.Tensor:
    raise ValueError(f"{name} is a tensor that is a key of a dict")


def names_in(value: Any) -> list[str]:
    """Return the names of all tensors in encoded values, in order."""
    found: list[str] = []
    decode(value, lambda name: found.append(name) or _NOTHING)  # type: ignore[func-returns-value]
    return found


def _decode_numpy(value: Any, fetch: Fetch) -> Any:
    return np.dtype(value[0]).type(decode(value[1], fetch))


def _decode_dtype(value: Any, fetch: Fetch) -> Any:
    found = getattr(torch, str(value), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no type {value!r}")
    return found


def _decode_array(value: Any, fetch: Fetch) -> Any:
    # Where the file is not read (the meta device), there is no array either.
    tensor = fetch(value)
    return tensor if tensor.is_meta else tensor.cpu().numpy()


_NOTHING = torch.empty(0)
_DECODERS: Mapping[str, Callable[[Any, Fetch], Any]] = {
    "$tensor": lambda value, fetch: fetch(value),
    "$array": _decode_array,
    "$tuple": lambda value, fetch: tuple(decode(item, fetch) for item in value),
    "$set": lambda value, fetch: {decode(item, fetch) for item in value},
    "$dict": lambda value, fetch: {decode(k, fetch): decode(v, fetch) for k, v in value},
    "$float": lambda value, fetch: float(value),
    "$complex": lambda value, fetch: complex(*(decode(part, fetch) for part in value)),
    "$bytes": lambda value, fetch: base64.b64decode(value),
    "$numpy": _decode_numpy,
    "$dtype": _decode_dtype,
    "$device": lambda value, fetch: torch.device(value),
}
