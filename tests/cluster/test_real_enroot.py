"""Launchers under the real enroot and pyxis, as an ordinary user: `make test-enroot`.

pyxis is Slurm's plugin spank_pyxis.so, found in Slurm's folder of plugins or where PYXIS says.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import FLAGS
from tests.support import slurm_config
from tests.support.site import TIMEOUT, Losses, Site
from tests.support.slurm import USER, Cluster, cluster

pytestmark = [pytest.mark.enroot, pytest.mark.root, pytest.mark.timeout(3000)]

PYXIS = "pyxis"
MOUNTED = "pyxis, use_squashfuse=1"
ENROOT = "enroot"
TRACKED = "enroot, proctrack/cgroup"  # Slurm finds every process of a step, whatever its parent
FREEZER = Path("/sys/fs/cgroup/freezer")
SLOW = (*FLAGS, "--num_steps=100000", "--checkpoint_interval=20", "--keep_checkpoints=2")


def plugin() -> Path:
    """Return Slurm's plugin; if there is none, fails and says what to do."""
    known = [Path(os.environ["PYXIS"])] if os.environ.get("PYXIS") else []
    found = [*known, *Path("/usr").glob("lib*/**/slurm*/spank_pyxis.so")]
    return found[0] if found else pytest.fail("no spank_pyxis.so; PYXIS=FILE, or -k 'not pyxis'")


@pytest.fixture(scope="module", params=[ENROOT, TRACKED, PYXIS, MOUNTED])
def site(request: pytest.FixtureRequest, packed_image: Path, root: Path) -> Iterator[Site]:
    """Two nodes with a runtime, and a shared folder of the user's with the image in it."""
    shared = Path(tempfile.mkdtemp(prefix="fsx-"))
    shared.chmod(0o755)
    os.chown(shared, USER, USER)
    image = Path(shutil.copy(packed_image, shared))
    settings = []
    planted = {}
    if request.param == TRACKED:
        settings.append("ProctrackType=proctrack/cgroup")
        planted = dict.fromkeys(slurm_config.NODES, with_cgroups)
    if request.param in (PYXIS, MOUNTED):
        stack = shared / "plugstack.conf"
        mounted = " use_squashfuse=1" if request.param == MOUNTED else ""
        stack.write_text(f"required {plugin()} runtime_path={shared}/run{mounted}\n")
        settings.append(f"PlugStackConfig={stack}")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("XDG_RUNTIME_DIR", raising=False)
            with cluster(kill_wait=20, apart=True, settings=settings, planted=planted) as slurm:
                yield Site(slurm, image, shared, root)
    finally:
        shutil.rmtree(shared)
        for node in slurm_config.NODES if planted else ():
            for place, _, _ in os.walk(FREEZER / f"slurm_{node}", topdown=False):
                Path(place).rmdir()


def with_cgroups(slurm: Cluster) -> str:
    """Return shell lines that give a node, whose /sys is its own, this machine's cgroups v1."""
    (slurm.folder / "cgroup.conf").write_text(
        "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n"
    )
    return """
    mount -t tmpfs tmpfs /sys/fs/cgroup
    while IFS=: read -r number kind path; do
        case $kind in
        name=*) options=none,$kind ;;
        ?*) options=$kind ;;
        *) continue ;;
        esac
        mkdir "/sys/fs/cgroup/${kind#name=}"
        mount -t cgroup -o "$options" cgroup "/sys/fs/cgroup/${kind#name=}"
    done < /proc/self/cgroup
    """


@pytest.fixture(scope="module")
def undisturbed(site: Site) -> Losses:
    said = site.complete(submit(site, "undisturbed"))
    assert f"{site.image} by {runtime(site)} on n[1-2]\n" in said
    for node in (0, 1):
        assert f"{node}: training.launch: node {node} of 2: 1 process" in said
    assert "hostname" not in said and "step 1/" in said
    return site.losses("undisturbed")


def runtime(site: Site) -> str:
    return PYXIS if (site.folder / "plugstack.conf").exists() else ENROOT


def submit(site: Site, run: str, *flags: str, asked: tuple[str, ...] = (), **env: str) -> int:
    """Submit as the user; enroot's data lies on the nodes' own disks."""
    script = site.folder / "launcher.sbatch"
    script.write_text(site.launcher("mamba_fsdp"))
    become = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    local = site.slurm.local
    folders = {f"XDG_{one}": f"{local}/{one}" for one in ("DATA_HOME", "CACHE_HOME", "RUNTIME_DIR")}
    done = subprocess.run(
        [*become, "sbatch", "--parsable", "--nodes=2", *asked, str(script), *FLAGS, *flags],
        cwd=site.folder,
        env={
            **site.slurm.env,
            **folders,
            "HOME": str(site.folder),
            "IMAGE": str(site.image),
            "CHECKPOINTS": str(site.place(run)),
            "OMP_NUM_THREADS": "1",
            **env,
        },
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def cancel(site: Site, job: int, *words: str) -> None:
    site.slurm.cancel(job, *words)


def test_a_stop_saves(site: Site, undisturbed: Losses) -> None:
    """As at a time limit, only the launcher is signaled, and no process of a container."""
    job = submit(site, "stopped", REQUEUES="0")
    site.reach("stopped", 8)
    cancel(site, job, "--batch", "--signal=TERM")
    said = site.complete(job)
    assert site.slurm.restarts(job) == 1
    assert "asked to stop after step" in said and "exit code 85: requeued" in said
    assert site.losses("stopped") == undisturbed


def test_the_time_limit(site: Site) -> None:
    """On Slurm's own signal: the losses are those of a run without a limit."""
    job = submit(site, "limit", *SLOW, asked=("--time=60", "--signal=B:TERM@30"))
    beyond = site.reach_time_limit("limit", job) + 20
    end_at(site, "limit", job, beyond)
    end_at(site, "unlimited", submit(site, "unlimited", *SLOW), beyond)
    assert site.losses("limit")[:beyond] == site.losses("unlimited")[:beyond]


def end_at(site: Site, run: str, job: int, step: int) -> None:
    site.go_on_to(run, step)
    cancel(site, job)
    assert site.slurm.wait(job, TIMEOUT) == "CANCELLED"


def test_a_rank_that_is_killed(site: Site, undisturbed: Losses) -> None:
    job = submit(site, "killed")
    site.reach("killed", 8)
    assert site.slurm.kill_processes("n2", job)
    said = site.complete(job)
    assert site.slurm.restarts(job) == 1 and "resumed from" in said
    assert site.losses("killed") == undisturbed


def test_scancel_is_the_end(site: Site, undisturbed: Losses) -> None:
    """Submitting it again resumes it; its folder has a name that shells and fstab would split."""
    run = "cancelled [1] run"
    job = submit(site, run)
    site.reach(run, 8)
    cancel(site, job)
    assert site.slurm.wait(job, TIMEOUT) == "CANCELLED"
    assert "requeued, to go on" not in site.slurm.output(job)
    assert "resumed from" in site.complete(submit(site, run))
    assert site.losses(run) == undisturbed


def test_what_cannot_work_is_reported_before(site: Site) -> None:
    """The error message is ours, not the runtime's."""
    job = submit(site, "refused", MOUNTS="/nonexistent:/data")
    assert site.slurm.wait(job, TIMEOUT) == "FAILED"
    assert (site.slurm.exit_code(job), site.slurm.restarts(job)) == (2, 0)
    shown = "error: there is no /nonexistent, which is to be mounted (on n1 n2)"
    assert shown in site.slurm.output(job)
