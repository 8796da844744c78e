"""`ffrecord doctor`: what works on this machine, and why something does not."""

from __future__ import annotations

import json as json_module
import os
import platform
from importlib import metadata
from typing import Any

import click

from ffrecord.cli.common import debug_option, json_option

# distribution -> what it is for; none of them is needed to read and write record files
_LIBRARIES = {
    "torch": "ffrecord.torch",
    "fsspec": "packed folders as a file system",
    "obstore": "object stores",
    "google-crc32c": "convert: TFRecord",
    "lmdb": "convert: LMDB",
    "array-record": "convert: ArrayRecord",
    "datasets": "convert: HF datasets",
}


@click.command()
@json_option
@debug_option
def doctor(json: bool) -> None:
    """Say which engines work here and which libraries are there, and why not."""
    found = examine()
    if json:
        click.echo(json_module.dumps(found))
        return
    click.echo(f"ffrecord {found['version']}, Python {found['python']}, {found['system']}")
    click.echo(f"\nengines (auto: {found['small_sets']} for sets that fit the page cache,")
    click.echo(f"         {found['large_sets']} for larger ones):")
    for name, state in found["engines"].items():
        click.echo(f"  {name:<14} {state}")
    if found["forced"]:
        click.echo(f"  FFRECORD_ENGINE={found['forced']} takes the place of auto")
    click.echo(f"\nmemory for the page cache: {found['available_memory'] / 2**30:.1f} GiB")
    click.echo("\nlibraries, each for one thing only:")
    for name, state in found["libraries"].items():
        click.echo(f"  {name:<14} {state}")


def examine() -> dict[str, Any]:
    """Return what works, by a real read with each engine.

    Raises:
        ValueError: FFRECORD_ENGINE is no engine.
        OSError: It is one that does not work here.
    """
    import ffrecord
    from ffrecord import engines

    probed = engines.probe()
    states = {
        name: "works" if name in probed.engines else probed.reasons.get(name, "does not work")
        for name in engines.NAMES
        if name != "auto"
    }
    return {
        "version": ffrecord.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "engines": states,
        "forced": os.environ.get("FFRECORD_ENGINE") or None,
        "small_sets": engines.choose("auto", 0).name,
        "large_sets": engines.choose("auto", 1 << 62).name,
        "available_memory": engines.available_memory(),
        "libraries": {name: _state_of(name, use) for name, use in _LIBRARIES.items()},
    }


def _state_of(name: str, use: str) -> str:
    try:
        return f"{metadata.version(name)} ({use})"
    except metadata.PackageNotFoundError:
        return f"not there: pip install {name} ({use})"
