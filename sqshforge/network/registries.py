"""What a registry says of an image's name: its digest, or that it has no such image."""

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
NO_LOGIN = "getting username and password"  # how it begins where it cannot find out the login
UNREACHED = "pinging container registry"  # how skopeo begins where no registry answers


class State(Enum):
    """What an answer comes to."""

    THERE = "there"
    ABSENT = "absent"  # the registry answers, and has no such image
    CLOSED = "closed"  # it does not say, without another login
    SILENT = "silent"  # nobody answers: no network, most often


@dataclass(frozen=True)
class Answer:
    """An image's digest, or why there is none."""

    name: str
    state: State
    digest: str | None = None
    said: str = ""


@dataclass
class Registries:
    """What registries have said: each name is asked for once."""

    answers: dict[str, Answer] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, name: str, programs: Programs, timeout: float = TIMEOUT) -> Answer:
        """What the registry of NAME:TAG or NAME@DIGEST says of it, through skopeo."""
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
    # Without --raw it lists the repository's tags too, and fails where all of them are gone.
    said = programs.attempt(["skopeo", "inspect", "--raw", f"docker://{name}"], timeout=timeout)
    if said.code == 0:
        return Answer(name, State.THERE, f"sha256:{sha256(said.out.encode()).hexdigest()}")
    why = reason(said.err)
    return Answer(name, state_of(why), said=shown(why))


def pinned(name: str, digest: str) -> str:
    """The name with a digest in the place of its tag."""
    above, slash, last = name.partition("@")[0].rpartition("/")
    return f"{above}{slash}{last.partition(':')[0]}@{digest}"


def host_of(name: str) -> str:
    """The registry that an image's name is asked of: Docker's where it names none."""
    first, slash, _ = name.partition("/")
    names_one = bool(slash) and (first == "localhost" or "." in first or ":" in first)
    return first if names_one else "docker.io"


def reason(said: str) -> str:
    """What skopeo says is wrong, without the frame of its log."""
    found = re.findall(r'level=fatal msg="((?:[^"\\]|\\.)*)"', said)
    if not found:
        return said.strip()
    # Quoted as Go does it (%q), which has \a, \xFC and \U0001F600 where JSON has none.
    return found[-1].encode("latin-1", "backslashreplace").decode("unicode_escape", "replace")


def state_of(why: str) -> State:
    """Whether a registry lacks an image, keeps it to itself, or was not reached."""
    if UNREACHED in why:
        return State.CLOSED if any(word in why for word in CLOSED) else State.SILENT
    if NO_LOGIN in why:
        return State.CLOSED
    if any(word in why for word in ABSENT):
        return State.ABSENT
    return State.CLOSED if any(word in why for word in CLOSED) else State.SILENT


def shown(why: str) -> str:
    """The end of a chain of errors, which says what happened, in one line."""
    last = why.strip().splitlines()[-1] if why.strip() else "it says nothing"
    return ": ".join(dict.fromkeys(last.split(": ")[-2:]))
