"""What all entry points share: command line in, exit code out, errors without a traceback."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from training.cli import outlive
from training.config.config import Config
from training.errors import INTERRUPTED, TrainingError
from training.imports import loading

NOTHING: Mapping[str, str] = {}
LOST = re.compile(
    r"(?:\w+ error \S+ )?Connection (?:closed|reset) by (?:remote )?peer(?: \[\S+)?"
    r"|.*ncclRemoteError.*|Broken pipe"
)
"""What gloo, NCCL and the store report on a rank whose peer has ended."""


def enter(
    configure: Callable[[Sequence[str]], Config],
    arguments: Sequence[str],
    names: Mapping[str, str] = NOTHING,
) -> int:
    """Run training as the arguments ask; return the exit code. Errors are reported once.

    names: settings that the entry point has under other names, which errors should use.
    """

    def work() -> int:
        config = configure(arguments)
        with loading():  # torch is not needed to refuse a bad request
            from training.trainer.run import run

        return run(config)

    return exit_code(work, names)


def exit_code(work: Callable[[], int], names: Mapping[str, str] = NOTHING) -> int:
    """Do an entry point's work; return its exit code, or that of its error, after reporting it.

    Nothing that is printed from here on fails (training.cli).
    """
    outlive()
    if os.environ.get("RANK", "0") == "0":
        _show_log()
    try:
        return work()
    except TrainingError as error:
        rank = os.environ.get("RANK", "0")
        if rank == "0" or error.local:
            who = f"rank {rank}: " if error.local and rank != "0" else ""
            print(f"error: {who}{renamed(str(error), names)}", file=sys.stderr, flush=True)
            _note_failure(error)
        return error.exit_code
    except KeyboardInterrupt:  # before there is anything to save
        print("interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED
    except Exception as error:
        # A rank that failed has said why; 60 lines from each of the others would bury that.
        said = LOST.search(str(error))
        if said is None or "RANK" not in os.environ:
            _note_failure(error)
            raise
        print(f"rank {os.environ['RANK']}: another rank is gone: {said[0]}", file=sys.stderr)
        return TrainingError.exit_code


def _note_failure(error: Exception) -> None:
    """Leave torchrun a note of what ended this rank, and when, for the summary of the node."""
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if place:
        said = f"{type(error).__name__}: {error}"
        code = error.exit_code if isinstance(error, TrainingError) else TrainingError.exit_code
        note = {
            "message": said.strip().splitlines()[0],
            "timestamp": int(time.time()),
            "exit_code": code,  # torchrun may end this rank before it exits
            "of_all_ranks": isinstance(error, TrainingError) and not error.local,
        }
        with contextlib.suppress(OSError):
            Path(place).write_text(json.dumps(note))


def renamed(message: str, names: Mapping[str, str]) -> str:
    """Begin each fault of a message with the name that an entry point has for the setting."""
    return re.sub(
        r"^((?:  - )?)(\w+):",
        lambda m: f"{m[1]}{names.get(m[2], m[2])}:",
        message,
        flags=re.MULTILINE,
    )


def _show_log() -> None:
    """Print what is logged on the way, such as which kernels run, among the other lines."""
    log = logging.getLogger("training")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.propagate = False  # libraries give the log above handlers of their own
    log.setLevel(logging.INFO)


def leave(code: int) -> NoReturn:
    """End the process without tearing the interpreter down.

    A gloo thread that still holds a tensor aborts the process (exit code -6) if it frees it during
    the interpreter's shutdown; seen in about one of ten runs with torch 2.13.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
