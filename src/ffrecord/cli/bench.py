"""`ffrecord bench`: how fast a user's own files are read here."""

from __future__ import annotations

import json as json_module

import click

from ffrecord.cli.common import debug_option, json_option, paths_argument
from ffrecord.cli.progress import Progress


@click.command()
@paths_argument
@click.option("--engine", "names", multiple=True, help="Only this one; may be given again.")
@click.option("--batch", type=click.IntRange(1, 65_536), default=256, show_default=True)
@click.option("--rounds", type=click.IntRange(1, 1000), default=3, show_default=True)
@click.option(
    "--seconds",
    type=click.FloatRange(0.01, 600),
    default=0.5,
    show_default=True,
    help="Of each engine's turn, cold and hot.",
)
@click.option("--no-check", is_flag=True, help="Do not compare checksums.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the batches.")
@json_option
@debug_option
def bench(
    paths: tuple[str, ...],
    names: tuple[str, ...],
    batch: int,
    rounds: int,
    seconds: float,
    no_check: bool,
    seed: int,
    json: bool,
) -> None:
    """Measure random batches of PATHS by every engine, cold and hot, in turn.

    Cold drops the files' pages from the page cache before each turn. The ratio is to a loop of
    pread without checksums in the same round: its median, and in brackets lowest and highest.
    """
    from ffrecord import engines
    from ffrecord.measure import measure

    known = [name for name in engines.NAMES if name != "auto"]
    for name in names:
        if name not in known:
            raise click.BadParameter(f"engine {name!r}: give one of {', '.join(known)}")
    chosen = names or [name for name in known if name in engines.probe().engines]
    turns = rounds * 2 * (len(chosen) + 1)
    with Progress("bench", turns) as progress:
        rows = measure(
            paths[0] if len(paths) == 1 else paths,
            names=chosen,
            batch=batch,
            rounds=rounds,
            seconds=seconds,
            check_data=not no_check,
            seed=seed,
            progress=progress,
        )
    summaries = [row.summary() for row in rows]
    if json:
        settings = {"batch": batch, "rounds": rounds, "seconds": seconds, "checks": not no_check}
        click.echo(json_module.dumps({**settings, "rows": summaries}))
        return
    click.echo(f"{'':<18}{'records/s':>12}{'MB/s':>10}{'CPU µs':>9}  ratio")
    for row in summaries:
        low, high = row["ratio_range"]
        stayed = row["cached_before"]
        note = f"  {stayed:.0%} stayed in the cache" if row["cache"] == "cold" and stayed else ""
        click.echo(
            f"{row['way'] + ', ' + row['cache']:<18}{row['records_per_second']:>12,.0f}"
            f"{row['bytes_per_second'] / 1e6:>10,.1f}{row['cpu_us_per_record']:>9,.1f}"
            f"  {row['ratio']:.2f} ({low:.2f} to {high:.2f}){note}"
        )
