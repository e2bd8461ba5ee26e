"""Run torchrun in this process: a signal to stop lets the ranks save, and the exit code is theirs.

By itself, torchrun kills its processes 30 s after a SIGTERM and ends with exit code 1 whatever
theirs was; nobody could then tell a wrong request or a saved run from a crash.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from training.errors import HUNG, SAVED, RequestError, TrainingError
from training.imports import loading
from training.job import children, start_folder
from training.job.restart.control import RestartControl, tell

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from training.job.restart.elastic import Found, Ranks

UNNOTICED_SECONDS = 300.0
"""How long all processes of this node may have ended without torchrun noticing.

Longer than srun takes by default, 180 s, to end a step once it has heard that one task has ended:
Slurm 22.05's srun waits forever for a task whose end it did not hear of, as when that came while
the network was cut.
"""


class _Stop:
    """Whether this node was asked to stop, and whether by Ctrl-C."""

    asked = False
    interrupted = False


def run(
    arguments: Sequence[str],
    asked_in: Path | None = None,
    control: RestartControl | None = None,
) -> int:
    """Run torchrun until all processes of this node have ended; return the exit code (`outcome`).

    Once there are processes, a SIGTERM is handed on to them, and this process ends when they do. So
    is a SIGUSR1; before there are processes, either of the two ends this process. The first SIGINT
    is handed on as well; the second, or one before there are processes, ends them at once and
    raises KeyboardInterrupt. A SIGHUP or SIGINT that is ignored on entry stays ignored.
    asked_in: the start folder, in which the launcher may ask to stop: the same as a SIGUSR1.
    control: decides which failures are answered by a restart in place; without it, none is.
    Raises TrainingError if the nodes do not find each other, or lose node 0.
    """
    with loading():
        from torch import distributed
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing import api
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError
        from torch.distributed.launcher import api as launcher

        from training.job.restart.elastic import InPlaceAgent, Ranks, Stopped
        from training.job.restart.presence import NotNeeded, Presence

    # The static rendezvous raises the store's errors, for which older torch has no other name.
    store_error: type[Exception] = getattr(distributed, "DistError", RuntimeError)
    usual = api._terminate_process_handler
    ended_by = (signal.SIGHUP, signal.SIGINT)
    ignored = [number for number in ended_by if signal.getsignal(number) is signal.SIG_IGN]

    def handler(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            _hand_on(number, frame)
        elif number in ignored:
            pass
        elif number == signal.SIGINT:
            interrupt(number, frame)
        else:
            usual(number, frame)

    def have_ranks() -> bool:
        return bool(children.own_children()) or (control is not None and control.has_started)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if have_ranks() and not _Stop.interrupted:
            _Stop.interrupted = True
            tell("asked to stop, after saving; Ctrl-C again ends it at once")
            _hand_on(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            children.kill_groups(children.own_children())
            raise KeyboardInterrupt

    def hand_on_or_end(number: int, frame: FrameType | None) -> None:
        if have_ranks():
            _hand_on(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    # When torchrun starts its processes, it installs this function as the handler of SIGTERM, and
    # of SIGHUP and SIGINT even if these are ignored.
    setattr(api, usual.__name__, handler)
    signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGUSR1, hand_on_or_end)

    def leave(codes: list[int]) -> NoReturn:
        if control is not None:
            control.close()
        _leave(codes)

    options = torchrun.parse_args(list(arguments))
    watch_ended(children.own_children, leave)
    if asked_in is not None:
        start_folder.watch(asked_in, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    ranks = Ranks(leave=leave, examine=_examine, asked=lambda: _Stop.asked, hand_on=_ask_workers)
    if control is not None:
        ranks.control = control
        if control.job.outlives_nodes:
            ranks.presence = Presence(control.job, control.worn)
        replaced: Any = launcher  # the module in which torchrun looks its agent up
        replaced.LocalElasticAgent = functools.partial(InPlaceAgent, ranks=ranks)
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        found = ranks.found or _examine(error.failures, ranks)
        elsewhere = options.node_rank > 0 or "is_host=false" in options.rdzv_conf
        if elsewhere and (gone := _gone(options.rdzv_endpoint)):
            tell(gone)
        if _Stop.asked and set(found.codes) <= {SAVED, -signal.SIGTERM}:
            return SAVED  # some had not begun to train: nothing new to save
        return control.outcome(found.code) if control else found.code
    except NotNeeded:
        tell(f"node {control.job.node_rank if control else 0} was a spare, and was not needed")
        return 0
    except Stopped:
        tell("asked to stop before the ranks were started again: nothing is new")
        return SAVED
    except (RendezvousError, store_error) as error:
        cause = error.__cause__ or error
        if ranks.found:  # the other nodes do not restart in place
            why = str(cause) or "another one has ended"
            tell(f"no restart in place: the nodes do not meet again: {why}")
            return control.outcome(ranks.found.code) if control else ranks.found.code
        place = f"at {options.rdzv_endpoint}: {cause}"
        if signal.getsignal(signal.SIGTERM) is handler:
            raise TrainingError(f"node 0 has ended, its rendezvous is gone {place}") from error
        raise TrainingError(f"the {options.nnodes} nodes have not met {place}") from error
    finally:
        if ranks.presence:
            ranks.presence.end()
    return 0


def _examine(failures: Mapping[int, ProcessFailure], ranks: Ranks) -> Found:
    """Report how each rank of this node failed, the cause first; return what follows from all."""
    from training.job.restart.elastic import Found

    ordered = sorted(failures.items(), key=lambda item: _when(item[1], ranks.ended))
    # A rank that was ended here while it was already failing has left a note of that.
    own = [one for one in ordered if one[1].pid not in ranks.killed or _has_noted(one[1])]
    own = own or ordered
    lines = {}
    for rank, failure in own:
        # Only what the rank itself noted: for others torchrun makes up a message.
        why = f": {failure.message}" if _has_noted(failure) else ""
        lines[rank] = f"{ending(_code(failure))}{why}"
        tell(f"rank {rank} (process {failure.pid}) {lines[rank]}")
    codes = tuple(_code(failure) for _, failure in own)
    first, noted = own[0][0], own[0][1].error_file_data
    was_taken_along = all(_was_taken_along(failure) for _, failure in own)
    return Found(
        rank=first,
        code=outcome(codes),
        codes=codes,
        why=f"rank {first} {lines[first]}",
        was_taken_along=was_taken_along,
        is_cause=not was_taken_along and not noted.get("of_all_ranks"),
        may_be_cause=-signal.SIGABRT in codes,
    )


def _when(failure: ProcessFailure, ended: Mapping[int, float]) -> tuple[int, bool, bool, bool]:
    """Sort key: the order in which failures came.

    Within one second, deaths by a signal and failures that a rank noted come first, and ranks that
    were ended or taken along by others last.
    """
    seen = int(ended.get(failure.pid, failure.timestamp))
    code = _code(failure)
    return (
        seen if code < 0 else failure.timestamp,
        code == -signal.SIGTERM,
        _was_taken_along(failure),
        code >= 0 and not _has_noted(failure),
    )


def _was_taken_along(failure: ProcessFailure) -> bool:
    """Whether a rank ended because of another one, and so had no cause of its own to note.

    An abort comes from NCCL's watchdog, which sees that another rank is gone.
    """
    known = (TrainingError.exit_code, -signal.SIGABRT)
    return failure.exitcode in known and not _has_noted(failure)


def _has_noted(failure: ProcessFailure) -> bool:
    """Whether the rank itself left a note of what ended it (training.entrypoint)."""
    return Path(failure.error_file).is_file()


def _code(failure: ProcessFailure) -> int:
    """A process's exit code, even if it was ended on its way out after it had failed.

    The others fail because of it and may be gone before it is: torchrun then ends it like a healthy
    one.
    """
    noted = failure.error_file_data.get("exit_code")
    was_ended = failure.exitcode in (-signal.SIGTERM, -signal.SIGKILL)
    return noted if was_ended and isinstance(noted, int) else failure.exitcode


def _gone(endpoint: str) -> str:
    """Say why the rendezvous on node 0 cannot be reached; empty if it answers.

    When node 0 ends, the other nodes' processes fail, which torchrun may see before it asks the
    rendezvous again.
    """
    address, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((address.strip("[]"), int(port)), timeout=5).close()
    except ConnectionRefusedError as error:
        return f"node 0 has ended, its rendezvous is gone at {endpoint}: {error}"
    except OSError as error:
        return f"node 0 does not answer at {endpoint}: {error}"
    return ""


def _leave(codes: list[int]) -> NoReturn:
    """End this process while torchrun waits for node 0, which it cannot reach."""
    for code in codes:
        tell(f"a process {ending(code)}, and node 0 does not answer")
    os._exit(outcome(codes))


def outcome(codes: Sequence[int]) -> int:
    """Choose the node's exit code from those of its failed processes, the first failure first.

    A wrong request wins, then HUNG, since the others failed because of it. SAVED needs all to have
    saved. Otherwise it is the first failure's code, 128 + n for death by signal n.
    """
    for wins in (RequestError.exit_code, HUNG):
        if wins in codes:
            return wins
    first = next((code for code in codes if code != SAVED), SAVED)
    return 128 - first if first < 0 else first


def ending(code: int) -> str:
    """Describe in words how a process ended."""
    if code < 0:
        return f"was killed by {children.signal_name(-code)}"
    known = {
        SAVED: ": saved and stopped, as SIGTERM asked",
        HUNG: ": no progress, ended by the watch",
        RequestError.exit_code: ": wrong request",
    }
    return f"ended with exit code {code}{known.get(code, '')}"


def _hand_on(number: int, frame: FrameType | None) -> None:
    _Stop.asked = True
    _ask_workers()


def _ask_workers() -> None:
    for pid in children.workers():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def watch_ended(pids: Callable[[], Sequence[int]], leave: Callable[[list[int]], None]) -> None:
    """Call `leave` with the exit codes (-n: killed by signal n) if nobody collects them in time.

    Between two looks at its processes torchrun asks the rendezvous on node 0 about the other nodes.
    On a node that is cut off this takes as long as the kernel tries to send: a quarter of an hour.
    `pids` returns the processes' numbers. Runs in a thread that ends with this process.
    """
    threading.Thread(target=_watch, args=(pids, leave), name="stuck", daemon=True).start()


def _watch(pids: Callable[[], Sequence[int]], leave: Callable[[list[int]], None]) -> None:
    since = None
    while True:
        time.sleep(1)
        codes = [children.exit_code(pid) for pid in pids()]
        ended = [code for code in codes if code is not None]
        if not codes or len(ended) < len(codes):
            since = None
            continue
        since = since or time.monotonic()
        if time.monotonic() - since > UNNOTICED_SECONDS:
            leave(ended)
            return
