"""What the ranks answered when one saw no progress: put into words, and reported."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from training.loggers.console import Console


@dataclass(frozen=True)
class Answer:
    """Where a rank is, for how long, and its stacks."""

    step: int
    number: int  # how many marks it left in that step
    place: str
    idle: float  # seconds without a new mark
    stacks: str

    def packed(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, packed: str) -> Answer:
        return cls(**json.loads(packed))

    @property
    def where(self) -> str:
        return f"step {self.step}, {self.place}"


@dataclass(frozen=True)
class Silence:
    """A rank that did not answer: what can be seen of its process from outside."""

    text: str
    stacks: str


def find_verdict(answers: Mapping[int, Answer], silent: Mapping[int, Silence]) -> str:
    """Name the ranks that hang: those that do not answer, else those that are behind."""
    if silent:
        return f"{_hang(silent)}, without an answer"
    first = min((answer.step, answer.number) for answer in answers.values())
    behind = [rank for rank, answer in answers.items() if (answer.step, answer.number) == first]
    where = answers[behind[0]].where
    if len(behind) < len(answers):
        return f"{_hang(behind)} in {where}"
    if len(answers) == 1:
        return f"the run hangs in {where}"
    return f"all ranks wait in {where}, none is behind: look at the network and the devices"


def format_hang(answers: Mapping[int, Answer], silent: Mapping[int, Silence]) -> str:
    """Say who hangs, where every rank is, and the stacks of all; equal ones are shown once."""
    idle = max(answer.idle for answer in answers.values())
    lines = [f"hang: {find_verdict(answers, silent)}; no progress for {idle:.0f} s"]
    lines += [f"  {_ranks([rank])}: {silence.text}" for rank, silence in sorted(silent.items())]
    for where, ranks in _grouped({rank: answer.where for rank, answer in answers.items()}):
        shortest = min(answers[rank].idle for rank in ranks)
        lines.append(f"  {_ranks(ranks)}: in {where}, for {shortest:.0f} s")
    stacks = {rank: answer.stacks for rank, answer in answers.items()}
    stacks |= {
        rank: silence.stacks or "  none: it does not answer" for rank, silence in silent.items()
    }
    for text, ranks in _grouped(stacks):
        lines += [f"stacks of {_ranks(ranks)}:", text]
    return "\n".join(lines)


def _grouped(texts: Mapping[int, str]) -> list[tuple[str, list[int]]]:
    """Group the ranks by their text; the smallest groups, the odd ones, come first."""
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        groups.setdefault(text, []).append(rank)
    return sorted(groups.items(), key=lambda group: (len(group[1]), group[1]))


def _hang(ranks: Collection[int]) -> str:
    return f"{_ranks(ranks)} {'hangs' if len(ranks) == 1 else 'hang'}"


def _ranks(ranks: Collection[int]) -> str:
    """Format ranks as ranges: rank 3; ranks 0-2, 4-1023."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    several = len(runs) > 1 or len(runs[0]) > 1
    return f"rank{'s' if several else ''} " + ", ".join("-".join(map(str, run)) for run in runs)


class HangReporter:
    """Reports a hang on standard error and in SAVE/hang.txt, and then its end."""

    def __init__(self, folder: Path, console: Console) -> None:
        self.file = folder / "hang.txt"
        self._console = console
        self._since: float | None = None

    def hang(self, text: str) -> None:
        self._write(text)
        self._since = time.monotonic()

    def progress(self) -> None:
        """Note progress: report the end of a hang, if this rank has reported the hang."""
        if self._since is not None:
            seconds = time.monotonic() - self._since
            self._since = None
            self._write(
                f"hang: it has ended {seconds:.0f} s after it was reported; the run goes on"
            )

    def error(self, text: str) -> None:
        self._console.say(f"error: {text}", sys.stderr)

    @property
    def open(self) -> bool:
        """Whether this rank reported a hang that has not ended."""
        return self._since is not None

    def _write(self, text: str) -> None:
        self._console.say(text, sys.stderr)
        with suppress(OSError), self.file.open("a") as file:
            file.write(f"{datetime.now().astimezone().isoformat(timespec='seconds')}\n{text}\n\n")
