"""Whatever happens to a job, it continues by itself, or ends with a message that says why.

Every disturbed run must write the losses of the undisturbed one, bit for bit.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress

import pytest

from tests.cluster.conftest import FLAGS, STEPS
from tests.support import processes
from tests.support.site import TIMEOUT, Losses, Site

WATCHED = (*FLAGS, "--hang_seconds=4", "--hang_abort_seconds=12")
SLOW = (*WATCHED, "--num_steps=100000", "--checkpoint_interval=20", "--keep_checkpoints=2")


def test_scancelled_and_submitted_again(site: Site, undisturbed: Losses) -> None:
    first = site.submit("cancelled", *FLAGS, PREFLIGHT="0")
    site.reach("cancelled", 8)
    site.slurm.cancel(first)
    assert site.slurm.wait(first, TIMEOUT) == "CANCELLED"
    assert len(site.losses("cancelled")) < STEPS
    said = site.complete(site.submit("cancelled", *FLAGS, PREFLIGHT="0"))
    assert "resumed from" in said
    assert site.losses("cancelled") == undisturbed


def test_all_processes_of_a_node_are_killed(site: Site, undisturbed: Losses) -> None:
    job = site.submit("killed", *FLAGS, PREFLIGHT="0")
    site.reach("killed", 8)
    running = [processes.command(pid) for pid in site.slurm.processes("n2", job)]
    assert any("training.launch" in one for one in running)
    assert site.ranks(job, "n2")
    assert site.slurm.kill_processes("n2", job)
    said = site.complete(job)
    assert site.slurm.restarts(job) == 1
    assert "exit code 137: requeued" in said and "resumed from" in said
    assert site.losses("killed") == undisturbed


def test_stopped_by_sigterm(site: Site, undisturbed: Losses) -> None:
    """As in a preemption: saved between two checkpoints, requeued, resumed."""
    job = site.submit("stopped", *FLAGS, REQUEUES="0", PREFLIGHT="0")
    site.reach("stopped", 8)
    site.slurm.cancel(job, "--batch", "--signal=TERM")
    said = site.complete(job)
    assert site.slurm.restarts(job) == 1
    assert "asked to stop after step" in said and "exit code 85: requeued" in said
    assert site.losses("stopped") == undisturbed


def test_a_node_is_lost(site: Site, undisturbed: Losses) -> None:
    job = site.submit("lost", *FLAGS)
    site.reach("lost", 8)
    site.slurm.lose("n2")
    site.slurm.until(lambda: site.slurm.restarts(job) == 1, TIMEOUT, "the job is not requeued")
    site.slurm.bring("n2")
    said = site.complete(job)
    assert "resumed from" in said
    assert site.losses("lost") == undisturbed


def test_slurmd_is_stopped(site: Site, undisturbed: Losses) -> None:
    """As in an update of Slurm: the job does not notice."""
    job = site.submit("unwatched", *FLAGS, PREFLIGHT="0")
    site.reach("unwatched", 4)
    site.slurm.stop_slurmd("n2")
    site.slurm.start_slurmd("n2")
    said = site.complete(job)
    assert site.slurm.restarts(job) == 0 and "resumed" not in said
    assert site.losses("unwatched") == undisturbed


def test_a_rank_hangs(site: Site, undisturbed: Losses) -> None:
    job = site.submit("hung", *WATCHED, RESTARTS="0", PREFLIGHT="0")
    site.reach("hung", 8)
    [victim] = site.ranks(job, "n2")
    os.kill(victim, signal.SIGSTOP)
    said = site.complete(job)
    assert "rank 1 hangs" in said and "stacks of rank" in said
    assert "exit code 86: requeued" in said
    assert site.losses("hung") == undisturbed


@pytest.mark.long
def test_the_network_between_the_nodes_is_cut(site: Site, undisturbed: Losses) -> None:
    assert site.slurm.bridge
    job = site.submit("cut", *WATCHED)
    site.reach("cut", 8)
    site.slurm.bridge.cut()
    try:
        # srun gives the other node a minute to end, and as much again to answer.
        site.slurm.until(lambda: site.slurm.restarts(job) == 1, TIMEOUT, "the job does not end")
    finally:
        site.slurm.bridge.repair()
    said = site.complete(job)
    assert "resumed from" in said
    assert site.losses("cut") == undisturbed


def test_the_time_limit(site: Site) -> None:
    job = site.submit("limit", *SLOW, asked=("--time=60", "--signal=B:TERM@30"), PREFLIGHT="0")
    beyond = site.reach_time_limit("limit", job) + 20
    site.go_on_to("limit", beyond)
    site.slurm.cancel(job)
    assert site.slurm.wait(job, TIMEOUT) == "CANCELLED"
    # Run as many steps without a stop; a shorter run would have another schedule.
    other = site.submit("unlimited", *SLOW, PREFLIGHT="0")
    site.go_on_to("unlimited", beyond)
    site.slurm.cancel(other)
    assert site.slurm.wait(other, TIMEOUT) == "CANCELLED"
    assert site.losses("limit")[:beyond] == site.losses("unlimited")[:beyond]


def test_the_newest_checkpoint_is_corrupt(site: Site, undisturbed: Losses) -> None:
    first = site.submit("corrupt", *FLAGS, PREFLIGHT="0")
    site.reach("corrupt", 12)
    site.slurm.cancel(first)
    site.slurm.wait(first, TIMEOUT)
    newest = max(
        (site.place("corrupt") / "checkpoints").glob("step_*_ckp"),
        key=lambda path: int(path.name.split("_")[1]),
    )
    largest = max(newest.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size // 2)
        file.write(b"\xff" * 64)
    said = site.complete(site.submit("corrupt", *FLAGS, PREFLIGHT="0"))
    assert newest.name in said and "WARNING" in said and "resumed from" in said
    assert site.losses("corrupt") == undisturbed


def test_the_disk_is_full(site: Site, undisturbed: Losses) -> None:
    """The old checkpoint is kept, the rest of the new one removed; someone must free space."""
    place = site.small / "full"
    job = site.submit("small/full", *FLAGS, PREFLIGHT="0")
    site.reach("small/full", 4)
    filler = site.small / "filler"
    kept = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    filler.write_bytes(bytes(shutil.disk_usage(site.small).free - kept // 2))
    assert site.slurm.wait(job, TIMEOUT) == "FAILED"
    said = site.slurm.output(job)
    assert site.slurm.exit_code(job) == 2 and "a person has to fix this" in said
    for shown in ("were free there when that failed", "bytes free, but a checkpoint takes"):
        assert shown in said and str(place) in said
    assert [path.name for path in (place / "checkpoints").iterdir()] == ["step_4_ckp"]
    filler.unlink()
    assert "resumed from" in site.complete(site.submit("small/full", *FLAGS, PREFLIGHT="0"))
    assert site.losses("small/full") == undisturbed


def test_the_disk_of_the_log_is_full(site: Site, undisturbed: Losses) -> None:
    """It costs log lines, but no step; the job is stopped, requeued and continues as with space."""
    job = site.submit(
        "unheard", *FLAGS, asked=(f"--output={site.small}/slurm-%j.out",), PREFLIGHT="0"
    )
    site.reach("unheard", 8)
    filler = site.small / "filler"
    try:
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        assert shutil.disk_usage(site.small).free == 0
        site.slurm.cancel(job, "--signal=TERM")
        assert site.slurm.wait(job, TIMEOUT) == "COMPLETED", site.slurm.output(job)
        assert site.slurm.restarts(job) == 1
    finally:
        filler.unlink()
    assert site.losses("unheard") == undisturbed


def test_a_bad_node_is_left_out(site: Site) -> None:
    """Its shared folder is read-only there. The next start has the other node, if that suffices."""
    place = site.place("left-out")
    place.mkdir()
    there = ["nsenter", f"--mount=/proc/{site.slurm.daemons['n2'].pid}/ns/mnt"]
    subprocess.run([*there, "mount", "--bind", place, place], check=True)
    subprocess.run([*there, "mount", "-o", "remount,bind,ro", place], check=True)
    try:
        job = site.submit("left-out", *FLAGS, EXCLUDE="1")
        site.slurm.until(
            lambda: site.slurm.show(job)["ExcNodeList"] == "n2", TIMEOUT, "n2 is asked for"
        )
        # There is no third node: Slurm holds the job until its owner says that one node will do.
        site.slurm.ask("scontrol", "update", f"JobId={job}", "NumNodes=1", "NumTasks=1")
        site.slurm.ask("scontrol", "release", str(job))
        said = site.complete(job)
    finally:
        subprocess.run([*there, "umount", "--lazy", place], check=True)
    assert f"error: {place} is not there, or closed to root (on n2)" in said
    assert "exit code 87: requeued" in said and site.slurm.restarts(job) == 1
    assert said.splitlines()[-1] == "mamba_fsdp: done"
    assert "by sqshforge on n1\n" in said
    assert len(site.losses("left-out")) == STEPS


def test_a_second_job_on_one_folder(site: Site) -> None:
    """Each job has one node, so that both run at the same time."""
    first = site.submit("shared", *SLOW, asked=("--nodes=1",), PREFLIGHT="0")
    site.reach("shared", 20)
    second = site.submit("shared", *SLOW, asked=("--nodes=1",), PREFLIGHT="0")
    assert site.slurm.wait(second, TIMEOUT) == "FAILED"
    assert (site.slurm.exit_code(second), site.slurm.restarts(second)) == (2, 0)
    assert str(first) in site.slurm.output(second)
    assert site.slurm.state(first) == "RUNNING"
    site.slurm.cancel(first)
    site.slurm.wait(first, TIMEOUT)


def test_a_wrong_flag_is_reported_once_and_is_final(site: Site) -> None:
    job = site.submit("wrong", *FLAGS, "--num_step=5")
    assert site.slurm.wait(job, TIMEOUT) == "FAILED"
    assert (site.slurm.exit_code(job), site.slurm.restarts(job)) == (2, 0)
    assert site.slurm.output(job).count("did you mean --num_steps") == 1
