"""Which tests may be skipped, and for whom: any other skipped test fails the run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support.ordinary_user import existing

pytestmark = pytest.mark.processes

TESTS = """
import pytest

@pytest.mark.hardware("a moon")
def test_of_hardware():
    pytest.skip("no moon")

@pytest.mark.root
def test_of_root():
    pass

def test_of_everybody():
    pass
"""
SKIPPED = """
import pytest

def test_of_nobody():
    pytest.skip("not today")
"""


def argv(place: Path, text: str) -> list[str]:
    """Return the command of a pytest run, with this project's settings, on one file of tests."""
    (place / "test_some.py").write_text(text)
    words = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    return [*words, "-c", str(ROOT / "pyproject.toml"), str(place / "test_some.py")]


def test_only_what_takes_hardware_may_be_skipped_by_root(as_root: None, tmp_path: Path) -> None:
    done = subprocess.run(argv(tmp_path, TESTS), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "3 tests: 2 passed, 0 failed, 1 skipped" in done.stdout
    done = subprocess.run(argv(tmp_path, SKIPPED), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "test_of_nobody: skipped, and names no missing hardware" in done.stdout


def test_what_takes_root_is_left_out_for_a_user_and_reported(as_root: None) -> None:
    with existing() as user:
        done = user.run(*argv(user.home, TESTS))
        assert done.returncode == 0, done.stdout
        assert "3 tests: 1 passed, 0 failed, 2 skipped" in done.stdout
        assert "1 of the skipped tests take root; to run them: sudo make test-root" in done.stdout
        assert user.run(*argv(user.home, SKIPPED)).returncode == pytest.ExitCode.TESTS_FAILED


def test_what_takes_enroot_is_left_out_unless_asked_for_and_then_needs_it(tmp_path: Path) -> None:
    text = """
import pytest

@pytest.mark.enroot
def test_of_enroot():
    pass

def test_of_everybody():
    pass
"""
    enroot = tmp_path / "programs" / "enroot"
    enroot.parent.mkdir()
    variables = {**os.environ, "PATH": str(enroot.parent)}

    def run(*words: str) -> tuple[int, str]:
        command = [*argv(tmp_path, text), *words]
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    for words in ((), ("-m", "not root"), ("-m", "not enroot")):
        code, said = run(*words)
        assert code == 0 and "1 passed, 0 failed, 0 skipped" in said, said
    code, said = run("-m", "enroot")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "enroot is not on the PATH: the tests marked enroot take it" in said
    enroot.write_text("#!/bin/sh\n")
    enroot.chmod(0o755)
    code, said = run("-m", "enroot")
    assert code == 0 and "1 tests: 1 passed" in said, said


def test_a_test_that_starts_a_process_is_marked(tmp_path: Path) -> None:
    text = """
import pytest, subprocess

@pytest.fixture
def started():
    subprocess.run(["true"], check=True)

def test_unmarked():
    subprocess.run(["true"], check=True)

def test_by_a_fixture(started):
    pass

@pytest.mark.processes
def test_marked(started):
    pass
"""
    done = subprocess.run(argv(tmp_path, text), cwd=ROOT, capture_output=True, text=True)
    assert "3 tests: 1 passed, 2 failed, 0 skipped" in done.stdout
    assert done.stdout.count("starts a process (subprocess.Popen): mark the test") >= 2
