"""Other formats: torch.save files and torch's distributed checkpoints in, safetensors out."""

from __future__ import annotations

import json
import struct
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ffrecord.whole import whole_file
from hfai.checkpoint.api import default_threads, save
from hfai.checkpoint.contents import CheckpointFiles
from hfai.checkpoint.errors import CheckpointError
from hfai.checkpoint.format import DTYPES
from hfai.checkpoint.loading import TensorInfo, tensor_infos
from hfai.checkpoint.parts import bytes_of
from hfai.checkpoint.reader import Wanted, read
from hfai.checkpoint.state import RESERVED
from hfai.checkpoint.storage import PathLike
from hfai.checkpoint.tree import need_storable

if TYPE_CHECKING:
    from ffrecord import StoreOptions

# What scripts call the parts of what they give to torch.save.
_MODEL = ("model", "model_state_dict", "state_dict")
_OPTIMIZER = ("optimizer", "optimizer_state_dict", "optim", "optimizer_states")


def import_torch(source: PathLike, target: PathLike, storage: StoreOptions | None = None) -> None:
    """Make a checkpoint of a torch.save file.

    Args:
        source: The file. It is read with `weights_only=True`: no code in it is run.
        target: The new checkpoint.
        storage: For object stores.

    Raises:
        CheckpointError: The file holds no dict, or what is no tensor or plain value.
        OSError: It cannot be read, or the checkpoint not written.
    """
    try:
        content = torch.load(source, map_location="cpu", weights_only=True, mmap=_is_zip(source))
    except OSError:
        raise
    except Exception as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{source} is no torch.save file of plain values: {line}") from error
    _save_parts(source, content, target, storage)


def import_dcp(source: PathLike, target: PathLike, storage: StoreOptions | None = None) -> None:
    """Make a checkpoint of a directory that torch.distributed.checkpoint wrote.

    Values that are no tensors are pickles there, which torch runs: import only what you trust.

    Args:
        source: The directory.
        target: The new checkpoint.
        storage: For object stores.

    Raises:
        CheckpointError: It is no such directory, or its files are damaged or missing.
    """
    from torch.distributed import checkpoint

    dcp: Any = checkpoint
    reader = dcp.FileSystemReader(source)
    try:
        metadata = reader.read_metadata()
    except Exception as error:
        raise CheckpointError(f"{source} has no .metadata that can be read: {error}") from error
    flat: dict[str, Any] = {}
    entry: Any
    for name, entry in metadata.state_dict_metadata.items():
        if hasattr(entry, "properties"):
            flat[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        else:
            flat[name] = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that one process loads
            dcp.load(flat, storage_reader=reader, no_dist=True)
    except dcp.CheckpointException as error:  # no Exception; it has tracebacks in its text
        causes = [cause for cause, _ in error.failures.values()]
        raise _unreadable(source, causes[0] if causes else error) from error
    except Exception as error:
        raise _unreadable(source, error) from error
    _save_parts(source, _nested(flat, metadata.planner_data), target, storage)


def _unreadable(source: PathLike, error: BaseException) -> CheckpointError:
    """Return what to raise when a file of a DCP directory cannot be read."""
    lines = str(error).strip().splitlines()
    line = lines[0] if lines else type(error).__name__
    if isinstance(error, FileNotFoundError) and error.filename:
        line = f"{error.filename} is missing"
    return CheckpointError(f"{source} cannot be read, a file in it is damaged or missing: {line}")


def export_safetensors(
    source: PathLike,
    target: PathLike,
    *,
    part: str = "model",
    verify: bool = True,
    storage: StoreOptions | None = None,
    progress: Callable[[int], object] = lambda count: None,
) -> int:
    """Write a checkpoint's model as one safetensors file, tensor by tensor.

    Args:
        source: The checkpoint.
        target: The new file.
        part: What the names of the wanted tensors begin with; it is left out of the file's names.
        verify: Compare hashes.
        storage: For object stores.
        progress: Called with numbers of bytes.

    Returns:
        How many tensors.

    Raises:
        CheckpointError: There are no such tensors, or the format has no word for a type.
        DamagedCheckpointError: Bytes are not those that were written.
    """
    with CheckpointFiles(source, storage, verify) as files:
        aliases = files.aliases()
        lead = part.rstrip("/") + "/"
        infos = {n: i for n, i in tensor_infos(files).items() if n.startswith(lead)}
        if not infos:
            raise CheckpointError(f"{files.path} has no tensors below {part!r}")
        # safetensors' own rule: large items first, then by name.
        order = sorted(infos, key=lambda name: (-DTYPES[infos[name].dtype][1], name))
        with whole_file(Path(target)) as work, open(work, "wb") as out:
            out.write(_header(order, infos, lead))
            for name in order:
                dtype = getattr(torch, infos[name].dtype)
                tensor = torch.empty(infos[name].shape, dtype=dtype)
                wanted = Wanted(aliases.get(name, name), (0,) * tensor.ndim, tensor)
                read(files, [wanted], default_threads(), progress=progress)
                out.write(bytes_of(tensor))
        return len(order)


def _header(order: list[str], infos: Mapping[str, TensorInfo], lead: str) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order:
        info = infos[name]
        code, item = DTYPES[info.dtype]
        if code == "U8" and info.dtype != "uint8":
            raise CheckpointError(f"{name} is {info.dtype}, which safetensors files do not have")
        length = torch.Size(info.shape).numel() * item
        try:
            need_storable(name.removeprefix(lead))
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        entries[name.removeprefix(lead)] = {
            "dtype": code,
            "shape": list(info.shape),
            "data_offsets": [at, at + length],
        }
        at += length
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _save_parts(
    source: PathLike, content: Any, target: PathLike, storage: StoreOptions | None
) -> None:
    """Write a checkpoint of a dict: the model, the optimizer, and the rest by their names."""
    if not isinstance(content, Mapping):
        kind = type(content).__name__
        raise CheckpointError(f"{source} holds a {kind}: only dicts become checkpoints")
    if content and all(isinstance(value, Tensor) for value in content.values()):
        save(target, dict(content), rng=False, storage=storage)
        return
    rest = dict(content)
    model, optimizer = _take(rest, _MODEL), _take(rest, _OPTIMIZER)
    scheduler, scaler = _take(rest, ("scheduler",)), _take(rest, ("scaler",))
    try:
        save(
            target,
            model,
            optimizer,
            scheduler,
            {_free(name, rest): value for name, value in rest.items()},
            scaler=scaler,
            rng=False,
            storage=storage,
        )
    except (TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{source} cannot be stored: {error}") from error


def _free(name: Any, taken: Collection[Any]) -> Any:
    """Return a name for a value.

    One that a checkpoint has for its own gets a "_" behind it, or more where that is taken.
    """
    if name not in RESERVED:
        return name
    while name in RESERVED or name in taken:
        name = f"{name}_"
    return name


def _take(rest: dict[str, Any], names: Sequence[str]) -> dict[str, Any] | None:
    """Remove and return the first member of these names that is a dict."""
    for name in names:
        if isinstance(rest.get(name), Mapping):
            return dict(rest.pop(name))
    return None


def _nested(flat: Mapping[str, Any], paths: Any) -> dict[str, Any]:
    """Put values where they were before DCP flattened them.

    DCP keeps the way to each as a tuple of keys, which are strings, and of numbers in lists.
    """
    root: dict[Any, Any] = {}
    for name, value in flat.items():
        way = paths.get(name, (name,)) if isinstance(paths, Mapping) else (name,)
        place = root
        for key in way[:-1]:
            place = place.setdefault(key, {})
        place[way[-1]] = value
    found: dict[str, Any] = _numbered({str(key): _lists(value) for key, value in root.items()})
    return found


def _lists(value: Any) -> Any:
    """Return dicts whose keys are the numbers 0, 1, … as lists."""
    if not isinstance(value, dict):
        return value
    inner = {key: _lists(item) for key, item in value.items()}
    if inner and all(type(key) is int for key in inner) and sorted(inner) == [*range(len(inner))]:
        return [inner[number] for number in range(len(inner))]
    return inner


def _numbered(value: Any) -> Any:
    """Return an optimizer's state dict with the numbers of parameters that torch had in it.

    DCP makes them strings, which torch's `load_state_dict` would not find.

    Raises:
        CheckpointError: It is no state dict that torch would load.
    """
    if isinstance(value, list):
        return [_numbered(item) for item in value]
    if not isinstance(value, dict):
        return value
    groups = value.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return {key: _numbered(item) for key, item in value.items()}
    keys = [key for group in groups for key in group.get("params", ())]
    if not all(type(key) is int for key in keys):
        return value  # by names, as torch's get_optimizer_state_dict gives it
    state = value.get("state", {})  # DCP leaves empty dicts out
    found = {int(key) if str(key).isdigit() else key: item for key, item in state.items()}
    if not set(found) <= set(keys):
        raise CheckpointError(
            "the optimizer's state names other parameters than its groups: save it by "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"
        )
    return {**value, "state": found}


def _is_zip(path: PathLike) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"PK"
