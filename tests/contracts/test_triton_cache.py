"""The patches of Triton 2.2.0's cache, tried on the real wheel: unpatched, ours, and rank 0's."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sqshforge.host.programs import Programs
from tests.conftest import ROOT

pytestmark = pytest.mark.processes

PATCHES = ROOT / "patches/triton-2.2.0"
CACHE = "triton/runtime/cache.py"
HAMMER = ROOT / "tests/support/triton_cache_hammer.py"
# Two ranks; one of them finds the kernel in its own cache and compiles nothing.
RANKS = """
import os, sys, time
from pathlib import Path
import torch.distributed
from triton.runtime.cache import FileCacheManager
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
os.environ["TRITON_CACHE_DIR"] = f"{folder}/{rank}"
if rank == 1:
    (folder / "1/key").mkdir(parents=True)
    (folder / "1/key/kernel.cubin").write_bytes(b"compiled before")
cache = FileCacheManager("key")
(folder / f"ready-{rank}").touch()
if cache.get_file("kernel.cubin") is None:
    cache.put(b"compiled now", "kernel.cubin")
(folder / f"done-{rank}").touch()
time.sleep(60)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content, as pip would install it."""
    folder = tmp_path_factory.mktemp("wheel")
    argv: list[str | Path] = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    Programs().capture([*argv, "--dest", folder, "triton==2.2.0"])
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        names = [name for name in archive.namelist() if "/third_party/" not in name]
        archive.extractall(folder / "site", names)
    file.unlink()
    return folder / "site"


def patched(wheel: Path, name: str, place: Path) -> Path:
    """Return the wheel's content with one of our patches."""
    shutil.copytree(wheel, place, copy_function=os.link)
    argv: list[str | Path] = ["patch", "--fuzz=0", "--strip=2", "--directory", place]
    Programs().capture([*argv, "--input", PATCHES / name])
    return place


@pytest.fixture(scope="module")
def private(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return patched(wheel, "cache-private.patch", tmp_path_factory.mktemp("private") / "site")


@pytest.fixture(scope="module")
def rank0(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return patched(wheel, "cache-rank0.patch", tmp_path_factory.mktemp("rank0") / "site")


def hammered(site: Path, folder: Path, **options: int) -> dict[str, Any]:
    words = [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(
        [sys.executable, HAMMER, *words, folder],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", ["private", "rank0"])
def test_a_patch_says_what_it_makes_of_what(
    name: str, wheel: Path, request: pytest.FixtureRequest
) -> None:
    site: Path = request.getfixturevalue(name)
    header = (PATCHES / f"cache-{name}.patch").read_text().partition("\n--- ")[0]
    shown = re.findall(r"^(?:Before|After): ([0-9a-f]{64})$", header, re.MULTILINE)
    assert shown == [digest(wheel / CACHE), digest(site / CACHE)]


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder in memory: on a disk, each rename onto an existing file would wait for it."""
    with tempfile.TemporaryDirectory(prefix="sqshforge-test-", dir="/dev/shm") as folder:
        yield Path(folder)


def test_the_cache_as_it_is_fails_where_processes_are_alike(wheel: Path, in_memory: Path) -> None:
    found = hammered(wheel, in_memory / "cache", writes=100)
    assert found["writes"] == 6400
    assert found["errors"]["FileNotFoundError"] > 0


@pytest.mark.timeout(600)
@pytest.mark.long
def test_the_patched_cache_never_fails(private: Path, in_memory: Path) -> None:
    """64 processes write a hundred thousand times, and some of them are killed meanwhile."""
    found = hammered(private, in_memory / "cache", writes=1600, kills=30)
    assert (found["writes"], found["errors"], found["torn"]) == (102_400, {}, 0)
    assert len(found["staged"]) <= 30  # only those of the killed processes


def ranks(site: Path, folder: Path) -> list[subprocess.Popen[bytes]]:
    return [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, str(rank), folder],
            env={**os.environ, "PYTHONPATH": str(site)},
        )
        for rank in range(2)
    ]


def awaited(holds: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


@pytest.mark.parametrize(("name", "ends"), [("rank0", False), ("private", True)])
def test_where_one_rank_alone_compiles(
    name: str, ends: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """With rank 0's patch it waits forever for the other rank; with ours it does not."""
    running = ranks(request.getfixturevalue(name), tmp_path)
    try:
        assert awaited(lambda: len(list(tmp_path.glob("ready-*"))) == 2, 60)
        assert awaited((tmp_path / "done-1").exists, 10)
        assert awaited((tmp_path / "done-0").exists, 5) is ends
        assert [process.poll() for process in running] == [None, None]
    finally:
        for process in running:
            process.kill()
            process.wait()


# Errors of network file systems, which a local one never returns.


@pytest.fixture
def module(private: Path) -> Any:
    """The patched file alone."""
    spec = importlib.util.spec_from_file_location("patched_cache", private / CACHE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cache(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return module.FileCacheManager("key")


def failing(call: Callable[..., Any], *errors: int) -> Callable[..., Any]:
    """Return a function that first fails with these errors, then does what `call` does."""
    left = list(errors)

    def wrapped(*arguments: Any) -> Any:
        if left:
            number = left.pop(0)
            raise OSError(number, os.strerror(number))
        return call(*arguments)

    return wrapped


@pytest.mark.parametrize("call", ["replace", "makedirs"])
@pytest.mark.parametrize("number", [errno.EBUSY, errno.ESTALE, errno.ENOENT])
def test_what_passes_is_tried_again(
    number: int, call: str, cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, call, failing(getattr(os, call), number, number))
    path = Path(cache.put(b"compiled", "kernel.cubin"))
    assert path.read_bytes() == b"compiled"
    assert list(path.parent.iterdir()) == [path]


def test_what_does_not_pass_is_an_error_and_leaves_nothing(
    cache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "replace", failing(os.replace, *[errno.ESTALE] * 100))
    with pytest.raises(OSError, match="Stale"):
        cache.put(b"compiled", "kernel.cubin")
    monkeypatch.setattr(os, "replace", failing(os.replace, errno.ENOSPC))
    with pytest.raises(OSError, match="No space"):
        cache.put(b"compiled", "kernel.cubin")
    assert list((tmp_path / "key").iterdir()) == []


def test_who_lost_the_race_takes_the_winner_s(
    cache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key/kernel.cubin").write_bytes(b"compiled")
    monkeypatch.setattr(os, "replace", failing(os.replace, errno.EBUSY))
    assert Path(cache.put(b"compiled", "kernel.cubin")).read_bytes() == b"compiled"


def test_a_file_system_that_refuses_to_clear_up_is_borne(
    cache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "rmdir", failing(os.rmdir, errno.EBUSY))
    assert Path(cache.put("text", "kernel.ttir")).read_text() == "text"


def test_a_cache_that_was_removed_meanwhile_is_made_anew(cache: Any, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "key")
    assert Path(cache.put(b"compiled", "kernel.cubin")).read_bytes() == b"compiled"


@pytest.mark.parametrize("text", ["", '{"child_paths": ["a"', None])
def test_a_group_that_cannot_be_read_is_compiled_once_more(
    text: str | None, cache: Any, tmp_path: Path
) -> None:
    file = tmp_path / "key/__grp__kernel.json"
    if text is None:
        file.mkdir()  # nobody can read it
    else:
        file.write_text(text)
    assert cache.get_group("kernel.json") is None


def test_a_group_is_what_was_put(cache: Any) -> None:
    paths = {name: cache.put(b"x", name) for name in ("kernel.ttir", "kernel.cubin")}
    cache.put_group("kernel.json", paths)
    assert cache.get_group("kernel.json") == paths
