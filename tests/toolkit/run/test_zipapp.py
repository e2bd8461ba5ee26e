"""The runtime that an image carries: one file, which the nodes' own Python starts."""

from __future__ import annotations

import ast
import io
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqshforge.host.programs import Programs, Result
from sqshforge.run import zipapp
from tests.support import containers, tiny_root

pytestmark = pytest.mark.processes

OLDEST = (3, 9)
PYTHONS = [f"python3.{minor}" for minor in range(9, 15)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runtime")


@pytest.fixture(scope="module")
def carried(place: Path) -> Path:
    """The file, alone in a folder."""
    path = place / "alone" / zipapp.NAME
    path.parent.mkdir()
    path.write_bytes(zipapp.runtime())
    return path


@pytest.fixture(scope="module")
def tiny(place: Path) -> Path:
    return tiny_root.sqsh(place / "tiny")


@pytest.fixture(autouse=True)
def nothing_stays(place: Path) -> Iterator[None]:
    with containers.watched(place):
        yield


def sources() -> dict[str, str]:
    with zipfile.ZipFile(io.BytesIO(zipapp.runtime())) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py")]
        return {name: archive.read(name).decode() for name in names}


def test_equal_sources_give_equal_bytes(root: Path) -> None:
    code = "import sys; from sqshforge.run import zipapp; sys.stdout.buffer.write(zipapp.runtime())"
    for zone in ("UTC", "Asia/Tokyo"):
        env = {**os.environ, "TZ": zone, "PYTHONHASHSEED": "7"}
        argv = [sys.executable, "-c", code]
        assert subprocess.check_output(argv, cwd=root, env=env, umask=0o077) == zipapp.runtime()


def test_it_holds_all_that_it_imports() -> None:
    """Including imports in code that no test reaches."""
    held = sources()
    names = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in held}
    for name, text in held.items():
        for node in ast.walk(ast.parse(text)):
            imported = []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.module and not node.level
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                imported = [one for one in inner if one in names] or [node.module]
            for one in imported:
                assert one in names or one.partition(".")[0] in sys.stdlib_module_names, name


def test_the_oldest_python_can_read_it() -> None:
    for name, text in sources().items():
        ast.parse(text, name, feature_version=(3, 6) if name == "__main__.py" else OLDEST)


def found() -> list[str]:
    """Return this machine's interpreters that it supports, according to themselves."""
    answers = {}
    for name in [*PYTHONS, "python3", sys.executable]:
        if Programs().which(name):
            code = "import sys; print(sys.version_info >= (3, 9) and sys.executable)"
            done = Programs().attempt([name, "-I", "-S", "-c", code])
            answers[done.out.strip()] = done.code == 0
    return [path for path, works in answers.items() if works and path != "False"]


@pytest.mark.parametrize("python", found())
def test_a_command_runs_by_the_nodes_python(python: str, carried: Path, tiny: Path) -> None:
    """The launchers call it from anywhere, with any PYTHONPATH."""
    argv = [python, "-I", "-S", str(carried), "--mount", f"{carried.parent}:/seen"]
    argv += ["--env=A=b c", str(tiny), "--", "sh", "-c", 'ls /seen; echo "$A" "$@"; exit 7', "x"]
    done = subprocess.run(
        [*argv, "--", "--env"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(carried.parent / "none")},
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (7, f"{zipapp.NAME}\nb c -- --env\n"), done.stderr


def test_an_older_python_is_reported(carried: Path) -> None:
    code = "import runpy, sys; sys.version_info = (3, 8, 1, 'final', 0)\n"
    code += "runpy.run_path(sys.argv[1], run_name='__main__')"
    done = Programs().attempt([sys.executable, "-c", code, carried])
    assert done.code == 3
    assert done.err == (
        f"error: sqshforge's runtime needs Python 3.9 or later; {sys.executable} is 3.8\n"
        "  fix:   put a newer python3 first on the PATH of every node\n"
    )


def both(carried: Path, *words: str | Path) -> tuple[Result, Result]:
    """Run the file and `sqshforge run` with the same words; returns both results."""
    ours = Programs().attempt([sys.executable, "-I", "-S", carried, *words])
    return ours, Programs().attempt([sys.executable, "-m", "sqshforge", "run", *words])


def test_it_does_what_sqshforge_run_does(carried: Path, tiny: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn.sqsh"
    torn.write_bytes(tiny.read_bytes()[:5000])
    mount = ("--mount", f"{tmp_path}:/seen:ro")
    for words, code in (
        ((tiny, "--", "sh", "-c", 'echo "$@"', "x", "a", "--", "b"), 0),
        ((tiny, *mount, "--env", "A=1", "--env=A=2", "--", "sh", "-c", "ls /seen; echo $A"), 0),
        ((tiny, "ls"), 0),
        ((tiny, "--", "ls", "/no"), 2),
        ((tiny, "--", "no-such-program"), 127),
        ((tiny, "--", "sh", "-c", "kill -TERM $$"), -signal.SIGTERM),
        ((tmp_path / "none.sqsh", "--", "true"), 2),
        ((carried, "--", "true"), 2),
        ((torn, "--", "true"), 2),
        (("--mount", "/nowhere:/x", tiny, "--", "true"), 2),
        (("--mount=relative", tiny, "--", "true"), 2),
        (("--env=A", tiny, "--", "true"), 2),
    ):
        ours, theirs = both(carried, *words)
        assert (ours.code, ours.out, ours.err) == (theirs.code, theirs.out, theirs.err), words
        assert ours.code == code, words


def test_wrong_words_are_reported_with_the_usage(carried: Path, tiny: Path) -> None:
    for words in ((), ("--mounts=/a:/b", tiny, "--", "true"), (tiny, "--mount")):
        ours, theirs = both(carried, *words)
        assert ours.code == theirs.code == 2
        assert ours.err.startswith("usage: sqshforge-run.pyz") and "Traceback" not in ours.err
