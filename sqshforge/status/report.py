"""Show the status of runs as text: a page for one run, a table row for each of several."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from sqshforge.errors import shown
from sqshforge.host import suggest
from sqshforge.host.terminal import fitted, human, is_plain, output
from sqshforge.status.jobs import Failure, Job, Start
from sqshforge.status.run import State, Status

if TYPE_CHECKING:
    from rich.table import Table


STARTS = 5  # how many of the last starts are shown
FAILURES = 5
HOSTS = 8  # most names of nodes or jobs to show
# Table columns that are dropped on a narrow terminal, in this order.
LEAST = ("checkpoint", "tokens/s", "last line", "job", "of", "loss", "left")

Look = Callable[[], Sequence[Status]]


def lines(status: Status, job: str = "") -> list[str]:
    """Return a run's page; `job` is the job that was asked for."""
    page, last = [str(status.folder)], ""
    for name, value in _rows(status, job):
        page.append(f"  {name if name != last else '':11}  {value}")
        last = name
    return [*page, "", f"next: {_next(status)}"]


def table(found: Sequence[Status]) -> Table:
    """Return a table of runs, the most recently written first."""
    from rich.table import Table

    drawn = Table(box=None, pad_edge=False)
    drawn.add_column("run", overflow="fold")
    for title in ("state", "job"):
        drawn.add_column(title, no_wrap=True)
    for title in ("step", "of", "loss", "tokens/s", "left", "last line", "checkpoint"):
        drawn.add_column(title, justify="right", no_wrap=True)
    for status in sorted(found, key=lambda one: one.facts.quiet):
        drawn.add_row(*row(status))
    return drawn


def row(status: Status) -> tuple[str, ...]:
    """Return a run's cells; unknown values are empty."""
    facts, far = status.facts, status.facts.progress
    newest, last = facts.checkpoints.newest, facts.settings.num_steps
    return (
        str(status.folder),
        status.state.value,
        status.jobs[0].id if status.jobs else "",
        f"{far.step:,}",
        "" if last is None else f"{last:,}",
        "" if far.loss is None else f"{far.loss:.4f}",
        "" if far.tokens_per_second is None else f"{far.tokens_per_second:,.0f}",
        "" if status.left is None else span(status.left),
        "" if status.reported is None else span(status.reported),
        "" if newest is None else f"{newest.step:,}",
    )


def span(seconds: float) -> str:
    """Format a duration of any length: 4 s, 3 min 20 s, 5 h 07 min, 3 d 04 h."""
    whole = round(seconds)
    for limit, unit, small, smaller in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= limit:
            return f"{whole // limit} {unit} {whole % limit // small:02d} {smaller}"
    return f"{whole} s"


def _rows(status: Status, job: str) -> Iterator[tuple[str, str]]:
    facts = status.facts
    yield "state", f"{status.state.value}: {status.why}"
    if facts.times:
        yield "", f"{span(facts.quiet)} since a file was written, by {status.clock.whose}"
    if facts.settings.model:
        yield "model", facts.settings.model
    for name in status.closed:
        yield "closed", f"{name} cannot be read: it is another user's"
    yield from _jobs(status.jobs, job)
    yield from _progress(status)
    yield from _checkpoints(status)
    for one in facts.progress.evaluations:
        on = f" on {one.label}" if one.label else ""
        perplexity = "" if one.perplexity is None else f", perplexity {one.perplexity:.2f}"
        loss = "-" if one.loss is None else f"{one.loss:.4f}"
        yield "evaluation", f"step {one.step:,}{on}: loss {loss}{perplexity}"
    if facts.hang:
        over = "; over, the run has gone on" if facts.hang.over else ""
        yield "hang", f"{facts.hang.when}: {facts.hang.what}{over}"
        yield "", f"{status.folder}/hang.txt has the stacks"


def _jobs(jobs: Sequence[Job], asked: str) -> Iterator[tuple[str, str]]:
    """Yield rows for the last job and its starts, and for an earlier job that was asked for."""
    if not jobs:
        yield "job", "none is noted: it was not started by training.launch"
        return
    job, start = jobs[0], jobs[0].last
    nodes = f"{_count(start.nodes or 0, 'node')} of {_count(start.processes or 0, 'process')}"
    if start.spares:
        nodes += f" and {_count(start.spares, 'spare')}"
    more = f" and {len(start.hosts) - HOSTS} more" if len(start.hosts) > HOSTS else ""
    yield (
        "job",
        f"{job.id}, restart {start.restart}, {nodes}: {' '.join(start.hosts[:HOSTS])}{more}",
    )
    begun = "" if start.time is None else f", since {_clock(start.time)}"
    yield "", f"{start.module}{begun}"
    if start.image:
        yield "image", ", ".join(start.image.values())
    if len(job.starts) > STARTS:
        yield "starts", f"{len(job.starts)}, of which the last {STARTS} are shown"
    for one in job.starts[-STARTS:]:
        yield "starts", _start(one, one is start)
    failures = job.failures
    if len(failures) > FAILURES:
        yield "failures", f"{len(failures)}, of which the last {FAILURES} are shown"
    for failure in failures[-FAILURES:]:
        yield from _failure(failure)
    if len(jobs) > 1:
        names = " ".join(one.id for one in jobs[1 : 1 + HOSTS])
        yield (
            "before it",
            f"{_count(len(jobs) - 1, 'job')}: {names}{' ...' if len(jobs) > 1 + HOSTS else ''}",
        )
    asked_for = next((one for one in jobs[1:] if one.id == asked), None)
    if asked_for:
        yield (
            f"job {asked}",
            f"{_start(asked_for.last, False)}; the run is now that of job {job.id}",
        )


def _start(start: Start, is_last: bool) -> str:
    begun = "" if start.time is None else f", {_clock(start.time)}"
    if start.end:
        after = ""
        if start.time is not None and start.end.time is not None:
            after = f" after {span(max(0.0, start.end.time - start.time))}"
        ended = f"exit code {start.end.code}{after}: {start.end.meaning}"
    else:
        ended = "no end is noted" + ("" if is_last else ": killed, or its first node was lost")
    return f"restart {start.restart}{begun}: {ended}"


def _failure(one: Failure) -> Iterator[tuple[str, str]]:
    """Yield rows for a failure: what failed and where, what followed and why, and its cost."""
    at = "before a step was taken" if one.step is None else f"after step {one.step:,}"
    where = f" on {one.host}" if one.host else ""
    when = "" if one.time is None else f"{_clock(one.time)}, "
    yield "failures", f"{when}{at}: {one.why}{where}"
    yield "", f"{one.then}: {one.because}"
    if one.cost:
        lost = ""
        if one.cost.lost is not None:
            lost = f", {_count(one.cost.lost, 'step')} ({span(one.cost.repeated)}) taken again"
        yield "", f"it cost {span(one.cost.seconds)} without training{lost}"


def _progress(status: Status) -> Iterator[tuple[str, str]]:
    far, settings = status.facts.progress, status.facts.settings
    of = "" if settings.num_steps is None else f" of {settings.num_steps:,}"
    share = "" if status.share is None else f" ({status.share:.1%})"
    tokens = "" if far.tokens_seen is None else f", {far.tokens_seen:,} tokens"
    yield "step", f"{far.step:,}{of}{share}{tokens}"
    if far.loss is not None:
        yield "loss", f"{far.loss:.4f}"
    if far.trend:
        means = f"means {far.trend.before:.4f}, then {far.trend.now:.4f}"
        yield "loss", f"{far.trend.word} in the last {far.trend.steps:,} steps: {means}"
    if far.left_out:
        yield "loss", f"{far.left_out} of the last steps were left out: it was no number"
    if far.learning_rate is not None:
        yield "rate", f"{far.learning_rate:.2e}, the learning rate"
    if far.tokens_per_second_per_device is not None:
        overall = "" if far.tokens_per_second is None else f", {far.tokens_per_second:,.0f} in all"
        mfu = "" if far.mfu is None else f", MFU {far.mfu:.1%}"
        speed = f"{far.tokens_per_second_per_device:,.0f} tokens/s a device{overall}{mfu}"
        yield "speed", f"{speed} (median of {_count(far.reports, 'report')})"
    if status.goodput is not None:
        yield "goodput", f"{status.goodput:.1%} of the job's time was training that is kept"
    if status.left is not None and far.seconds_per_step is not None:
        yield "left", f"{span(status.left)}, at {far.seconds_per_step:.3g} s a step"
        yield "left", "evaluations, restarts and waiting in the queue are not counted"
    if status.reported is not None:
        yield "last line", f"{span(status.reported)} ago"


def _checkpoints(status: Status) -> Iterator[tuple[str, str]]:
    kept = status.facts.checkpoints
    if kept.newest is None:
        yield "checkpoint", "none is complete"
    else:
        new, age = kept.newest, span(status.clock.age(kept.newest.made))
        yield "checkpoint", f"step {new.step:,}, {human(new.bytes)}, complete for {age}: {new.path}"
        yield "checkpoint", f"{kept.count} kept"
    if kept.writing:
        doing = "is being" if status.state is State.RUNNING else "was not completely"
        yield "checkpoint", f"{kept.writing} {doing} written"
    for fault in kept.broken:
        yield "checkpoint", f"NOT COMPLETE {fault}"


def _next(status: Status) -> str:
    if status.state is State.DONE and find_spec("matplotlib"):  # the report needs it
        return suggest.python("-m", "training.report", status.folder, "-o", "report")
    if status.state not in (State.DONE, State.FAILED, State.SILENT):
        return suggest.sqshforge("status", status.folder, "--watch")
    # A job's output is in the folder where it was submitted, usually this one.
    log = Path.cwd() / f"slurm-{status.jobs[0].id}.out" if status.jobs else None
    if log is not None and log.is_file():
        return f"tail -n 100 {log.name}"
    return suggest.sqshforge("status", status.folder, "--json")


def _clock(moment: float) -> str:
    """Format a time of a node's clock in this machine's time zone."""
    return datetime.fromtimestamp(moment).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _count(number: int, what: str) -> str:
    plural = "es" if what.endswith("s") else "s"
    return f"{number} {what}{'' if number == 1 else plural}"


def watch(look: Look, every: float, job: str = "", *, several: bool = False) -> Sequence[Status]:
    """Show runs every `every` seconds until all are over; return their last statuses.

    Without a terminal that can be redrawn, each run has a line, which is printed again only if its
    state or step has changed.
    """
    from rich.live import Live
    from rich.text import Text

    if not sys.stdout.isatty() or is_plain():
        return _tell(look, every)
    console = output()
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        while True:
            found = look()
            if several:
                live.update(fitted(table(found), console, LEAST), refresh=True)
            else:
                live.update(Text("\n".join(map(shown, lines(found[0], job)))), refresh=True)
            if all(one.is_over for one in found):
                return found
            time.sleep(every)


def _tell(look: Look, every: float) -> Sequence[Status]:
    known: dict[str, tuple[str, str]] = {}
    while True:
        found = look()
        for status in found:
            name, state, _, step, of, loss, speed, left, *_ = row(status)
            if known.get(name) != (state, step):
                known[name] = state, step
                parts = [f"{name}: {state}", f"step {step}{f' of {of}' if of else ''}"]
                parts += [f"loss {loss}"] if loss else []
                parts += [f"{speed} tokens/s"] if speed else []
                parts += [f"{left} left"] if left else []
                print(shown(" | ".join(parts)), flush=True)
        if all(one.is_over for one in found):
            return found
        time.sleep(every)
