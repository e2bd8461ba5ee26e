"""Nsight Systems around chosen ranks (NSYS=1): which, for how long, and where its reports go."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from training.errors import RequestError
from training.job.types import Decision

PLACES = ("usr/local/cuda/bin", "opt/nvidia/nsight-systems*/bin", "opt/nvidia/nsight-systems/*/bin")
OUTPUT = "report_job{run}_rank%q{{RANK}}_on_%h.nsys-rep"
"""nsys itself fills in the rank and the host name."""


@dataclass(frozen=True, kw_only=True)
class Nsys:
    """A request to profile ranks."""

    program: str
    ranks: str  # "all", or numbers separated by commas
    delay: int  # seconds from a process's start to the first record
    duration: int  # seconds that are recorded
    output: str  # path, with nsys's own %q{NAME}, %h, %p

    @property
    def words(self) -> tuple[str, ...]:
        """The command that is put before a process's own.

        With `--kill none` the process goes on after the last record; nsys would otherwise end it.
        """
        return (
            *(self.program, "profile", "--sample", "none", "--kill", "none"),
            *("--delay", str(self.delay), "--duration", str(self.duration)),
            *("--force-overwrite", "true", "--output", self.output),
        )

    @property
    def folder(self) -> Path | None:
        """The folder of the reports; None if its name has placeholders that only nsys fills in."""
        folder = Path(self.output).parent
        return None if "%" in str(folder) else folder

    def decisions(self) -> list[Decision]:
        """Describe what is profiled."""
        which = "all ranks" if self.ranks == "all" else f"ranks {self.ranks}"
        span = f"for {self.duration} s after {self.delay} s"
        return [Decision("nsys", self.output, f"{which}, {span}, by {self.program}")]


def read(root: Path, environment: Mapping[str, str], run: str) -> Nsys | None:
    """Read NSYS and its companions; return None if nothing is to be profiled.

    root: where nsys is looked for if not on the PATH; run: the name of this start of the job.
    Raises RequestError if a value is invalid or there is no nsys.
    """
    if not _switch(environment):
        return None
    ranks = environment.get("NSYS_RANKS") or "0"
    if ranks != "all" and not re.fullmatch(r"\d+(,\d+)*", ranks):
        raise RequestError(f"NSYS_RANKS: must be `all` or numbers such as 0,8, not {ranks!r}")
    folder = Path(environment.get("CHECKPOINTS") or ".").absolute() / "nsys"
    return Nsys(
        program=_program(root, environment),
        ranks=ranks,
        delay=_seconds(environment, "NSYS_DELAY", 30),
        duration=_seconds(environment, "NSYS_DURATION", 1200),
        output=environment.get("NSYS_OUTPUT") or str(folder / OUTPUT.format(run=run)),
    )


def _switch(environment: Mapping[str, str]) -> bool:
    text = environment.get("NSYS") or "0"
    if text not in ("0", "1"):
        raise RequestError(f"NSYS: must be 0 or 1, not {text!r}")
    return text == "1"


def _seconds(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdecimal():
        raise RequestError(f"{name}: must be whole seconds, not {text!r}")
    return int(text)


def _program(root: Path, environment: Mapping[str, str]) -> str:
    named = environment.get("NSYS_PATH")
    if named:
        if not os.access(named, os.X_OK) or Path(named).is_dir():
            raise RequestError(f"NSYS_PATH: {named} is not an executable program", local=True)
        return named
    found = shutil.which("nsys", path=environment.get("PATH", ""))
    for program in [found] if found else _installed(root):
        return program
    raise RequestError(
        "NSYS=1: there is no nsys on the PATH, nor in /usr/local/cuda/bin and "
        "/opt/nvidia/nsight-systems*; fix: install Nsight Systems in the image, or mount the "
        "host's (MOUNTS) and name it (NSYS_PATH=/.../nsys)",
        local=True,
    )


def _installed(root: Path) -> Iterator[str]:
    """Find nsys where its installers put it, the newest release first."""
    for place in PLACES:
        for file in sorted(root.glob(f"{place}/nsys"), reverse=True):
            if os.access(file, os.X_OK):
                yield str(file)
