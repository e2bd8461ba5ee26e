"""Do the work in parts, each done once whatever happens: first shards, then files of the set.

The work folder holds journal.json, which states what is being made; for each finished shard, a file
of tokens and, for a set on disk, a file of where documents end; and the files of the set that are
finished. Files only appear complete, so a file that exists is finished, and the same request again
continues a run that was killed. The set is moved to its place at the very end. The parts, and so
all bytes, are the same for any number of processes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from training.cli import duration, leave_with_parent
from training.data.layout import LAYOUTS, pieces_of
from training.data.tokenize.blocks import (
    END,
    HALF,
    Line,
    describe,
    file_names,
    whole,
    write_documents,
    write_rows,
)
from training.data.tokenize.texts import Texts
from training.data.tokenize.tokenizer import Encoder, Tokenizer
from training.errors import RequestError, TrainingError, writing

PROGRESS_SECONDS = 30.0
"""Seconds between lines if there is no terminal."""

JOURNAL, JOB, SET, PLACED = "journal.json", "job.pickle", "set", "placed"


class Progress:
    """Counts the finished parts of a whole, `before` of which an earlier run has done.

    Reports them in one changing line on a terminal, elsewhere in a line now and then.
    """

    def __init__(self, what: str, whole: int, before: int = 0) -> None:
        self.what, self.whole, self.before, self.done = what, max(1, whole), before, before
        self.tokens = 0
        self._live = sys.stderr.isatty()
        self._since = self._shown = time.monotonic()

    def add(self, parts: int, tokens: int) -> None:
        self.done += parts
        self.tokens += tokens
        now = time.monotonic()
        if self._live or now - self._shown >= PROGRESS_SECONDS:
            self._shown = now
            print(self._line(now - self._since), end=self._end(), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Keep the last line on a terminal."""
        if self._live:
            print(file=sys.stderr, flush=True)

    def _end(self) -> str:
        return "\x1b[K\r" if self._live else "\n"

    def _line(self, seconds: float) -> str:
        rate = (self.done - self.before) / max(seconds, 1e-6)
        left = (self.whole - self.done) / rate if rate else 0.0
        return (
            f"{self.what}: {self.done / self.whole:.0%}, "
            f"{self.tokens / max(seconds, 1e-6) / 1e6:.2f} M tokens/s, {duration(left)} left"
        )


@dataclass(frozen=True)
class Job:
    """What to make of which texts, and where: rows of seq_len tokens, or packed words of a layout.

    With a layout, seq_len is 0 and ignored.
    """

    texts: Texts
    tokenizer: Tokenizer
    append_eos: bool
    seq_len: int
    target: Path
    layout: str = ""

    @property
    def folder(self) -> Path:
        return work_folder(self.target)

    def request(self) -> dict[str, Any]:
        """Return what identifies the set, wherever its texts are."""
        return {
            "text": self.texts.fingerprint,
            "tokenizer": self.tokenizer.fingerprint,
            "append_eos": self.append_eos,
            "eos": self.tokenizer.eos if self.append_eos else None,
            **({"layout": self.layout} if self.layout else {"seq_len": self.seq_len}),
        }

    def journal(self) -> dict[str, Any]:
        """Return all that a shard's bytes depend on; work continues only if it is the same."""
        return {
            **self.request(),
            "text_column": self.texts.column,
            "content": self.texts.content,
        }

    def tokens(self, number: int) -> Path:
        return self.folder / f"shard-{number:06}.tokens"

    def ends(self, number: int) -> Path:
        return self.folder / f"shard-{number:06}.ends"

    def is_done(self, number: int) -> bool:
        """Return whether a shard is done; packed words need no file of where documents end."""
        return self.tokens(number).exists() and (bool(self.layout) or self.ends(number).exists())

    def line(self) -> Line:
        """Return the tokens of all shards, once every shard is done."""
        return Line([self.tokens(number) for number in range(len(self.texts.shards()))])


def work_folder(target: Path) -> Path:
    return target.parent / f".{target.name}.tokenizing"


def was_placed(target: Path) -> bool:
    """Return whether a run was killed just after placing the set; if so, remove what it left."""
    folder = work_folder(target)
    if not (target.exists() and (folder / PLACED).exists() and not (folder / SET).exists()):
        return False
    _remove(folder)
    return True


def _remove(folder: Path) -> None:
    """Remove a work folder that nobody holds; if that fails, print a warning.

    PLACED goes last: it shows the next start that the set is complete.
    """
    try:
        for path in sorted(folder.iterdir(), key=lambda path: path.name == PLACED):
            path.unlink(missing_ok=True)
        folder.rmdir()
    except FileNotFoundError:  # another start removes it too
        pass
    except OSError as error:
        why = f"{error.strerror}; fix: remove it, it is no longer needed"
        print(f"warning: {folder} cannot be removed: {why}", file=sys.stderr)


def run(job: Job, processes: int) -> dict[str, Any]:
    """Make the set; return facts of METADATA about it. Raises TrainingError and RequestError."""
    with held(job):
        encode(job, processes)
        line = job.line()
        about = {
            "tokenizer": job.tokenizer.name,
            "vocab_size": job.tokenizer.vocab_size,
            "eos": job.tokenizer.eos if job.append_eos else None,
            "documents": len(job.texts),
            "dropped": len(line) % job.seq_len,
        }
        if len(line) >= job.seq_len:
            _make_set(job, line, about, processes)
    if len(line) < job.seq_len:
        raise RequestError(
            f"--seq_len: {job.seq_len:,} is more than the {len(line):,} tokens that there are; "
            "fix: give fewer, or more texts"
        )
    return {**about, "rows": len(line) // job.seq_len}


def _make_set(job: Job, line: Line, about: dict[str, Any], processes: int) -> None:
    """Write the files of the set, and move it to its place."""
    _assemble(job, len(line), processes)
    ends = [job.ends(number) for number in range(len(job.texts.shards()))]
    write_documents(job.folder / SET, line, ends)
    request = hashlib.blake2b(json.dumps(job.request()).encode(), digest_size=16).hexdigest()
    describe(job.folder / SET, line, job.seq_len, request, about)
    place(job)


def place(job: Job) -> None:
    """Move what was made to its place. Raises TrainingError."""
    with writing(job.target):
        (job.folder / PLACED).touch()
        (job.folder / SET).rename(job.target)


@contextmanager
def held(job: Job) -> Iterator[None]:
    """Hold the work folder, new or left by an earlier run of the same request, for this run alone.

    It is removed at the end, but stays after an error, so that the same request can continue.
    Raises RequestError if another run holds it, or if its work is that of another request.
    """
    with writing(job.folder):
        job.folder.mkdir(parents=True, exist_ok=True)
        lock = (job.folder / "lock").open("w")
    with lock:
        # A file system may have no locks; the lock only guards against a user's mistake.
        with suppress(OSError):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RequestError(
                    f"--save_path: another run is making {job.target} right now"
                ) from error
        _check_journal(job)
        yield
    # Only with the lock closed: NFS keeps a removed file that is open, and with it the folder.
    _remove(job.folder)


def _check_journal(job: Job) -> None:
    path = job.folder / JOURNAL
    if not path.exists():
        with whole(path) as file:
            file.write(json.dumps(job.journal(), indent=2).encode() + b"\n")
        return
    found = json.loads(path.read_text())
    other = [name for name, value in job.journal().items() if found.get(name) != value]
    if other:
        raise RequestError(
            f"--save_path: {job.folder} has unfinished work of another request (different: "
            f"{', '.join(other)}); fix: remove it, or request the same as before"
        )


def encode(job: Job, processes: int) -> None:
    """Make the file of tokens, or of packed words, for each shard that is not done yet."""
    shards = job.texts.shards()
    sizes = [int(job.texts.sizes[first:end].sum()) for first, end in shards]
    missing = [number for number in range(len(shards)) if not job.is_done(number)]
    before = sum(sizes) - sum(sizes[number] for number in missing)
    if before:
        print(f"going on: {len(shards) - len(missing)} of {len(shards)} shards are done")
    progress = Progress("tokenizing", sum(sizes), before)
    tasks = [(number, *shards[number]) for number in missing]
    for number, tokens in _each(_encode_shard, tasks, job, processes):
        progress.add(sizes[number], tokens)
    progress.close()


def _assemble(job: Job, tokens: int, processes: int) -> None:
    with writing(job.folder):
        (job.folder / SET).mkdir(exist_ok=True)
        for half in (job.folder / SET).glob(f"*{HALF}"):  # of a run that was killed
            half.unlink()
    names = file_names(tokens, job.seq_len)
    missing = [
        number for number, name in enumerate(names) if not (job.folder / SET / name).exists()
    ]
    progress = Progress("writing", len(names), len(names) - len(missing))
    tasks = [(number, names[number]) for number in missing]
    for _, written in _each(_write_file, tasks, job, processes):
        progress.add(1, written)
    progress.close()


def _each(
    work: Callable[..., int], tasks: Sequence[tuple[Any, ...]], job: Job, processes: int
) -> Iterator[tuple[int, int]]:
    """Do tasks in that many processes; yield (number of the task, tokens) as they finish."""
    processes = min(processes, len(tasks))
    if processes < 2:
        _begin(job)
        for task in tasks:
            yield task[0], work(*task)
        return
    # Through a file: if a process is killed as it starts, what was sent to it must fit in a pipe,
    # or the sender waits forever.
    with whole(job.folder / JOB) as file:
        pickle.dump(job, file)
    workers = _Workers(job.folder / JOB)
    with ThreadPoolExecutor(processes) as threads:
        try:
            waiting = {threads.submit(workers.do, work, task): task[0] for task in tasks}
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        finally:
            threads.shutdown(cancel_futures=True)  # running tasks finish
            workers.close()


class _Workers:
    """A process, with its own pipe, for each thread that asks for work.

    ProcessPoolExecutor waits forever if a process is killed while another is being started.
    """

    def __init__(self, job: Path) -> None:
        self._job = job
        # Not forked: the libraries have threads, which a fork may catch at a bad moment.
        self._spawn = multiprocessing.get_context("spawn")
        self._mine = threading.local()
        self._started: list[tuple[SpawnProcess, Connection]] = []

    def do(self, work: Callable[..., int], task: tuple[Any, ...]) -> int:
        """Have this thread's process do a task. Raises TrainingError if the process was killed."""
        try:
            pipe = self._pipe()
            pipe.send((work, task))
            tokens, error = pipe.recv()
        except (EOFError, OSError) as gone:
            raise TrainingError(
                "a process of --num_proc was killed, likely for lack of memory; fix: start again, "
                "with fewer, to go on"
            ) from gone
        if error is not None:
            raise error
        return int(tokens)

    def _pipe(self) -> Connection:
        if not hasattr(self._mine, "pipe"):
            ours, theirs = self._spawn.Pipe()
            process = self._spawn.Process(target=_serve, args=(theirs, self._job), daemon=True)
            self._started.append((process, ours))
            with theirs:  # closed here, so that the pipe ends with the process
                process.start()
            self._mine.pipe = ours
        pipe: Connection = self._mine.pipe
        return pipe

    def close(self) -> None:
        """Close the pipes, and wait until the processes have ended."""
        for _, pipe in self._started:
            pipe.close()
        for process, _ in self._started:
            if process.pid is not None:
                process.join()


def _serve(pipe: Connection, job: Path) -> None:
    """Do the tasks that come through the pipe until it is closed."""
    _begin_worker(job)
    with suppress(EOFError):
        while True:
            work, task = pipe.recv()
            try:
                pipe.send((work(*task), None))
            except Exception as error:
                pipe.send((0, error))


_job: Job
_encoder: Encoder
_line: Line | None


def _begin(job: Job) -> None:
    global _job, _encoder, _line
    _job, _encoder, _line = job, Encoder(job.tokenizer, job.append_eos), None


def _begin_worker(path: Path) -> None:
    """Set up a worker process, which ends when its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    leave_with_parent()
    _begin(pickle.loads(path.read_bytes()))


def _encode_shard(number: int, first: int, end: int) -> int:
    texts = _job.texts.read(first, end)
    if _job.layout:
        each = [_encoder.encode([text]) for text in texts]  # (n,) each
        pieces = [piece for one in each for piece in pieces_of(one, LAYOUTS[_job.layout])]
    else:
        ids, ends = _encoder.encode_each(texts)  # (tokens,), (documents,)
        with whole(_job.ends(number)) as file:
            file.write(ends.astype(END, copy=False).data)
        pieces = [ids]
    with whole(_job.tokens(number)) as file:
        for piece in pieces:
            file.write(piece.astype("<i4", copy=False).data)
    return sum(map(len, pieces))


def _write_file(number: int, name: str) -> int:
    global _line
    _line = _line or _job.line()
    return write_rows(_line, _job.folder / SET / name, number, _job.seq_len)
