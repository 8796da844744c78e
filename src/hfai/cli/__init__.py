"""The `hfai` command.

Each subcommand lives in a module of its own that is imported only when it is run, so that
`hfai --help` answers without waiting for torch.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import click

from hfai import __version__

# name -> the help line shown in the overview; the command itself is hfai.cli.<name>.command
SUBCOMMANDS = {
    "checkpoint": "Look into checkpoints, check every byte, compare, convert and remove them.",
    "demo": "Train a small BERT or LSTM on Python's own sources and compare with plain torch.",
    "doctor": "Say which parts are ready on this machine, and how to mend what is not.",
}


class LazyGroup(click.Group):
    """A group whose subcommands are imported on use; its overview needs only `SUBCOMMANDS`.

    Usage errors, its subcommands' too, are one line. click prints a usage text above those errors
    that know their context, so they forget it here.
    """

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse the group's own arguments."""
        with _forgetting_context():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Find and run the subcommand."""
        with _forgetting_context():
            return super().invoke(ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the subcommand; for an unknown one, say which there are."""
        if args and args[0] not in SUBCOMMANDS and not args[0].startswith("-"):
            known = ", ".join(self.list_commands(ctx))
            raise click.UsageError(f"No such command {args[0]!r}: the commands are {known}.")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all subcommands, in alphabetical order."""
        return sorted(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a subcommand, or None where there is none of that name."""
        if cmd_name not in SUBCOMMANDS:
            return None
        command: click.Command = importlib.import_module(f"hfai.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the overview without importing any subcommand."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, SUBCOMMANDS[name]) for name in self.list_commands(ctx)])


@contextlib.contextmanager
def _forgetting_context() -> Iterator[None]:
    try:
        yield
    except click.UsageError as error:
        error.ctx = None
        raise


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="hfai")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Faster PyTorch training on the hardware you have, one line at a time."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
