"""Ask registries for an image by name: its digest, or that there is no such image."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256

from sqshforge.host.programs import Programs
from sqshforge.network import access

TIMEOUT = 60.0  # seconds that a registry may take to answer
ABSENT = ("manifest unknown", "name unknown", "not found", "repository name not known")
CLOSED = ("unauthorized", "authentication required", "denied", "no basic auth credentials")
NO_LOGIN = "getting username and password"  # in skopeo's message if it cannot read the login
UNREACHED = "pinging container registry"  # in skopeo's message if no registry answers


class State(Enum):
    """The outcome of asking a registry."""

    THERE = "there"
    ABSENT = "absent"  # the registry answers that it has no such image
    CLOSED = "closed"  # it requires another login
    SILENT = "silent"  # no answer, usually for lack of a network


@dataclass(frozen=True)
class Answer:
    """An image's digest, or why there is none."""

    name: str
    state: State
    digest: str | None = None
    said: str = ""


@dataclass
class Registries:
    """The answers of registries; each name is asked for once."""

    answers: dict[str, Answer] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, name: str, programs: Programs, timeout: float = TIMEOUT) -> Answer:
        """Ask the registry of NAME:TAG or NAME@DIGEST for it, with skopeo."""
        with self._lock:
            known = self.answers.get(name)
        if known is None:
            known = _ask(name, programs, timeout)
            with self._lock:
                self.answers[name] = known
        return known


def _ask(name: str, programs: Programs, timeout: float) -> Answer:
    if programs.which("skopeo") is None:
        return Answer(name, State.SILENT, said="skopeo is not installed")
    access.choose_login_file()
    # Without --raw, skopeo also lists the repository's tags, and fails if all of them are gone.
    said = programs.attempt(["skopeo", "inspect", "--raw", f"docker://{name}"], timeout=timeout)
    if said.code == 0:
        return Answer(name, State.THERE, f"sha256:{sha256(said.out.encode()).hexdigest()}")
    why = reason(said.err)
    return Answer(name, state_of(why), said=shown(why))


def pinned(name: str, digest: str) -> str:
    """Return the name with a digest in place of its tag."""
    above, slash, last = name.partition("@")[0].rpartition("/")
    return f"{above}{slash}{last.partition(':')[0]}@{digest}"


def host_of(name: str) -> str:
    """Return the registry of an image's name: docker.io if it names none."""
    first, slash, _ = name.partition("/")
    names_one = bool(slash) and (first == "localhost" or "." in first or ":" in first)
    return first if names_one else "docker.io"


def reason(said: str) -> str:
    """Extract the error from skopeo's log line."""
    found = re.findall(r'level=fatal msg="((?:[^"\\]|\\.)*)"', said)
    if not found:
        return said.strip()
    # Quoted with Go's %q, which unlike JSON has \a, \xFC and \U0001F600.
    return found[-1].encode("latin-1", "backslashreplace").decode("unicode_escape", "replace")


def state_of(why: str) -> State:
    """Tell whether a registry lacks an image, requires a login, or was not reached."""
    if UNREACHED in why:
        return State.CLOSED if any(word in why for word in CLOSED) else State.SILENT
    if NO_LOGIN in why:
        return State.CLOSED
    if any(word in why for word in ABSENT):
        return State.ABSENT
    return State.CLOSED if any(word in why for word in CLOSED) else State.SILENT


def shown(why: str) -> str:
    """Return the end of a chain of errors, which says what happened, in one line."""
    last = why.strip().splitlines()[-1] if why.strip() else "it says nothing"
    return ": ".join(dict.fromkeys(last.split(": ")[-2:]))
