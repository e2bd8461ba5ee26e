"""The only place from which external programs are called.

Callers take a `Programs`, so that a test can imitate a missing or failing tool; otherwise the tests
run the real programs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sqshforge.errors import MissingError, WorkError
from sqshforge.host import suggest, syscalls

TAIL = 12  # lines of a failed program's output that the error shows
PIPE = 1 << 20  # bytes of a pipe: the most for an ordinary user; Linux's default is 64 KiB


@dataclass(frozen=True)
class Result:
    """The exit code and output of a finished program."""

    argv: tuple[str, ...]
    code: int
    out: str
    err: str


class Programs:
    """Finds and runs programs on this machine."""

    def which(self, program: str) -> Path | None:
        found = shutil.which(program)
        return Path(found) if found else None

    def all(self, program: str) -> list[Path]:
        """Every program of that name on the PATH, in its order."""
        folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
        found = (shutil.which(program, path=folder) for folder in folders)
        return [Path(path) for path in dict.fromkeys(found) if path]

    def require(self, program: str, why: str = "") -> Path:
        """The program's path; raises a `MissingError` that names the package to install."""
        found = self.which(program)
        if found is None:
            raise MissingError(
                f"the program {program} is not installed" + (f" ({why})" if why else ""),
                fix=suggest.install(self.which, program),
            )
        return found

    def attempt(
        self,
        argv: Sequence[str | Path],
        *,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float | None = None,
    ) -> Result:
        """Run to the end and return the result; the caller judges the exit code."""
        words = tuple(str(word) for word in argv)
        try:
            done = subprocess.run(
                words,
                input=stdin,
                stdin=subprocess.DEVNULL if stdin is None else None,
                capture_output=True,
                env=_environment(env),
                cwd=cwd,
                timeout=timeout,
                check=False,
            )
        except FileNotFoundError as error:
            raise self._not_found(words, error) from None
        except subprocess.TimeoutExpired:
            return Result(words, 124, "", f"no answer within {timeout:.0f} s")
        return Result(
            words,
            done.returncode,
            done.stdout.decode(errors="replace"),
            done.stderr.decode(errors="replace"),
        )

    def capture(
        self,
        argv: Sequence[str | Path],
        *,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float | None = None,
    ) -> str:
        """Run to the end and return standard output; raise `WorkError` on a failure."""
        result = self.attempt(argv, stdin=stdin, env=env, cwd=cwd, timeout=timeout)
        if result.code != 0:
            raise failed(result.argv, result.code, (result.err or result.out).splitlines())
        return result.out

    def follow(
        self,
        argv: Sequence[str | Path],
        on_line: Callable[[str], None],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: IO[bytes] | None = None,
        end: signal.Signals = signal.SIGTERM,
        tells_why: Callable[[str], object] = bool,
    ) -> None:
        """Run, passing each line of output to `on_line` as it comes; raise `WorkError` on failure.

        A line that is redrawn with carriage returns is passed each time. `end` is as in `start`.
        The error has the last lines for which `tells_why` is true.
        """
        words = tuple(str(word) for word in argv)
        tail: deque[str] = deque(maxlen=TAIL)
        with self.start(
            words,
            stdin=stdin or subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=cwd,
            end=end,
        ) as process:
            assert process.stdout is not None
            for line, is_redrawn in _lines(process.stdout):
                if not is_redrawn and tells_why(line):
                    tail.append(line)
                on_line(line)
            code = process.wait()
        if code != 0:
            raise failed(words, code, list(tail))

    @contextlib.contextmanager
    def start(
        self,
        argv: Sequence[str | Path],
        *,
        stdin: IO[bytes] | int | None = None,
        stdout: IO[bytes] | int | None = None,
        stderr: IO[bytes] | int | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        end: signal.Signals = signal.SIGTERM,
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Start a program for the length of a block; it never outlives the block.

        If this process is killed, or the block ends before the program, the program gets the signal
        `end`. On SIGTERM it can clean up after itself, on SIGKILL it cannot.
        """
        words = tuple(str(word) for word in argv)
        us = os.getpid()
        try:
            process = subprocess.Popen(
                words,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=_environment(env),
                cwd=cwd,
                preexec_fn=lambda: syscalls.die_with_parent(end, us),
            )
        except FileNotFoundError as error:
            raise self._not_found(words, error) from None
        pipes = [one for one in (process.stdin, process.stdout, process.stderr) if one is not None]
        for pipe in pipes:
            # Programs at both ends then wait less often; fails if the user's pipe quota is used up.
            with contextlib.suppress(OSError):
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE)
        try:
            yield process
        finally:
            stop(process, end)
            for pipe in pipes:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _not_found(self, argv: Sequence[str], error: FileNotFoundError) -> MissingError:
        program = Path(argv[0]).name
        return MissingError(
            f"the program {program} cannot be started: {error.strerror}",
            fix=suggest.install(self.which, program),
        )


def _lines(output: IO[bytes]) -> Iterator[tuple[str, bool]]:
    """Lines as they come, each with whether the next one overwrites it (a progress bar)."""
    rest = b""
    while piece := os.read(output.fileno(), 65536):
        *whole, rest = re.split(rb"([\r\n]+)", rest + piece)
        for raw, end in zip(whole[::2], whole[1::2], strict=True):
            if raw.strip():
                yield raw.decode(errors="replace"), b"\n" not in end
    if rest.strip():
        yield rest.decode(errors="replace"), False


def stop(
    process: subprocess.Popen[bytes], end: signal.Signals = signal.SIGTERM, timeout: float = 10.0
) -> None:
    """End a program that is still running: with the signal `end`, then with SIGKILL.

    The kernel is asked whether it has ended: an interrupt in the middle of `Popen.wait` can leave
    its lock held, and then `poll` always returns None and `wait` never returns.
    """
    if _has_ended(process):
        return
    os.kill(process.pid, end)
    deadline = time.monotonic() + timeout
    while not _has_ended(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    if not _has_ended(process):
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    process.poll()


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    if process.poll() is not None:
        return True
    try:
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # it was waited for, but an interrupt came before Popen noted that
        return True
    return found is not None


def failed(argv: Sequence[str], code: int, output: Sequence[str]) -> WorkError:
    """The error for a program that failed, with the last lines of its output."""
    how = f"signal {_signal(-code)}" if code < 0 else f"exit code {code}"
    name = Path(argv[0]).name
    said = "".join(f"\n    {line}" for line in list(output)[-TAIL:] if line.strip())
    return WorkError(
        f"{name} failed with {how}{':' if said else ''}{said}",
        where=shlex.join(argv) if len(shlex.join(argv)) < 400 else shlex.join(argv)[:400] + " ...",
    )


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal between the first and the last
        return str(number)


def _environment(extra: Mapping[str, str] | None) -> dict[str, str] | None:
    return None if extra is None else {**os.environ, **extra}
