"""The command `sqshforge run` without the rest of sqshforge, for nodes to run from an image.

It takes the same arguments and gives the same exit codes. With all its imports it uses only the
standard library and Python 3.9, because the nodes of a cluster have their own Python.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from sqshforge.errors import SqshforgeError
from sqshforge.host import streams
from sqshforge.run import start
from sqshforge.run.mounts import Mount
from sqshforge.run.pairs import parse_pairs


def main(words: Sequence[str]) -> NoReturn:
    """Become a command in a sqsh; an error is printed in a few lines, never as a traceback."""
    streams.require()
    # Split off first: argparse would drop a second -- that belongs to the command.
    end = words.index("--") if "--" in words else len(words)
    given = _parser().parse_args(words[:end])
    try:
        start.run(
            given.image,
            [*given.command, *words[end + 1 :]],
            mounts=[Mount.parse(one) for one in given.mount],
            environment=parse_pairs(given.env, "--env"),
            runtime=given.runtime,
        )
    except SqshforgeError as error:
        print("\n".join(error.lines()), file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except OSError as error:
        place = f"\n  where: {error.filename}" if error.filename else ""
        print(f"error: {error.strerror or error}{place}", file=sys.stderr)
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sqshforge-run.pyz",
        description="Start a sqsh, run COMMAND (after --) in it, and exit with its code.",
        allow_abbrev=False,
    )
    parser.add_argument("image", type=Path, metavar="FILE.sqsh")
    parser.add_argument("command", nargs="*", metavar="COMMAND")
    parser.add_argument(
        "--mount", action="append", default=[], metavar="SRC:DST[:ro]", help="Bind a host path."
    )
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="Set a variable."
    )
    parser.add_argument(
        "--runtime",
        choices=start.RUNTIMES,
        default="auto",
        help="What starts it; auto: enroot if it is installed, else builtin [auto].",
    )
    return parser
