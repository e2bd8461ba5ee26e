"""What a benchmark cannot measure or keep is said at once; nothing that was kept is lost by it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import changes, delta, first_step, pages, rebuild, start
from benchmarks.options import RESULTS
from tests.conftest import ROOT
from tests.support import processes

pytestmark = pytest.mark.processes

NEEDED = ("nbdkit", "nbdfuse", "mksquashfs", "unsquashfs", "cat", "sh")


def benchmark(name: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *words],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )


def refused(done: subprocess.CompletedProcess[str], code: int, *said: str) -> None:
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert all(one in done.stderr for one in said), done.stderr


def without(folder: Path, *programs: str) -> dict[str, str]:
    """A PATH on which the programs are not."""
    folder.mkdir()
    for name in {"squashfuse", "squashfuse_ll", *NEEDED} - set(programs):
        found = shutil.which(name)
        if found:
            (folder / name).symlink_to(found)
    return {"PATH": str(folder)}


@pytest.mark.parametrize("missing", ["squashfuse_ll", "squashfuse"])
def test_a_reader_that_is_not_installed_is_not_measured_by_another(
    tmp_path: Path, missing: str
) -> None:
    words = ("--small", "--reader", missing, "--output", str(tmp_path / "kept"))
    done = benchmark("start", *words, **without(tmp_path / "path", missing))
    refused(done, 3, f"error: the program {missing} is not installed", "fix: ")
    assert not (tmp_path / "kept" / "start.json").exists()


def test_without_a_reader_the_result_that_was_kept_stays(
    tmp_path: Path,
) -> None:
    """As for a user other than root without squashfuse."""
    code = (
        "import os, sys; os.geteuid = lambda: 1000\n"
        "from benchmarks import options, start\n"
        "sys.argv[0] = 'start'; options.run(start.main)\n"
    )
    kept = json.dumps({"images": {"cpu-mamba": "a"}, "rows": [{"target": "cpu-mamba"}]})
    (tmp_path / "start.json").write_text(kept)
    argv = [sys.executable, "-c", code, "--small", "--output", str(tmp_path)]
    environment = {**os.environ, **without(tmp_path / "path", "squashfuse", "squashfuse_ll")}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True)
    refused(done, 3, "error: nothing here mounts a squash file", "fix: ")
    assert (tmp_path / "start.json").read_text() == kept


@pytest.mark.parametrize("name", ["start", "first_step", "delta", "rebuild"])
def test_a_folder_without_the_page_is_refused_before_anything_is_measured(
    tmp_path: Path, name: str
) -> None:
    page = {"start": start, "first_step": first_step, "delta": delta, "rebuild": rebuild}[name].PAGE
    done = benchmark(name, "--small", "--output", str(tmp_path / "new"), "--docs", str(tmp_path))
    refused(done, 2, f"--docs: {tmp_path} has no {page.name}")


def test_a_place_that_cannot_be_a_folder_is_refused_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    done = benchmark("data", "--small", "--output", str(tmp_path / "file"))
    refused(done, 2, f"--output: the folder {tmp_path}/file cannot be made: File exists")


def test_a_small_run_fills_the_page_that_is_asked_for_and_keeps_the_result(tmp_path: Path) -> None:
    for name, module in (("start", start), ("delta", delta)):
        shutil.copy(module.PAGE, tmp_path)
        words = ("--small", "--output", str(tmp_path), "--docs", str(tmp_path))
        more = ("--reader", "squashfuse", "--latency", "0", "--counts") if name == "start" else ()
        done = benchmark(name, *words, *more)
        assert done.returncode == 0, done.stderr
        result = json.loads((tmp_path / f"{name}.json").read_text())
        assert result["rows"]
        assert (tmp_path / module.PAGE.name).read_text() != module.PAGE.read_text()


def test_a_tool_that_was_installed_later_has_empty_cells_for_what_it_did_not_make() -> None:
    rows = [
        {"change": "edit", "order": order, "tool": tool, "file_bytes": 9e6, "bytes": 2e6}
        for order, tool in (("walk", "rsync"), ("hot", "rsync"), ("walk", "zstd"))
    ]
    made: dict[str, Any] = {
        "changes": {"edit": "an edit"},
        "rows": [{**row, "cpu_seconds": 1.0} for row in rows],
    }
    assert delta.shown(made).splitlines()[2:] == [
        "| an edit | folder order | 9 MB | 2 MB, 1.0 s | 2 MB, 1.0 s |",
        "| an edit | hot files first | 9 MB | 2 MB, 1.0 s |  |",
    ]


@pytest.mark.parametrize("name", ["first_step", "delta"])
def test_an_image_that_is_not_packed_yet(tmp_path: Path, name: str) -> None:
    file = tmp_path / "cpu-mamba.sqsh"
    done = benchmark(name, "--file", str(file), "--output", str(tmp_path))
    refused(done, 3, f"error: the squash file {file} is not there", "fix:   make sqsh")


@pytest.mark.parametrize("name", ["hot", "start"])
def test_an_image_that_is_not_packed_yet_in_build(tmp_path: Path, name: str) -> None:
    """In a checkout of its own: other tests pack that of this one."""
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--output", str(tmp_path / "new")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    refused(done, 3, "error: the squash file build/cpu-mamba.sqsh is not there", "fix:   make sqsh")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The packages of an image."""
    found = tmp_path / "tree/usr/local/lib/python3.11/dist-packages"
    facts = found / "huggingface_hub-1.0.dist-info"
    facts.mkdir(parents=True)
    (found / "huggingface_hub.py").touch()
    (facts / "RECORD").write_text("huggingface_hub.py,,\n")
    return found


def test_a_package_is_found_by_the_name_that_indexes_have_for_it(site: Path) -> None:
    assert changes.removed(site, changes.name_of("HuggingFace-Hub==2.0")) == "1.0"
    assert not (site / "huggingface_hub.py").exists()


def test_a_package_that_the_image_does_not_have(tmp_path: Path, site: Path) -> None:
    file = tmp_path / "one.sqsh"
    argv = ["mksquashfs", str(tmp_path / "tree"), str(file), "-quiet", "-no-progress"]
    subprocess.run(argv, check=True, capture_output=True)
    words = ("--file", str(file), "--change", "package", "--output", str(tmp_path / "new"))
    refused(
        benchmark("delta", *words, "--package", "no-such==1.0"),
        2,
        "error: the image has no package no-such to replace by another version",
        "fix:   --package NAME==VERSION",
    )
    refused(benchmark("delta", *words, "--package", "pyyaml"), 2, "'pyyaml' has no version")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("rebuild", "--rounds", "0"), "--rounds must be at least 1"),
        (("throughput", "--steps", "0"), "--steps must be at least 1"),
        (("throughput", "--lengths", "100"), "--models, --lengths: no such run on a "),
        (("throughput", "--output", "no-such/FILE.json"), "--output: the folder no-such is not "),
    ],
)
def test_what_measures_nothing_is_refused(words: tuple[str, ...], said: str) -> None:
    refused(benchmark(*words), 2, said)


def test_models_that_this_machine_does_not_train() -> None:
    other = "mamba-tiny" if torch.cuda.is_available() else "state-spaces/mamba-370m"
    refused(benchmark("throughput", "--models", other), 2, "no such run on a ", ", which has ")


def test_an_agent_that_fails_ends_the_meeting() -> None:
    """Its port is another program's."""
    code = "import sys; from benchmarks import meet; meet.be_agents(*map(int, sys.argv[1:]))"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        argv = [sys.executable, "-c", code, "2", str(other.getsockname()[1]), "0", "1"]
        done = subprocess.run(
            argv, cwd=ROOT, input="go on\n" * 9, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 1
    assert "address already in use" in done.stderr.lower()


def is_make(pid: int) -> bool:
    return processes.command(pid).startswith("make ")


@pytest.mark.root
def test_a_rebuild_that_is_asked_to_end_leaves_no_daemon_and_no_folder() -> None:
    with tempfile.TemporaryDirectory(prefix="end-") as name:  # short: a socket lies in it
        place = Path(name)
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.rebuild", "--engine", "docker", "--small"],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": name},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        daemon = 0
        try:
            deadline = time.monotonic() + 240
            while not any(map(is_make, processes.descendants(process.pid))):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            daemon = int(next(place.glob("sqd-*/pid")).read_text())
            process.terminate()
            assert process.wait(timeout=120) == 128 + signal.SIGTERM
            assert not processes.parent(daemon), "the daemon goes on"
            assert list(place.iterdir()) == []
        finally:
            process.kill()
            if daemon and processes.parent(daemon):
                os.kill(daemon, signal.SIGTERM)


def test_results_that_are_kept_fill_the_page_of_the_rebuild() -> None:
    text = rebuild.PAGE.read_text()
    table = rebuild.shown(rebuild.kept(RESULTS))
    assert pages.fill(text, {"rebuild": table}) == text
