"""A build that ends while mmdebstrap makes its base leaves no mounts, processes or folders."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import checkouts, containers, processes
from tests.support.engines import storage_fixture as storage_fixture

pytestmark = [pytest.mark.processes, pytest.mark.root]

MARK = "SQSHFORGE_TEST_BOOTSTRAP"
# Addresses where no registry answers.
NOWHERE = {"SQSHFORGE_MIRRORS_IMAGES": "docker.io/=localhost:1/ debian:=localhost:1/debian:"}


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files that apt's own user can access."""
    place = Path(tempfile.mkdtemp(prefix="sqshforge-test-"))
    place.chmod(0o755)
    try:
        yield place
    finally:
        for one in reversed(mounted(place)):
            subprocess.run(["umount", "--lazy", one], check=False)
        shutil.rmtree(place)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the checkout that has no base yet."""
    root = checkouts.copy(tmp_path / "x", "RUN true")
    (root / "build/bases").unlink()
    return root


def mounted(place: Path, process: str = "self") -> list[str]:
    """Return what a process sees mounted below a folder."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{process}/mountinfo").read_text().splitlines()
        points = [line.split(" ")[4] for line in lines]
        return [point for point in points if point.startswith(f"{place}/")]
    return []


@contextlib.contextmanager
def building(root: Path, temporary: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {MARK: str(root), "TMPDIR": str(temporary), **NOWHERE}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with checkouts.command(root, "--engine", "buildah") as process:
            yield process


def at_work(process: subprocess.Popen[str], root: Path, temporary: Path) -> bool:
    """Tell whether mmdebstrap has mounted what it configures packages with."""
    if process.poll() is not None:
        raise RuntimeError(process.communicate()[1])
    return any(mounted(temporary, str(pid)) for pid in processes.having({MARK: str(root)}))


def test_a_build_that_ends_in_the_bootstrap_leaves_nothing(
    storage: None, checkout: Path, temporary: Path
) -> None:
    """It is killed with kill -9 first; the next build then removes the folder left behind."""
    with building(checkout, temporary) as process:
        assert containers.until(lambda: at_work(process, checkout, temporary), 600)
        left = {path.name for path in temporary.iterdir()}
        process.kill()
        process.wait()
        assert containers.until(lambda: not processes.having({MARK: str(checkout)}), 60)
        assert mounted(temporary) == []
    with building(checkout, temporary) as process:
        assert containers.until(lambda: at_work(process, checkout, temporary), 600)
        assert left.isdisjoint(path.name for path in temporary.iterdir())
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert processes.having({MARK: str(checkout)}) == []
    assert mounted(temporary) == []
    assert [*temporary.iterdir(), *(checkout / "build/bases").iterdir()] == []
