"""`sqshforge smoke-test`, whose findings come from the image, so they may be anything."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqshforge.host.programs import Programs, Result
from sqshforge.run import smoke_test
from tests.support import containers, tiny_root

pytestmark = pytest.mark.processes

CHECK = {"name": "one", "ok": True, "seconds": 0.5, "detail": "fine", "losses": [2, 1]}


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path) -> Iterator[None]:
    with containers.watched(tmp_path):
        yield


def prove(place: Path, script: str) -> Result:
    """Smoke-test an image in which Python is a shell script."""

    def change(root: Path) -> None:
        python = root / "usr/bin/python3"
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)

    image = tiny_root.sqsh(place / "image", change=change)
    argv: list[str | Path] = [sys.executable, "-m", "sqshforge", "smoke-test", image, "--json"]
    return Programs().attempt(argv, timeout=120)


def said(findings: object) -> str:
    return f"echo {shlex.quote(json.dumps(findings))}"


def test_an_image_of_another_machine_is_reported_before_it_is_started(tmp_path: Path) -> None:
    image = tiny_root.sqsh(tmp_path / "image", change=tiny_root.of_another_machine)
    argv: list[str | Path] = [sys.executable, "-m", "sqshforge", "smoke-test", image]
    done = Programs().attempt(argv, timeout=120)
    assert done.code == 2
    assert done.err.startswith("error: the image is for linux/")
    assert "make sqsh TARGET=... PLATFORM=linux/" in done.err


@pytest.mark.parametrize("ok", [True, False])
def test_the_findings_are_those_of_the_program_in_the_image(ok: bool, tmp_path: Path) -> None:
    findings = {"ok": ok, "checks": [{**CHECK, "ok": ok}]}
    done = prove(tmp_path, f"echo working >&2; {said(findings)}; exit {int(not ok)}")
    assert done.code == int(not ok), done.err
    found = json.loads(done.out)
    assert found["ok"] is ok
    figures = {"figures": {"losses": [2, 1]}}
    assert found["checks"] == [
        {"name": "one", "ok": ok, "seconds": 0.5, "detail": "fine", **figures}
    ]


@pytest.mark.parametrize(
    "script",
    [
        "exit 0",
        said({"ok": True, "checks": 5}),
        said({"ok": True, "checks": [1]}),
        said({"checks": []}),
        said({"ok": 1, "checks": []}),
        said({"ok": True, "checks": [{"name": "one"}]}),
        said({"ok": True, "checks": [{**CHECK, "seconds": "soon"}]}),
        said({"ok": True, "checks": [{**CHECK, "seconds": float("inf")}]}),
        said({"ok": True, "checks": [{**CHECK, "name": None}]}),
        "yes [ | head -n 100000",
        "yes 1 | head -n 2000000; yes said | head -n 100000 >&2",  # more than the pipes hold
        "echo '{\"ok\": '; yes 0 | head -c 100000000",
    ],
    ids=lambda script: script[-24:],
)
def test_what_are_no_findings_is_one_error(script: str, tmp_path: Path) -> None:
    done = prove(tmp_path, f"echo last words >&2; {script}")
    assert done.code == 1, done.err
    what = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert what == ["error: the smoke test did not run to its end (exit code 0)"], done.err
    assert "  where: python3 -m training.smoke --json, inside " in done.err
    assert len(done.err.splitlines()) < 20 and "Traceback" not in done.err


@pytest.mark.parametrize("record", ["[" * 100_000, "7", '{"key": "k"}', '{"key": "k", "ok": 1}'])
def test_a_record_that_is_none_is_not_recalled(record: str, tmp_path: Path) -> None:
    (tmp_path / "x.sqsh.smoke.json").write_text(record)
    assert smoke_test.recall(tmp_path / "x.sqsh", "k") is None


def test_an_outcome_is_recalled_for_its_file_alone(tmp_path: Path) -> None:
    check = smoke_test.Check("one", True, 0.5, "fine", {"losses": [2, 1]})
    smoke_test.remember(tmp_path / "x.sqsh", "k", smoke_test.Outcome(True, 2.0, (check,)))
    known = smoke_test.recall(tmp_path / "x.sqsh", "k")
    assert known == smoke_test.Outcome(True, 2.0, (check,), remembered=True)
    assert smoke_test.recall(tmp_path / "x.sqsh", "other") is None
    assert smoke_test.recall(tmp_path / "y.sqsh", "k") is None


@pytest.mark.parametrize(
    ("line", "percent", "words"),
    [
        ("[6 of 14, 40%] import torch", 40, "6 of 14, 6 s left: import torch"),
        ("[2 of 14, 0%] versions", 0, "2 of 14: versions"),  # too early for an estimate
        ("step 1 | loss 5.5", None, "step 1 | loss 5.5"),
        ("[2 of 3, 900%] x", None, "[2 of 3, 900%] x"),
    ],
)
def test_how_much_is_done_and_left(line: str, percent: float | None, words: str) -> None:
    assert smoke_test.progress(line, 4.0) == (percent, words)
