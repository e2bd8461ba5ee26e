"""README's "On a real cluster": one file is copied, and what it contains trains on the nodes.

As root and as an ordinary user, in a folder with nothing but the image, and with neither sqshforge
nor enroot on the PATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.conftest import FLAGS
from tests.support.page_blocks import TYPED, blocks
from tests.support.site import TIMEOUT, Losses, Site
from tests.support.slurm import USER

PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
ROOT = 0
RUN = "checkpoints/mamba_fsdp-trial"  # where a launcher puts a trial by default


@dataclass(frozen=True)
class Person:
    """Someone with a shell in the shared folder, and with nothing from the tests' environment."""

    uid: int
    site: Site  # whose folder is the shared one

    def types(self, command: str) -> str:
        """Run a command line as the person; returns its output."""
        become = ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups"]
        done = subprocess.run(
            [*become, "bash", "-ec", command],
            cwd=self.site.folder,
            env={
                "HOME": str(self.site.folder),
                "PATH": PATH,
                "SLURM_CONF": self.site.slurm.env["SLURM_CONF"],
                "OMP_NUM_THREADS": "1",  # the nodes share one machine's processors
            },
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submits(self, command: str) -> int:
        """Type a command line that ends in `sbatch`; returns the job's number."""
        return int(self.types(command).removeprefix("Submitted batch job "))

    def runtimes(self) -> list[str]:
        """Return the folders of starts in the run's, which hold copies of the image's runtime."""
        return [path.name for path in self.site.place(RUN).glob(".job-*")]

    def left(self) -> set[str]:
        """Return what the user's containers have left in /tmp."""
        found = Path("/tmp").glob("sqshforge-*")
        return {path.name for path in found if path.lstat().st_uid == USER}


def steps(shared: Path) -> list[str]:
    """The commands of README's section, with another folder in place of /fsx."""
    (block,) = (one for one in blocks("README.md", TYPED) if "unsquashfs" in one.text)
    return block.text.replace("/fsx", str(shared)).splitlines()


@pytest.fixture(params=[ROOT, USER], ids=["root", "user"])
def person(request: pytest.FixtureRequest, site: Site) -> Iterator[Person]:
    """Someone in a shared folder with nothing but the image, which root has copied there."""
    shared = Path(tempfile.mkdtemp(prefix="fsx-"))
    try:
        shared.chmod(0o755)
        make, copy, *_ = steps(shared)
        assert make == "make sqsh TARGET=cpu-mamba"  # which `packed_image` has done
        subprocess.run(["bash", "-ec", copy], cwd=site.root, check=True)
        os.chown(shared, request.param, request.param)
        assert not shutil.which("sqshforge", path=PATH) and not shutil.which("enroot", path=PATH)
        yield Person(request.param, Site(site.slurm, shared / site.image.name, shared, site.root))
    finally:
        shutil.rmtree(shared)


def test_the_commands_of_readme(person: Person) -> None:
    site = person.site
    job = person.submits("\n".join(steps(site.folder)[2:]))
    said = site.complete(job)
    assert f"{site.image} by sqshforge on n[1-2]\n" in said
    for node in (0, 1):
        assert f"{node}: training.launch: node {node} of 2: 1 process" in said
    losses = site.losses(RUN)
    assert len(losses) == 80 and losses[-1][1] < 0.8 * losses[0][1]
    found = {path.name for path in site.folder.iterdir()}
    assert found == {site.image.name, f"slurm-{job}.out", "checkpoints"}
    assert {path.lstat().st_uid for path in site.place("checkpoints").rglob("*")} == {person.uid}
    assert not person.runtimes() and not person.left()


def submission(site: Site) -> str:
    """README's last command, with the flags of the other tests' run."""
    return f"{steps(site.folder)[-1]} /dev/stdin {' '.join(map(repr, FLAGS))}"


def test_sigterm_saves_and_the_job_goes_on(person: Person, undisturbed: Losses) -> None:
    job = person.submits(submission(person.site))
    person.site.reach(RUN, 8)
    assert person.runtimes() == [f".job-{job}.0"]
    person.types(f"scancel --batch --signal=TERM {job}")
    said = person.site.complete(job)
    assert person.site.slurm.restarts(job) == 1
    assert "asked to stop after step" in said and "exit code 85: requeued" in said
    assert "resumed from" in said
    assert person.site.losses(RUN) == undisturbed
    assert not person.runtimes() and not person.left()


def test_a_cancelled_job_leaves_no_runtime(person: Person) -> None:
    job = person.submits(submission(person.site))
    person.site.reach(RUN, 4)
    person.types(f"scancel {job}")
    assert person.site.slurm.wait(job, TIMEOUT) == "CANCELLED"
    assert not person.runtimes() and not person.left()
