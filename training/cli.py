"""What programs share: command lines, output whose failure ends no run, helpers that end with it.

A log line is worth less than a day of training, so nothing that is printed, here or by a library,
ends the run: the first line that is lost is reported on the other one of standard output and error,
and once there is room again a line says how many are missing. No torch needed here.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import re
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from training.errors import INTERRUPTED, RequestError, TrainingError

WIDEST = 100
"""Maximum columns of help, if a terminal has more."""


def with_home(text: str) -> str:
    """Replace the ~ at the start of a path with the home folder, also after a kind (packed:~/x).

    A shell does so only at the start of a word: it leaves --name=~/x as it is. Raises ValueError,
    saying what the path must be, if there is no such home folder, or if it contains a variable such
    as $HOME, which a shell would have replaced.
    """
    if kind := re.match(r"([\w/-]+:)?(?=~)", text):
        try:
            text = kind[0] + str(Path(text[kind.end() :]).expanduser())
        except RuntimeError:
            raise ValueError("a path, with ./ before a ~ that is not a home folder") from None
    _refuse_variables(text)
    return text


def _refuse_variables(text: str) -> None:
    """Raise ValueError for $NAME or ${NAME} in a path, unless a file or folder has that name."""
    path = re.sub(r"^[\w/-]+:(?!//)", "", text)
    if "://" in path:
        return
    for found in re.finditer(r"(\$(?:\w+|\{\w+\}))[^/,]*", path):
        place = path[: found.end()]
        places = (place, place.rpartition(",")[2])
        if not any(os.path.exists(one) for one in places):  # noqa: PTH110 - it never raises
            raise ValueError(
                f"a path without {found[1]} (variables are not expanded here: write the value)"
            )


def duration(seconds: float) -> str:
    """Format a time as 12 s, 3 min 5 s, 2 h 4 min or 3 d 4 h."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60} s"
    if total < 48 * 3600:
        return f"{total // 3600} h {total % 3600 // 60} min"
    return f"{total // 86400} d {total % 86400 // 3600} h"


class HelpFormatter(argparse.HelpFormatter):
    """Help that reads well: a flag's type once, paragraphs as wide as the terminal.

    Indented lines of a description stay as they are.
    """

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, WIDEST)
        super().__init__(prog, max_help_position=26, width=width - 2)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = re.split(r"\n\s*\n", text.strip("\n"))
        return "\n\n".join(
            part if part.startswith(" ") else "\n".join(self._split_lines(part, width))
            for part in parts
        )

    def _split_lines(self, text: str, width: int) -> list[str]:
        # Do not break the names of models and files.
        return textwrap.wrap(
            " ".join(text.split()), width, break_long_words=False, break_on_hyphens=False
        )

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        if action.nargs == "+":  # once is enough
            value = value.partition(" ")[0]
        shown = f"{', '.join(action.option_strings)} {value}"
        return shown if len(shown) < self._width else shown.replace(", --", ",\n  --")


class Parser(argparse.ArgumentParser):
    """A parser that raises faults as RequestError; long flags cannot be abbreviated."""

    def __init__(self, program: str, about: str, **others: Any) -> None:
        super().__init__(
            prog=program,
            description=about,
            allow_abbrev=False,
            formatter_class=HelpFormatter,
            **others,
        )
        self.register("type", Path, _path)

    def error(self, message: str) -> NoReturn:
        raise RequestError(message)


def _path(text: str) -> Path:
    try:
        return Path(with_home(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be {error}, not {text!r}") from error


def run_command(
    work: Callable[[Sequence[str]], None],
    arguments: Sequence[str],
    interrupted: str = "interrupted",
) -> int:
    """Do the work that the arguments ask for; return the exit code. Errors are reported once.

    They include those of standard output: unlike a run's, a command's lines are what was asked for.
    interrupted: the message after Ctrl-C.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout is sys.__stdout__:
        sys.stdout = _text(Whole(sys.stdout.fileno(), "standard output", -1), sys.stdout)
    try:
        try:
            work(arguments)
        finally:  # also after --help, which leaves by SystemExit
            if sys.stdout is not None:
                sys.stdout.flush()
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr, flush=True)
        return INTERRUPTED
    return 0


class Lasting(io.RawIOBase):
    """Writes to a file that may be full, closed at the other end or broken, and never fails."""

    def __init__(self, file: int, name: str, other: int) -> None:
        self._file, self._name, self._other = file, name, other
        self._why = ""  # why the last line could not be written
        self._missing = 0  # lines since then
        self._torn = False  # the last one was cut off in the middle
        self._warned = False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file

    def isatty(self) -> bool:
        return os.isatty(self._file)

    def write(self, data: Any) -> int:
        """Write all of it or drop the rest; return its size in bytes."""
        text = bytes(data)
        try:
            if self._why:
                self._put(f"WARNING: {self._missing} lines are missing here: {self._why}\n")
                self._why, self._missing = "", 0
            self._put(text)
        except OSError as error:
            self._why = error.strerror or type(error).__name__
            self._missing += text.count(b"\n")
            self._warn()
        return len(text)

    def _put(self, text: str | bytes) -> None:
        left = memoryview(text if isinstance(text, bytes) else text.encode())
        if self._torn:
            os.write(self._file, b"\n")
            self._torn = False
        while left:
            left = left[os.write(self._file, left) :]
            self._torn = bool(left)

    def _warn(self) -> None:
        """Report the first fault on the other file directly: its own layers may be what failed."""
        if self._warned:
            return
        self._warned = True
        with suppress(OSError):
            warning = f"WARNING: {self._name} cannot be written: {self._why}; lines are dropped"
            os.write(self._other, f"{warning}, the run goes on\n".encode())


class OutputError(TrainingError):
    """Standard output cannot be written; `unread`: its reader, like `| head`, has seen enough."""

    def __init__(self, why: str, unread: bool = False) -> None:
        super().__init__(f"standard output {why}")
        self.unread = unread


class Whole(Lasting):
    """Writes to a file of which nothing may be lost.

    The first write that fails raises OutputError; later ones, as when Python ends, are dropped.
    """

    def write(self, data: Any) -> int:
        """Write all of it; return its size in bytes. Raises OutputError."""
        text = bytes(data)
        try:
            if not self._why:
                self._put(text)
        except OSError as error:
            self._why = error.strerror or type(error).__name__
            unread = isinstance(error, BrokenPipeError)
            raise OutputError(f"cannot be written: {self._why}", unread) from error
        return len(text)


def outlive() -> None:
    """Make this process's standard output and error Lasting, unless something replaced them.

    A test does that, or a notebook.
    """
    now: list[Any] = [sys.stdout, sys.stderr]
    if None in now or now != [sys.__stdout__, sys.__stderr__]:
        return
    out, err = now[0].fileno(), now[1].fileno()
    sys.stdout = _text(Lasting(out, "standard output", err), now[0])
    sys.stderr = _text(Lasting(err, "standard error", out), now[1])


def _text(raw: Lasting, like: Any) -> io.TextIOWrapper:
    """Wrap `raw` as a stream of text, encoded and flushed as `like` is.

    Characters that the encoding lacks are escaped: the name of a folder must not end a run.
    """
    below: Any = raw if like.write_through else io.BufferedWriter(raw)  # as with python -u
    return io.TextIOWrapper(
        below,
        encoding=like.encoding,
        errors="backslashreplace" if like.errors == "strict" else like.errors,
        line_buffering=like.line_buffering,
        write_through=like.write_through,
    )


def leave_with_parent() -> None:
    """End this process as soon as the one that started it is gone, even after kill -9."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def leave() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=leave, daemon=True).start()
