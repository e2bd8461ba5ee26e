"""The built-in runtime and a host's NVIDIA driver, whose files a stand-in provides.

The stand-in for nvidia-container-cli accepts its options and mounts a file into the root, as the
real one does. The driver's device is in a copy of /dev that only the test sees.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqshforge.image.enroot import ImageConfig
from tests.support import containers, tiny_root

pytestmark = [pytest.mark.processes, pytest.mark.root]

CUDA = (
    "PATH=/usr/bin",
    "NVIDIA_VISIBLE_DEVICES=all",
    "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    "NVIDIA_REQUIRE_CUDA=cuda>=12.1 brand=tesla,driver>=470",
)
LIBRARY = "/usr/lib/libcuda.so.1"
CLI = """#!/bin/sh
printf '%s\\n' "$@" > {words}
for root; do :; done
touch "$root{library}"
mount --bind {driver} "$root{library}"
"""
FAILING = """#!/bin/sh
echo 'nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.1' >&2
exit 1
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def cuda(images: Path) -> Path:
    return tiny_root.sqsh(images / "cuda", ImageConfig(reference="cuda", env=CUDA))


@pytest.fixture(autouse=True)
def nothing_stays(images: Path) -> Iterator[None]:
    with containers.watched(images):
        yield


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """The file where the stand-in writes its arguments."""
    return tmp_path / "words"


def start(
    image: Path,
    place: Path,
    *command: str,
    cli: str = "",
    has_driver: bool = True,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Start a command on a host with a driver, and with nvidia-container-cli if it is given."""
    programs = place / "programs"
    programs.mkdir()
    if cli:
        driver = place / "libcuda"
        driver.write_text("the host's driver\n")
        path = programs / "nvidia-container-cli"
        path.write_text(cli.format(words=place / "words", library=LIBRARY, driver=driver))
        path.chmod(0o755)
    argv = [*containers.argv_by(image, *command, fuse=True)]
    if has_driver:
        argv = [*containers.with_driver(place / "dev"), *argv]
    return subprocess.run(
        [str(word) for word in argv],
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", **variables},
        capture_output=True,
        text=True,
    )


def test_the_driver_is_brought_in(cuda: Path, tmp_path: Path, words: Path) -> None:
    """It is called like in enroot's hook, with the image's requirements of the driver."""
    done = start(cuda, tmp_path, "cat", LIBRARY, cli=CLI)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the host's driver\n", "")
    *options, root = words.read_text().splitlines()
    ldconfig = options.pop(3)
    assert ldconfig.startswith("--ldconfig=@/") and ldconfig.endswith("ldconfig")
    assert options == [
        "--user",
        "configure",
        "--no-cgroups",
        "--device=all",
        "--compute",
        "--utility",
        "--require=cuda>=12.1 brand=tesla,driver>=470",
    ]
    assert not Path(root).exists()  # it was in the container's own mounts


def test_the_hosts_variables_choose(cuda: Path, tmp_path: Path, words: Path) -> None:
    done = start(
        cuda,
        tmp_path,
        "pwd",
        cli=CLI,
        NVIDIA_VISIBLE_DEVICES="0,1",
        NVIDIA_DRIVER_CAPABILITIES="all",
        NVIDIA_DISABLE_REQUIRE="1",
    )
    assert done.returncode == 0, done.stderr
    said = words.read_text().splitlines()
    assert "--device=0,1" in said and "--video" in said and "--compat32" in said
    assert not any(word.startswith("--require") for word in said)


@pytest.mark.parametrize(
    ("image", "has_driver", "devices"),
    [("cuda", False, "all"), ("cuda", True, "void"), ("cuda", True, ""), ("plain", True, None)],
)
def test_it_is_left_out(
    images: Path,
    cuda: Path,
    tmp_path: Path,
    words: Path,
    image: str,
    has_driver: bool,
    devices: str | None,
) -> None:
    """That is the case without a driver, or if no devices are asked for."""
    file = cuda if image == "cuda" else tiny_root.sqsh(images / image)
    variables = {} if devices is None else {"NVIDIA_VISIBLE_DEVICES": devices}
    done = start(file, tmp_path, "pwd", cli=CLI, has_driver=has_driver, **variables)
    assert (done.returncode, done.stderr) == (0, "") and not words.exists()


def test_that_no_gpu_will_be_seen_is_said(cuda: Path, tmp_path: Path) -> None:
    done = start(cuda, tmp_path, "pwd")
    assert done.returncode == 0 and done.stdout == "/\n"
    assert "warning: no GPU is seen in the container: nvidia-container-cli is not" in done.stderr
    assert "fix:   install it" in done.stderr


def test_a_driver_that_is_too_old_is_an_error(cuda: Path, tmp_path: Path) -> None:
    done = start(cuda, tmp_path, "pwd", cli=FAILING)
    assert (done.returncode, done.stdout) == (1, "")
    assert "requirement error: unsatisfied condition: cuda>=12.1" in done.stderr
    assert "NVIDIA_VISIBLE_DEVICES=void" in done.stderr


def test_a_part_that_no_driver_has_is_an_error(cuda: Path, tmp_path: Path, words: Path) -> None:
    done = start(cuda, tmp_path, "pwd", cli=CLI, NVIDIA_DRIVER_CAPABILITIES="compute,games")
    assert done.returncode == 1 and "'games'" in done.stderr and not words.exists()
