"""The entry point of the command line: all commands, their errors and exit codes."""

from __future__ import annotations

import errno
import gc
import io
import signal
import sys
from types import FrameType
from typing import NoReturn

import click

from sqshforge import __version__
from sqshforge.cli import inspect, squash, start, status, targets, trace
from sqshforge.cli.group import Commands
from sqshforge.errors import MissingError, SqshforgeError, shown

# Commands import what they use only when they are called, so that `sqshforge run`, which stands
# between Slurm and a training process, starts fast.
COMMANDS = (
    *targets.COMMANDS,
    *squash.COMMANDS,
    *trace.COMMANDS,
    *inspect.COMMANDS,
    *start.COMMANDS,
    *status.COMMANDS,
)

FULL = (errno.ENOSPC, errno.EDQUOT)
ENDING = (signal.SIGTERM, signal.SIGHUP)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """From recipe to running job: training images as enroot squash files.

    Exit codes: 0 done, 1 the work failed, 2 the request was wrong, 3 something is missing.
    """


for command in COMMANDS:
    cli.add_command(command)


def main() -> NoReturn:
    """Run the command line: domain errors become a few lines and an exit code, not a traceback."""
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _terminated)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # whatever the terminal's encoding
    try:
        code = cli.main(standalone_mode=False)
    except SqshforgeError as error:
        click.echo("\n".join(error.lines()), err=True)
        code = error.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        code = 128 + signal.SIGINT
    except OSError as error:
        # Failures that a command expects are domain errors; this is the disk or the system itself.
        theirs = _denied(error)
        if theirs is not None:
            click.echo("\n".join(theirs.lines()), err=True)
            sys.exit(theirs.exit_code)
        name = error.filename if isinstance(error.filename, bytes) else str(error.filename)
        place = f"\n  where: {shown(name)}" if error.filename else ""
        click.echo(f"error: {error.strerror or error}{place}", err=True)
        code = MissingError.exit_code if error.errno in FULL else 1
    # At its end, the interpreter would search all modules for reference cycles: a seventh of the
    # time that a short command takes.
    gc.freeze()
    sys.exit(code)


def _denied(error: OSError) -> SqshforgeError | None:
    """Return the error to show if another user's files in the checkout are in the way, if any."""
    from sqshforge import project

    try:
        return project.find().denied(error)
    except SqshforgeError:
        return None  # there is no checkout


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    """Exit through every `finally`, so that nothing partial stays behind.

    Further signals are ignored, as they would cut that short: a terminal that closes sends SIGHUP,
    and its shell may send another.
    """
    for one in ENDING:
        if signal.getsignal(one) == _terminated:
            signal.signal(one, lambda number, frame: None)
    sys.exit(128 + number)
