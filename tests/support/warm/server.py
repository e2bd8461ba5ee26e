"""Forks for every request and reports how the child ends; a client that goes away ends its child.

usage: python -m tests.support.warm.server SOCKET

It ends when its standard input does. It runs no threads, which a fork would lose. It also preloads
what a run uses of training/; a child forgets that if it has another copy of it, or a
sitecustomize.py of its own that may have to run before.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import importlib.machinery
import io
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.support.processes import descendants

MODULES = (
    "composer",
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
    "torch.utils.checkpoint",
    "training.launch",
    "training.trainer.run",
)
PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Request:
    """Words as python gets them, and the context in which to run them."""

    words: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]  # of standard input, output and error
    client: int  # its process id


def serve(path: str) -> Request:
    """Fork for every request. Returns only in the children, with their requests."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen(64)
    selector = selectors.DefaultSelector()
    selector.register(server, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    children: dict[int, tuple[int, socket.socket]] = {}  # by the file that reports their end
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            if key.fileobj is server:
                connection, _ = server.accept()
                request = receive(connection)
                if request is None:
                    connection.close()
                    continue
                child = os.fork()
                if child == 0:
                    for opened in [server, *(one for _, one in children.values()), connection]:
                        opened.close()
                    for file in children:
                        os.close(file)
                    selector.close()
                    return request
                for file in request.files:
                    os.close(file)
                with suppress(OSError):  # a client that is gone is noticed in the next turn
                    connection.sendall(f"{child}\n".encode())
                file = os.pidfd_open(child)
                children[file] = child, connection
                selector.register(file, selectors.EVENT_READ)
                selector.register(connection, selectors.EVENT_READ, file)
            elif key.fileobj == 0:
                for child, _ in children.values():
                    end(child)
                os._exit(0)
            elif key.data is None and key.fd in children:
                child, connection = children.pop(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                with suppress(OSError):  # the client may have been killed
                    connection.sendall(f"{code}\n".encode())
                selector.unregister(key.fd)
                os.close(key.fd)
                with suppress(KeyError):
                    selector.unregister(connection)
                connection.close()
            elif key.data in children:  # the client has gone
                selector.unregister(key.fileobj)
                end(children[key.data][0])


def receive(connection: socket.socket) -> Request | None:
    """Return a client's request; None if it went away before it was complete."""
    length, files, _, _ = socket.recv_fds(connection, 8, 3)
    left = int.from_bytes(length, "little")
    parts = []
    while left and (part := connection.recv(left)):
        parts.append(part)
        left -= len(part)
    if left or not parts:
        for file in files:
            os.close(file)
        return None
    client, _, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return Request(**json.loads(b"".join(parts)), files=files, client=client)


def end(child: int) -> None:
    """Kill a process and everything below it."""
    for pid in (child, *descendants(child)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def enter_namespaces(pid: int) -> None:
    """Enter the network, host name and mounts of another process."""
    for kind in ("net", "uts", "mnt"):
        theirs = Path(f"/proc/{pid}/ns/{kind}")
        if theirs.samefile(f"/proc/self/ns/{kind}"):
            continue
        file = os.open(theirs, os.O_RDONLY)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), f"setns: the {kind} namespace of process {pid}")
        os.close(file)


def become(request: Request) -> None:
    """Be the requested process, to its end."""
    ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)
    os.setsid()
    enter_namespaces(request.client)
    for number, file in enumerate(request.files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    own = [one for one in request.environment.get("PYTHONPATH", "").split(os.pathsep) if one]
    sys.path[1:1] = [folder for folder in own if folder not in sys.path]
    for folder in own:
        if (Path(folder) / "sitecustomize.py").exists():  # as python itself does at startup
            forget_training()
            runpy.run_path(str(Path(folder) / "sitecustomize.py"))
            break
    words = list(request.words)
    through = words[0] == "-u"
    words = words[through:]
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115 - lives as we do
        below = raw if through else io.BufferedWriter(raw)
        stream = io.TextIOWrapper(below, line_buffering=number == 2, write_through=through)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.path[0] = request.folder if words[0] == "-m" else str(Path(words[0]).parent)
    loaded = getattr(sys.modules.get("training"), "__file__", None)
    found = importlib.machinery.PathFinder.find_spec("training")
    if found is None or found.origin != loaded:
        forget_training()
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.modules.pop(words[1], None)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def leave(code: int) -> NoReturn:
    """End as python does, but without tearing down the interpreter.

    That would copy the memory that all processes share, for a quarter of a second of CPU time.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for all but daemons
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = 120
    os._exit(code)


def forget_training() -> None:
    """Make the next import load the training package anew."""
    for name in list(sys.modules):
        if name.partition(".")[0] == "training":
            del sys.modules[name]


def quicken_rendezvous() -> None:
    """Let torchrun name the methods of its events at once.

    It uses inspect.stack() for that, which searches all modules for the source of every frame and
    takes longer than everything else that torchrun does.
    """
    dynamic: Any = importlib.import_module(
        "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
    )
    assert dynamic.get_method_name(1) == "quicken_rendezvous"
    dynamic.get_method_name = method_name
    assert dynamic.get_method_name(1) == "quicken_rendezvous"


def method_name(depth: int = 2) -> str:
    """Return the name of the function `depth` calls above this one, like torchrun's own."""
    return sys._getframe(depth).f_code.co_name


def main() -> None:
    for module in MODULES:
        with suppress(ImportError):  # not every environment has all of them
            importlib.import_module(module)
    quicken_rendezvous()
    gc.freeze()  # what is loaded stays shared between the processes
    request = serve(sys.argv[1])
    try:
        become(request)
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise  # python prints it
        leave((ended.code or 0) & 0xFF)
    leave(0)


if __name__ == "__main__":
    main()
