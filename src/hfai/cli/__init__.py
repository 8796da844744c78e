"""The `hfai` command.

Each subcommand lives in a module of its own that is imported only when it is run, so that
`hfai --help` answers without waiting for torch.
"""

from __future__ import annotations

import importlib

import click

from hfai import __version__

# name -> the help line shown in the overview; the command itself is hfai.cli.<name>.command
SUBCOMMANDS = {
    "demo": "Train a small BERT on Python's own sources and compare with plain torch.",
    "doctor": "Say which parts are ready on this machine, and how to mend what is not.",
}


class LazyGroup(click.Group):
    """A group whose subcommands are imported on use; its overview needs only `SUBCOMMANDS`."""

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


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hfai")
def main() -> None:
    """Faster PyTorch training on the hardware you have, one line at a time."""
