"""The `tokenspeed` command: a table of subcommands, and how errors reach the user. Imports no torch."""

from __future__ import annotations

import errno
import os

import click

from tokenspeed import __version__
from tokenspeed.cli.commands import COMMANDS
from tokenspeed.cli.lazy import PluginGroup
from tokenspeed.errors import ConfigError, StartRefused, TokenspeedError

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


class _Root(PluginGroup):
    """Turns the exceptions that tokenspeed raises on purpose into messages and exit statuses."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except StartRefused as refusal:
            count = len(refusal.problems)
            click.echo(f"tokenspeed: the start is refused ({count} problem{'s' if count > 1 else ''})\n", err=True)
            click.echo(str(refusal), err=True)
            ctx.exit(StartRefused.exit_status)
        except ConfigError as error:
            for line in str(error).splitlines():
                click.echo(f"tokenspeed: {line}", err=True)
            ctx.exit(2)
        except TokenspeedError as error:
            click.echo(f"tokenspeed: {error}", err=True)
            ctx.exit(1)
        except OSError as error:
            if error.errno not in _DISK_ERRORS:
                raise
            # What standard output still holds would be written, and fail, once more at the end of the process.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            place = f"{error.filename}: " if error.filename else "the output cannot be written: "
            click.echo(f"tokenspeed: {place}{error.strerror}", err=True)
            ctx.exit(1)


@click.group(cls=_Root, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tokenspeed", message="%(prog)s %(version)s")
def cli() -> None:
    """An LLM inference engine whose rollouts are bitwise reproducible.

    `tokenspeed COMMAND --help` says more about a command.
    """


def main() -> None:
    """Entry point of the console script."""
    cli(prog_name="tokenspeed")
