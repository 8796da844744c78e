"""`hfai checkpoint`: list, show, verify, diff, convert, prune.

`list`, `show`, `verify` and `prune` need no torch.
"""

from __future__ import annotations

import json as json_module
import os
import sys
from typing import Any

import click

from hfai.cli.checkpoint_common import (
    Group,
    advance,
    debug_option,
    exists,
    json_option,
    printable,
    progress_of,
    size_text,
    summary,
)

EXIT_CODES = """\b
Exit codes:
  0    done; nothing is damaged; no difference
  1    a checkpoint is damaged, missing or cannot be written
  2    wrong arguments
  3    diff found differences
  130  stopped by Ctrl-C; nothing half-written is left
"""
DIFFERENT = 3


@click.group(cls=Group, epilog=EXIT_CODES)
@debug_option
def command() -> None:
    """Look into checkpoints and keep them in order.

    PATH is a checkpoint; DIRECTORY has checkpoints in it. Both may be URLs (s3://bucket/…).
    """


@command.command("list")
@click.argument("directory")
@json_option
@debug_option
def list_command(directory: str, json: bool) -> None:
    """Print the checkpoints in DIRECTORY, one a line; what was never finished is left out.

    Exits with 1 if one lacks a file or has one of another size; bytes are for `verify`.
    """
    from hfai.checkpoint.errors import CheckpointError
    from hfai.checkpoint.storage import locate

    place = locate(directory)
    rows, damaged = [], 0
    names = [""] if place.is_committed() else place.children()
    if not names and not exists(place):
        raise FileNotFoundError(f"no such directory: {place.path}")
    for name in names:
        location = place.child(name) if name else place
        try:
            row = {"name": name or os.path.basename(place.path), **summary(location)}
            damaged += bool(row["lacking"])
            rows.append(row)
        except (CheckpointError, FileNotFoundError) as error:  # perhaps removed meanwhile
            damaged += 1
            rows.append({"name": name, "path": location.path, "error": str(error)})
    if json:
        click.echo(json_module.dumps({"checkpoints": rows, "damaged": damaged}))
    elif not rows:
        click.echo(f"no checkpoints in {place.path}", err=True)
    else:
        width = max(len(printable(row["name"])) for row in rows)
        for row in rows:
            name = printable(row["name"])
            if "error" in row:
                click.echo(f"{name:<{width}}  {printable(row['error'])}")
                continue
            step = "" if row["step"] is None else f"step {row['step']}"
            click.echo(
                f"{name:<{width}}  {row['created']}  {size_text(row['bytes']):>10}  "
                f"{row['ranks']} rank{'s' if row['ranks'] > 1 else ''}  {step}".rstrip()
                + (f"  damaged: {', '.join(row['lacking'])}" if row["lacking"] else "")
            )
    if damaged:
        sys.exit(1)


@command.command()
@click.argument("path")
@click.option("--tensors/--no-tensors", default=True, help="Print each tensor.")
@json_option
@debug_option
def show(path: str, tensors: bool, json: bool) -> None:
    """Print what the checkpoint PATH holds: its record, and each tensor's name, type and shape."""
    from hfai.checkpoint.contents import CheckpointFiles
    from hfai.checkpoint.storage import locate

    location = locate(path)
    result = summary(location)
    with CheckpointFiles(location) as files:
        places, aliases = files.slices(), files.aliases()
        result["tensors"] = {
            name: {
                "dtype": pieces[0][1].dtype,
                "shape": list(pieces[0][1].shape),
                "bytes": sum(piece.length for _, piece in pieces),
                "slices": len(pieces),
            }
            for name, pieces in sorted(places.items())
        }
        result["aliases"] = aliases
        result["values"] = sorted(files.state()["values"]["others"])
    if json:
        click.echo(json_module.dumps(result))
        return
    rows = result.pop("tensors")
    for key in ("path", "step", "epoch", "created", "ranks", "files"):
        if result[key] is not None:
            click.echo(f"{key:<8} {printable(str(result[key]))}")
    click.echo(f"{'size':<8} {size_text(result['bytes'])}, {len(rows)} tensors")
    click.echo(f"{'others':<8} {', '.join(map(printable, result['values'])) or 'none'}")
    if tensors:
        width = max(len(printable(name)) for name in [*rows, *aliases, ""])
        for name, row in rows.items():
            shape = "×".join(map(str, row["shape"])) or "a number"
            click.echo(f"{printable(name):<{width}}  {row['dtype']:<14} {shape}")
        for name, target in sorted(aliases.items()):
            click.echo(f"{printable(name):<{width}}  the same tensor as {printable(target)}")


@command.command()
@click.argument("path")
@click.option("--threads", type=click.IntRange(1, 256), default=2, show_default=True)
@json_option
@debug_option
def verify(path: str, threads: int, json: bool) -> None:
    """Compare every byte of PATH with its hash; of a directory, of all checkpoints in it.

    Exits with 1 if anything is damaged, or a checkpoint in the directory has lost its COMMIT file.
    """
    from hfai.checkpoint.contents import CheckpointFiles
    from hfai.checkpoint.errors import DamagedCheckpointError, NoCheckpointError
    from hfai.checkpoint.storage import locate
    from hfai.checkpoint.verify import Damage, total_bytes, unknown_files
    from hfai.checkpoint.verify import verify as verify_files

    place = locate(path)
    children = [] if place.is_committed() else place.children()
    results: list[dict[str, Any]] = []
    headless = [] if place.is_committed() else place.unfinished()
    for name in headless:
        lost = f"{place.child(name).path}/COMMIT"
        damage = Damage(lost, "", -1, f"{lost} is missing: without it there is no checkpoint")
        results.append(
            {
                "path": place.child(name).path,
                "bytes": 0,
                "damaged": [damage._asdict()],
                "unknown_files": [],
            }
        )
    places = [place.child(name) for name in children]
    for location in places or ([] if headless else [place]):
        found, total, unknown = [], 0, []
        try:
            with CheckpointFiles(location) as files:
                try:
                    total = total_bytes(files)
                except DamagedCheckpointError:
                    total = 0  # reported below, with all else that is damaged
                with progress_of("verify", total or None) as progress:
                    found = verify_files(files, threads, advance(progress))
                unknown = unknown_files(files)
        except NoCheckpointError:
            raise
        except DamagedCheckpointError as error:
            found = [Damage(error.path, "", -1, str(error))]
        results.append(
            {
                "path": location.path,
                "bytes": total,
                "damaged": [damage._asdict() for damage in found],
                "unknown_files": unknown,
            }
        )
    bad = sum(len(result["damaged"]) for result in results)
    if json:
        click.echo(json_module.dumps({"checkpoints": results, "damaged": bad}))
    for result in results if not json else ():
        damaged = result["damaged"]
        for damage in damaged:
            click.echo(printable(damage["message"]), err=True)
        for name in result["unknown_files"]:
            click.echo(
                f"{result['path']}/{name} belongs to no checkpoint; nothing reads it", err=True
            )
        state = f"{len(damaged)} damaged" if damaged else "every byte is as written"
        click.echo(f"{result['path']}: {size_text(result['bytes'])}, {state}")
    if bad:
        sys.exit(1)


@command.command()
@click.argument("first")
@click.argument("second")
@json_option
@debug_option
def diff(first: str, second: str, json: bool) -> None:
    """Compare two checkpoints bit for bit; exits with 3 if they differ, with 1 if one is damaged.

    Every byte of both is verified first. Besides tensors, step, epoch and all other values count.
    """
    from hfai.checkpoint.compare import compare

    with progress_of("diff", None) as progress:
        found = compare(first, second, advance(progress))
    if json:
        click.echo(json_module.dumps(found._asdict()))
    else:
        signs = (("-", found.removed), ("+", found.added), ("≠", found.changed + found.values))
        for sign, names in signs:
            for name in names:
                click.echo(f"{sign} {printable(name)}")
        click.echo(
            f"{found.same} tensors are the same, {len(found.changed)} differ, "
            f"{len(found.removed)} only in {first}, {len(found.added)} only in {second}; "
            f"{len(found.values)} other values differ"
        )
    if found.added or found.removed or found.changed or found.values:
        sys.exit(DIFFERENT)


@command.command()
@click.argument("source")
@click.argument("target")
@click.option("--part", default="model", show_default=True, help="To safetensors: which tensors.")
@json_option
@debug_option
def convert(source: str, target: str, part: str, json: bool) -> None:
    """Convert SOURCE into the new TARGET.

    A torch.save file, or a directory of torch.distributed.checkpoint (whose pickles torch runs:
    only those you trust), becomes a checkpoint; a checkpoint's model becomes a .safetensors file.
    """
    from hfai.checkpoint import convert as convert_module
    from hfai.checkpoint.storage import locate

    local = "://" not in target
    if (local and os.path.lexists(target)) or (not local and locate(target).is_committed()):
        raise click.UsageError(f"{target} exists: remove it, or give another name")
    if target.endswith(".safetensors"):
        with progress_of("convert", None) as progress:
            count = convert_module.export_safetensors(
                source, target, part=part, progress=advance(progress)
            )
        result = {"kind": "safetensors", "tensors": count}
    elif os.path.isdir(source):
        convert_module.import_dcp(source, target)
        result = {"kind": "checkpoint", "tensors": _count(target)}
    elif os.path.isfile(source):
        convert_module.import_torch(source, target)
        result = {"kind": "checkpoint", "tensors": _count(target)}
    else:
        raise FileNotFoundError(f"no such file or directory: {source}")
    if json:
        click.echo(json_module.dumps({"target": target, **result}))
    else:
        click.echo(f"{target}: {result['kind']} of {result['tensors']} tensors")


def _count(path: str) -> int:
    from hfai.checkpoint.contents import CheckpointFiles

    with CheckpointFiles(path) as files:
        return len(files.slices())


@command.command()
@click.argument("directory")
@click.option("--keep", type=click.IntRange(1), required=True, help="How many of the newest stay.")
@click.option("--keep-every", type=click.IntRange(1), help="Steps that this divides stay too.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@json_option
@debug_option
def prune(directory: str, keep: int, keep_every: int | None, dry_run: bool, json: bool) -> None:
    """Remove older checkpoints of a CheckpointManager's DIRECTORY, and what dead writers left."""
    from hfai.checkpoint.retention import to_remove
    from hfai.checkpoint.storage import locate

    place = locate(directory)
    if place.is_committed():
        raise click.UsageError(f"{directory} is a checkpoint: give the directory that it is in")
    if not exists(place):
        raise FileNotFoundError(f"no such directory: {place.path}")
    removed = to_remove(place.children(), keep, keep_every)
    swept: list[str] = []
    if not dry_run:
        for name in removed:
            place.child(name).remove()
        swept = place.sweep()
    if json:
        click.echo(json_module.dumps({"removed": removed, "swept": swept, "dry_run": dry_run}))
        return
    for name in removed:
        click.echo(f"{'would remove' if dry_run else 'removed'} {name}")
    for name in swept:
        click.echo(f"removed {name}, which was never finished")
    if not removed and not swept:
        click.echo("nothing to remove")
