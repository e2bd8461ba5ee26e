"""A docker daemon that fails in the middle of a build for a reason of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from sqshforge.engine import Build
from sqshforge.engine.docker import Docker
from sqshforge.errors import WorkError
from sqshforge.host.programs import Programs
from tests.support import docker_api

pytestmark = pytest.mark.processes

CUT = "rpc error: code = Internal desc = unexpected EOF"
# Of Docker 29.1 with containerd's store, while an image of the same name is replaced.
REMOVED = (
    'failed to solve: failed to prepare extraction snapshot "extract-1-a sha256:1": '
    "parent snapshot sha256:2 does not exist: not found"
)


def build(folder: Path, words: list[str]) -> list[str]:
    """Build with a client whose calls fail with these words, then succeed; returns the report."""
    client = folder / "docker"
    for number, said in enumerate(words):
        (folder / f"say{number}").write_text(said)
    client.write_text(
        f'#!/bin/sh\ncd "{folder}"\nn=$(ls called* 2>&- | wc -l)\ntouch "called$n"\n'
        'test -e "say$n" || exit 0\ncat "say$n"\nexit 1\n'
    )
    client.chmod(0o755)
    shown: list[str] = []
    with docker_api.answering({"/info": b"{}"}):
        Docker(client, Programs()).build(Build(context=folder, name="x"), shown.append)
    return shown


def calls(folder: Path) -> int:
    return len(list(folder.glob("called*")))


@pytest.mark.parametrize("said", [CUT, REMOVED])
def test_the_build_is_tried_once_more(said: str, tmp_path: Path) -> None:
    assert "once more" in build(tmp_path, [said])[-1]
    assert calls(tmp_path) == 2


def test_it_is_not_tried_for_ever(tmp_path: Path) -> None:
    with pytest.raises(WorkError, match="unexpected EOF"):
        build(tmp_path, [CUT] * 3)
    assert calls(tmp_path) == 2


@pytest.mark.parametrize("said", ["exit code: 7", "gzip: stdin: unexpected EOF"])
def test_a_step_that_fails_is_not_tried_again(said: str, tmp_path: Path) -> None:
    with pytest.raises(WorkError, match=said):
        build(tmp_path, [said])
    assert calls(tmp_path) == 1
