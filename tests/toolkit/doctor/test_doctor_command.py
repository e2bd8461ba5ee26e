"""`sqshforge doctor` and `make doctor` as users call them."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from sqshforge.host.suggest import sudo
from tests.support import checkouts
from tests.support.command_line import sqshforge

pytestmark = pytest.mark.processes


def test_by_command_line() -> None:
    done = sqshforge("doctor", env={"HTTPS_PROXY": "http://127.0.0.1:9"})  # it asks no registry
    assert done.code == 0, done.out + done.err
    assert done.out.splitlines()[-1] == "next: make quickstart"


def in_folder(folder: Path) -> set[Path]:
    """Return everything in a folder, except for what Python compiles."""
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def test_make_doctor_installs_nothing_and_takes_only_the_system_s_python(tmp_path: Path) -> None:
    clone = checkouts.bare(tmp_path / "clone")
    before = in_folder(clone)
    home = tmp_path / "home"
    home.mkdir()
    # A PATH with little but Python: this machine's packages are missing, as on a fresh one.
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "make", "dirname", "id", "cksum", "unshare", "apt-get"):
        (tools / name).symlink_to(shutil.which(name) or f"/usr/bin/{name}")
    # Its own folder has everything else, so a script on the PATH calls it there.
    python = tools / "python3"
    python.write_text('#!/bin/sh\nexec /usr/bin/python3 "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        [tools / "make", "doctor"],
        cwd=clone,
        env={"PATH": str(tools), "HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr  # make's own code for a failed recipe
    assert "Error 3" in done.stderr
    assert "MISSING mksquashfs (packing): not found" in done.stdout
    assert f"fix: {sudo()}apt-get install squashfs-tools" in done.stdout
    assert "MISSING buildah" in done.stdout
    assert done.stdout.splitlines()[-1].endswith(" missing")
    assert in_folder(clone) == before
    assert in_folder(home) == set()


def test_an_old_python_is_reported(tmp_path: Path) -> None:
    clone = checkouts.bare(tmp_path / "clone")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "dirname", "id", "apt-get"):
        (tools / name).symlink_to(shutil.which(name) or f"/usr/bin/{name}")
    python = tools / "python3"
    python.write_text('#!/bin/sh\ncase $2 in *print*) echo "$0 is 3.9.16" ;; *) exit 1 ;; esac\n')
    python.chmod(0o755)
    done = subprocess.run(
        [clone / "setup.sh", "doctor"],
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert f"Python 3.10 or later is needed; {python} is 3.9.16" in done.stderr


def test_the_quickstart_of_a_machine_that_cannot_ends_at_once(tmp_path: Path) -> None:
    for name in ("sh", "python3", "buildah", "mmdebstrap", "gpgv", "unshare"):
        (tmp_path / name).symlink_to(Path(f"/usr/bin/{name}"))
    began = time.monotonic()
    done = sqshforge("quickstart", env={"PATH": str(tmp_path), "ENGINE": "buildah"})
    assert done.code == 3, done.out + done.err
    assert "mksquashfs (packing): not found" in done.err
    assert "apt-get install squashfs-tools" in done.err
    assert time.monotonic() - began < 20
    assert not (tmp_path / "build").exists()


def test_what_is_about_nodes_takes_cluster_and_cluster_takes_slurm(tmp_path: Path) -> None:
    for words in (("--nodes=2",), ("--image", "x.sqsh"), ("--folder", "/tmp"), ("--timeout=9",)):
        done = sqshforge("doctor", *words)
        assert done.code == 2, done.out + done.err
        option = words[0].partition("=")[0]
        assert done.err.splitlines()[0] == f"error: {option} has an effect only with --cluster"
    (tmp_path / "python3").symlink_to("/usr/bin/python3")
    done = sqshforge("doctor", "--cluster", env={"PATH": str(tmp_path)})
    assert done.code == 3 and done.out == ""
    assert "srun and sinfo are not on this machine" in done.err and "login node" in done.err
    assert sqshforge("doctor", "--cluster", "--nodes=0").code == 2


@pytest.mark.parametrize(
    "words", [("doctor", "--cluster", "--timeout"), ("status", "--watch", "--every")]
)
def test_seconds_are_a_number_of_at_most_a_day(words: tuple[str, ...]) -> None:
    for seconds in ("nan", "inf", "1e12", "0"):
        done = sqshforge(*words, seconds)
        assert done.code == 2, done.out + done.err
        assert f"Invalid value for '{words[-1]}'" in done.err
