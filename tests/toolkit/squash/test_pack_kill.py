"""Packers that are killed at any moment, and many at once: never an incomplete file."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from sqshforge.host.locks import exclusive
from sqshforge.host.terminal import Reporter
from tests.support import archives, containers, odd_root, processes

pytestmark = pytest.mark.processes

KILLS = 100
MARK = "SQSHFORGE_TEST_KILLED"


def image(place: Path, code: bytes, size: int) -> str:
    """Make an archive of `size` hardly compressible bytes, and a /sqshforge; its address."""
    rest = random.Random(1)
    files = [archives.file(f"data/{one}", rest.randbytes(size // 16)) for one in range(16)]
    base = archives.layer(archives.folder("etc"), *files)
    top = archives.layer(archives.folder("sqshforge"), archives.file("sqshforge/train.py", code))
    return archives.write(archives.Image([base, top]), "oci-archive", place)


def command(address: str, output: Path) -> list[str]:
    return [sys.executable, "-m", "sqshforge", "pack", address, "-o", str(output)]


@contextmanager
def started(address: str, output: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a packer with a mark that its children have too; none of them outlives the block."""
    environment = {**os.environ, MARK: str(output), "COLUMNS": "1000"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*command(address, output), "--profile", "fast"],
        env=environment,
        stdout=pipe,
        stderr=pipe,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            processes.kill(processes.having({MARK: str(output)}))


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def temporary(folder: Path) -> set[Path]:
    return {path for path in folder.iterdir() if path.suffix == ".tmp"}


def wait_for_end(process: subprocess.Popen[str], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def test_a_packer_killed_at_any_moment_leaves_no_broken_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It alternates between two images that differ in /sqshforge: cold, cached, and overwriting."""
    cache, folder = tmp_path / "cache", tmp_path / "out"
    folder.mkdir()
    monkeypatch.setenv("SQSHFORGE_CACHE", str(cache))
    addresses = [image(tmp_path / name, name.encode(), 4 << 20) for name in ("one", "two")]
    whole, longest = [], 0.0
    for address in addresses:
        begin = time.monotonic()
        with started(address, tmp_path / "whole.sqsh") as process:
            process.communicate(timeout=300)
        longest = max(longest, time.monotonic() - begin)
        whole.append((tmp_path / "whole.sqsh").read_bytes())
    assert whole[0] != whole[1]

    output = folder / "a.sqsh"
    chance = random.Random(2)
    left: set[Path] = set()
    killed = 0
    for index in range(KILLS * 5 // 4):
        earlier = temporary(folder)
        with started(addresses[index % 2], output) as process:
            begin = time.monotonic()
            if index % 5 == 0:  # not killed
                process.wait(300)
            elif index % 5 < 3:  # killed at any moment
                wait_for_end(process, chance.uniform(0.2, 1.0) * longest)
            else:  # killed while writing the file, whenever that is
                while process.poll() is None and not temporary(folder) - earlier:
                    time.sleep(0.001)
                wait_for_end(process, chance.uniform(0.0, 0.05) * longest)
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            else:  # the machine was busier when the time was measured
                longest = max(0.9 * longest, time.monotonic() - begin)
            process.communicate(timeout=300)
            killed += process.returncode == -signal.SIGKILL
            left |= temporary(folder)
            assert not output.exists() or output.read_bytes() in whole
            assert index % 5 or output.with_name("a.sqsh.json").exists()
        if index % 10 == 9:  # pack cold again
            shutil.rmtree(cache, ignore_errors=True)
    assert killed > KILLS / 2
    # For an ordinary user, another process packs, which cleans up.
    assert bool(left) == (os.geteuid() == 0)
    with started(addresses[0], output) as process:
        assert process.communicate(timeout=300) and process.returncode == 0
    assert output.read_bytes() == whole[0]
    assert files(folder) == {"a.sqsh", "a.sqsh.json"}
    assert not [name for name in files(cache) if "tmp" in name]


def test_sixteen_packers_at_once_make_one_file(tmp_path: Path) -> None:
    address, output = image(tmp_path / "image", b"code", 64 << 20), tmp_path / "out/a.sqsh"
    output.parent.mkdir()
    logs = [tmp_path / f"packer-{number}" for number in range(16)]
    wait = f"waiting for another packer of {output}"
    with ExitStack() as held, ExitStack() as packing:
        packing.enter_context(exclusive(output.with_name(".a.sqsh.lock"), "", Reporter(quiet=True)))
        packers = []
        for log in logs:
            err = held.enter_context(log.open("w"))
            out = subprocess.PIPE
            packers.append(
                subprocess.Popen(command(address, output), stdout=out, stderr=err, text=True)
            )
        try:
            assert containers.until(lambda: all(wait in log.read_text() for log in logs), 300)
            packing.close()  # from here on they compete
            said = [packer.communicate(timeout=300)[0] for packer in packers]
        finally:
            processes.kill([packer.pid for packer in packers if packer.poll() is None])
    assert [packer.returncode for packer in packers] == [0] * 16
    assert sorted("packed in" in out for out in said) == [False] * 15 + [True]
    assert sum("up to date" in out for out in said) == 15
    assert files(output.parent) == {"a.sqsh", "a.sqsh.json"}
    assert "sqshforge/train.py" in odd_root.unpacked(output, tmp_path / "found")
