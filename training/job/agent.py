"""Run torchrun in this process; SIGTERM and SIGUSR1 let its processes save, whose exit code it has.

Alone, torchrun kills its processes 30 s after a SIGTERM and ends with exit code 1 whatever theirs
was; then nobody could tell a wrong request or a saved run from a crash.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from training.errors import HUNG, SAVED, RequestError, TrainingError
from training.job import start_folder

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

UNNOTICED_SECONDS = 180.0
"""How long all processes of this node may have ended, and torchrun does not notice.

Longer than srun takes to end a step of which it has heard one task end: Slurm 22.05's srun waits
for ever for a task whose end it was not told, as when that came while the network was cut.
"""


def run(arguments: Sequence[str], asked_in: Path | None = None) -> int:
    """Run torchrun to the end of all processes of this node; the exit code (see `outcome`).

    Once there are processes, a SIGTERM is handed to them, and this one ends when they do. So is a
    SIGUSR1, at any time: before there are processes it is the same to be ended by either. A SIGHUP
    that is ignored on entry stays ignored.
    asked_in: the start folder, in which the launcher may ask to stop: the same as a SIGUSR1.
    Raises TrainingError if the nodes do not find each other, or lose the first.
    """
    from torch import distributed
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    # The static rendezvous raises the store's own; older torch has no other name for them.
    store_error: type[Exception] = getattr(distributed, "DistError", RuntimeError)
    usual = api._terminate_process_handler
    under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

    def handler(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            _hand_on(number, frame)
        elif number != signal.SIGHUP or not under_nohup:
            usual(number, frame)

    # The function that torchrun makes the handler of SIGTERM, and of SIGHUP even where that is
    # ignored, when it starts its processes.
    setattr(api, usual.__name__, handler)
    signal.signal(signal.SIGUSR1, _hand_on_or_end)
    options = torchrun.parse_args(list(arguments))
    watch_ended(_own_children, _leave)
    if asked_in is not None:
        start_folder.watch(asked_in, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda item: _when(item[1]))
        for rank, failure in failures:
            # What the rank itself noted; torchrun makes words of its own up.
            why = f": {failure.message}" if _has_noted(failure) else ""
            _tell(f"rank {rank} (process {failure.pid}) {ending(_code(failure))}{why}")
        elsewhere = options.node_rank > 0 or "is_host=false" in options.rdzv_conf
        if elsewhere and (gone := _gone(options.rdzv_endpoint)):
            _tell(gone)
        return outcome([_code(failure) for _, failure in failures])
    except (RendezvousError, store_error) as error:
        cause = error.__cause__ or error
        place = f"at {options.rdzv_endpoint}: {cause}"
        if signal.getsignal(signal.SIGTERM) is handler:
            raise TrainingError(f"node 0 has ended, its rendezvous is gone {place}") from error
        raise TrainingError(f"the {options.nnodes} nodes have not met {place}") from error
    return 0


def _when(failure: ProcessFailure) -> tuple[int, bool, bool]:
    """Order failures as they came: in one second what a rank noted first, what was ended last."""
    return failure.timestamp, _code(failure) == -signal.SIGTERM, not _has_noted(failure)


def _has_noted(failure: ProcessFailure) -> bool:
    """Whether the rank itself left a note of what ended it (training.entrypoint)."""
    return Path(failure.error_file).is_file()


def _code(failure: ProcessFailure) -> int:
    """Give a process's exit code, also of one that had failed and was ended on its way out.

    The others fail because of it, and may be gone before it is: torchrun then ends it like a
    healthy one.
    """
    noted = failure.error_file_data.get("exit_code")
    was_ended = failure.exitcode == -signal.SIGTERM
    return noted if was_ended and isinstance(noted, int) else failure.exitcode


def _gone(endpoint: str) -> str:
    """Say what keeps this node from the rendezvous on node 0; empty where that answers.

    When node 0 ends, the other nodes' processes fail; torchrun may see that before it asks again.
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
        _tell(f"a process {ending(code)}, and node 0 does not answer")
    os._exit(outcome(codes))


def outcome(codes: Sequence[int]) -> int:
    """Choose the node's exit code from those of its failed processes, the first failure first.

    A wrong request wins, then HUNG, as what the others saw of that came of it; SAVED needs all to
    have saved; else it is the first failure's, 128 + n for death by signal n.
    """
    for wins in (RequestError.exit_code, HUNG):
        if wins in codes:
            return wins
    first = next((code for code in codes if code != SAVED), SAVED)
    return 128 - first if first < 0 else first


def ending(code: int) -> str:
    """Say in words how a process ended."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    known = {
        SAVED: ": saved and stopped, as SIGTERM asked",
        HUNG: ": no progress, ended by the watch",
        RequestError.exit_code: ": wrong request",
    }
    return f"ended with exit code {code}{known.get(code, '')}"


def _hand_on(number: int, frame: FrameType | None) -> None:
    for pid in _workers():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def _hand_on_or_end(number: int, frame: FrameType | None) -> None:
    if _own_children():
        _hand_on(number, frame)
    else:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _workers() -> list[int]:
    """The processes that train: the children, or what a profiler among them has started."""
    return [pid for child in _own_children() for pid in _pythons(child) or [child]]


def _pythons(parent: int) -> list[int]:
    """Give the process itself if it is a Python, else those below it."""
    if _is_python(parent):
        return [parent]
    return [pid for child in _children(parent) for pid in _pythons(child)]


def _own_children() -> list[int]:
    """The children that this process has started.

    Others were its own before it became this program: enroot's processes that serve the files of
    the root, which must not be signalled.
    """
    return [pid for pid in _children(os.getpid()) if pid not in INHERITED]


def _is_python(pid: int) -> bool:
    """Tell whether a process was started as this interpreter."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(f"{sys.executable}\0".encode())
    return False


def _children(parent: int) -> list[int]:
    """The processes whose parent is this one."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, IndexError):
            if folder.name.isdigit():
                fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[1]) == parent:
                    found.append(int(folder.name))
    return found


def watch_ended(children: Callable[[], Sequence[int]], leave: Callable[[list[int]], None]) -> None:
    """Call `leave` with the exit codes (-n: killed by signal n) if nobody collects them in time.

    Between two looks at its processes torchrun asks the rendezvous on node 0 about the other nodes.
    A node that is cut off waits there for as long as the kernel tries to send: a quarter of an
    hour. `children` gives the processes' numbers. In a thread that ends with this process.
    """
    threading.Thread(target=_watch, args=(children, leave), name="stuck", daemon=True).start()


def _watch(children: Callable[[], Sequence[int]], leave: Callable[[list[int]], None]) -> None:
    since = None
    while True:
        time.sleep(1)
        codes = [_exit_code(pid) for pid in children()]
        ended = [code for code in codes if code is not None]
        if not codes or len(ended) < len(codes):
            since = None
            continue
        since = since or time.monotonic()
        if time.monotonic() - since > UNNOTICED_SECONDS:
            leave(ended)
            return


def _exit_code(pid: int) -> int | None:
    """The exit code of a child that has ended and was not collected; None for one that runs."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # collected at this moment
        return None
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


INHERITED = frozenset(_children(os.getpid()))
"""The children of this process when this module was loaded, which is before it starts any."""


def _tell(text: str) -> None:
    print(f"training.launch: {text}", file=sys.stderr, flush=True)
