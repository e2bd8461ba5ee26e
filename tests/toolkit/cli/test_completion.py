"""The Tab key in a real bash on a terminal completes what `sqshforge` accepts."""

from __future__ import annotations

import os
import pty
import re
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sqshforge.engine import NAMES
from sqshforge.host.programs import Programs
from sqshforge.squash.mksquashfs import PROFILES
from tests.support.command_line import SCRIPT
from tests.toolkit.build.test_dockerfile import TARGETS

pytestmark = pytest.mark.processes

LINE = 'eval "$(_SQSHFORGE_COMPLETE=bash_source sqshforge)"'
PROMPT = "ready> "
TAB = "\t"
ALL = "\x1b*"  # readline's key to insert everything that Tab would list
TIMEOUT = 120.0  # seconds


class Shell:
    """An interactive bash at the other end of a terminal."""

    def __init__(self, terminal: int) -> None:
        self.terminal = terminal
        self.seen = ""

    def wait(self, pattern: str) -> str:
        """Read until the pattern occurs; returns its group."""
        deadline = time.monotonic() + TIMEOUT
        while (found := re.search(pattern, self.seen)) is None:
            ready, _, _ = select.select([self.terminal], [], [], deadline - time.monotonic())
            assert ready, f"{pattern} has not come: {self.seen!r}"
            self.seen += os.read(self.terminal, 65536).decode()
        self.seen = self.seen[found.end() :]
        return found[1]

    def type(self, keys: str) -> None:
        os.write(self.terminal, keys.encode())

    def completed(self, keys: str) -> str:
        """Return the command line that these keys make, without running it."""
        self.type(f"{keys}\x01echo '[\x05]'\r")  # typed at the start and at the end of the line
        line = self.wait(r"\n\[([^\r\n]*)\]\r?\n")
        self.wait(f"({PROMPT})")
        return line


@contextmanager
def bash(folder: Path) -> Iterator[Shell]:
    leader, follower = pty.openpty()
    environment = {
        "HOME": str(folder),
        "PATH": f"{SCRIPT.parent}:{os.environ['PATH']}",
        "PS1": PROMPT,
        "TERM": "dumb",
        "INPUTRC": "/dev/null",
        "HISTFILE": "",
    }
    argv = ["bash", "--norc", "--noprofile", "-i"]
    try:
        with Programs().start(
            argv, stdin=follower, stdout=follower, stderr=follower, env=environment, cwd=folder
        ) as process:
            shell = Shell(leader)
            shell.wait(f"({PROMPT})")
            shell.type(f"{LINE}\r")
            shell.wait(f"({PROMPT})")
            yield shell
            shell.type("exit\r")
            process.wait(timeout=TIMEOUT)
    finally:
        os.close(leader)
        os.close(follower)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    folder = tmp_path_factory.mktemp("typing")
    (folder / "packed").mkdir()
    (folder / "packed" / "model.sqsh").touch()
    with bash(folder) as one:
        yield one


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (f"sqshforge qui{TAB}", "sqshforge quickstart "),
        (f"sqshforge cache pr{TAB}", "sqshforge cache prune "),
        (f"sqshforge pack cpu{TAB}", "sqshforge pack cpu-mamba "),
        (f"sqshforge build cpu{TAB}", "sqshforge build cpu-mamba "),
        (f"sqshforge outd{TAB}cpu{TAB}", "sqshforge outdated cpu-mamba "),
        (f"sqshforge pack x --pro{TAB}arc{TAB}", "sqshforge pack x --profile archive "),
        (f"sqshforge build x --engine b{TAB}", "sqshforge build x --engine buildah "),
        (f"sqshforge run x.sqsh --runtime bu{TAB}", "sqshforge run x.sqsh --runtime builtin "),
        (f"sqshforge inspect pac{TAB}m{TAB}", "sqshforge inspect packed/model.sqsh "),
        (f"sqshforge pack cpu-mamba -o pac{TAB}", "sqshforge pack cpu-mamba -o packed/"),
        (f"sqshforge smoke-test cpu{TAB}", "sqshforge smoke-test cpu-mamba "),
        (f"sqshforge smoke-test pac{TAB}m{TAB}", "sqshforge smoke-test packed/model.sqsh "),
        (f"sqshforge status pac{TAB}", "sqshforge status packed/"),
        (f"{SCRIPT} sch{TAB}", f"{SCRIPT} schema "),
    ],
)  # fmt: skip
def test_one_that_fits_is_put_in(shell: Shell, keys: str, line: str) -> None:
    assert shell.completed(keys) == line


def test_all_that_fit_are_offered(shell: Shell) -> None:
    assert shell.completed(f"sqshforge show {ALL}").split()[2:] == TARGETS
    assert shell.completed(f"sqshforge pack x --profile {ALL}").split()[4:] == list(PROFILES)
    assert shell.completed(f"sqshforge vendor x --engine {ALL}").split()[4:] == list(NAMES)


def test_where_nothing_fits_nothing_is_said(shell: Shell) -> None:
    assert shell.completed(f"sqshforge build nosuch{TAB}") == "sqshforge build nosuch"


def test_the_line_to_type_is_in_the_docs(root: Path) -> None:
    assert LINE in (root / "docs" / "README.md").read_text()
