"""Requests to stop a launcher, and how often a job is started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contracts.test_launcher_faults import refused
from tests.contracts.test_launcher_faults import shell as shell
from tests.support.launcher_shell import SCONTROL, Shell

pytestmark = pytest.mark.processes


def test_a_request_to_stop_before_anything_runs(shell: Shell) -> None:
    code, said = shell.run(CHECK_MEANWHILE="kill -TERM $PPID", SLURM_RESTART_COUNT="9")
    assert code == 85 and "exit code 85: requeued" in said and not shell.called.exists()


@pytest.mark.parametrize("asked", ["CHECK_MEANWHILE", "MEANWHILE"])
def test_a_request_to_stop_at_every_start(shell: Shell, asked: str) -> None:
    """It happens if the time limit is shorter than the lead time of the request to stop."""
    request = "kill -TERM $PPID; sleep 0.5"
    for starts in range(3):
        env = {asked: request, "SLURM_RESTART_COUNT": str(starts), "REQUEUES": "2"}
        code, said = shell.run(SRUN_CODE="143", NOT_STARTED="1", **env)
        assert code == 85 and "asked to stop before anything has started;" in said, said
        assert ("exit code 85: requeued" in said) == (starts < 2), said
    assert "exit code 85: given up after 2 restarts" in said
    assert Path(f"{shell.called}.scontrol").read_text() == "requeue incomplete 7\n" * 2


# A request to stop is written to a file for the nodes; nothing is signaled.


STOPPED = "kill -TERM $PPID; until [[ -s $CHECKPOINTS/.job-7.{starts}/stop ]]; do sleep 0.05; done"


@pytest.mark.parametrize("code", ["85", "1"])
def test_a_request_to_stop(shell: Shell, code: str) -> None:
    """It is requeued, even without time to save, and however often it has been before."""
    got, said = shell.run(
        SRUN_CODE=code,
        SLURM_RESTART_COUNT="9",
        MEANWHILE=STOPPED.format(starts=9),
    )
    assert got == int(code) and said.count("asked to stop: the ranks save a checkpoint") == 1
    assert f"exit code {code}: requeued" in said
    assert Path(f"{shell.called}.scontrol").read_text() == "requeue incomplete 7\n"


def test_a_request_to_stop_on_a_full_disk(shell: Shell) -> None:
    """The ranks do not learn of it; Slurm ends them, and the job is requeued nevertheless."""
    shell.program("sqshforge")
    full = "$CHECKPOINTS/.job-7.0/stop; /bin/ln -s /dev/full $CHECKPOINTS/.job-7.0/stop"
    code, said = shell.run(SRUN_CODE="137", MEANWHILE=f"rm {full}; kill -TERM $PPID; sleep 0.5")
    assert code == 137 and "exit code 137: requeued" in said, said
    assert "warning: the request does not reach the ranks: the disk of" in said
    assert Path(f"{shell.called}.scontrol").read_text() == "requeue incomplete 7\n"


def test_a_job_that_is_cancelled_is_not_requeued(shell: Shell) -> None:
    """Slurm signals this script, too; the ranks may save, but that is all."""
    code, said = shell.run(
        SRUN_CODE="85", JOB_STATE="COMPLETING", MEANWHILE=STOPPED.format(starts=0)
    )
    assert code == 85 and "exit code 85: it is not requeued, as Slurm says COMPLETING" in said
    assert not Path(f"{shell.called}.scontrol").exists()


def test_done_before_it_could_stop(shell: Shell) -> None:
    code, said = shell.run(MEANWHILE=STOPPED.format(starts=0))
    assert code == 0 and said.endswith("mamba_fsdp: done\n")


# How a job ends, depending on the exit code of its nodes.


@pytest.mark.parametrize("failures", [1, 3, 9])
def test_a_controller_that_does_not_requeue(shell: Shell, failures: int) -> None:
    """A busy or restarting controller is asked again for a minute."""
    shell.program("sqshforge")
    shell.program("sleep", '#!/bin/bash\necho "sleep $1" >> "$CALLED.scontrol"\n')
    fails = f'mapfile -t asked < "$CALLED.scontrol"; ((${{#asked[@]}} > {2 * failures})) ;;'
    shell.program("scontrol", SCONTROL.replace('.scontrol" ;;', f'.scontrol"; {fails}'))
    code, said = shell.run(SRUN_CODE="137")
    asked = Path(f"{shell.called}.scontrol").read_text().splitlines()
    tries = ["requeue incomplete 7", "sleep 1", "requeue incomplete 7", "sleep 4"]
    tries += ["requeue incomplete 7", "sleep 15", "requeue incomplete 7", "sleep 40"]
    tries += ["requeue incomplete 7"]
    assert code == 137 and asked == tries[: 2 * failures + 1]
    assert said.endswith("Slurm does not requeue it: submit it again\n") == (failures == 9)


def test_a_full_disk_of_logs_ends_nothing(shell: Shell) -> None:
    shell.program("sqshforge")
    with Path("/dev/full").open("w") as shell.log:
        assert shell.run(SRUN_CODE="85")[0] == 85
    assert shell.called.with_name("called.scontrol").read_text() == "requeue incomplete 7\n"


@pytest.mark.parametrize(
    ("code", "env", "requeued"),
    [
        ("1", {}, True),
        ("1", {"SLURM_RESTART_COUNT": "2"}, True),
        ("1", {"SLURM_RESTART_COUNT": "30"}, True),  # none of them because of a failure
        ("137", {"REQUEUES": "0"}, False),
        ("85", {"SLURM_RESTART_COUNT": "50"}, True),
        ("2", {}, False),
        ("3", {}, False),
        ("0", {}, False),
    ],
)
def test_requeues(shell: Shell, code: str, env: dict[str, str], requeued: bool) -> None:
    shell.program("sqshforge")
    got, said = shell.run(SRUN_CODE=code, **env)
    asked = Path(f"{shell.called}.scontrol")
    assert got == int(code), said
    assert asked.exists() == requeued
    assert not requeued or asked.read_text() == "requeue incomplete 7\n"


@pytest.mark.parametrize(
    ("step", "nodes", "code", "env"),
    [
        ("137", {1: 2}, 2, {}),  # srun ended the first node, which waited for the other
        ("137", {0: 1, 1: 3}, 3, {}),
        ("87", {0: 87, 1: 2}, 2, {}),
        ("87", {0: 87, 1: 2}, 87, {"EXCLUDE": "1"}),  # tried again without that node
        ("137", {0: 1}, 137, {}),
        ("85", {0: 85, 1: 2}, 85, {}),
        ("0", {0: 0, 1: 0}, 0, {}),
        # Of a job that outlives its nodes, the first one's counts.
        ("137", {0: 0, 2: 2}, 0, {"SPARES": "1", "SLURM_JOB_NUM_NODES": "3"}),
        ("2", {0: 1, 2: 2}, 1, {"SPARES": "1", "SLURM_JOB_NUM_NODES": "3"}),
    ],
)
def test_what_a_person_has_to_fix_on_one_node_is_final(
    shell: Shell, step: str, nodes: dict[int, int], code: int, env: dict[str, str]
) -> None:
    ended = "; ".join(f"echo {of} > $state/ended.{node}" for node, of in nodes.items())
    got, said = shell.run(SRUN_CODE=step, MEANWHILE=ended, **env)
    assert got == code, said
    assert ("it is not tried again" in said) == (code in (2, 3))


def test_a_folder_of_the_start_that_cannot_be_made(shell: Shell) -> None:
    """On a full disk, for example; another try may find room."""
    shell.program("mkdir", '#!/bin/bash\n[[ $* != *.job-* ]] && exec /bin/mkdir "$@"\nexit 1\n')
    code, said = shell.run()
    assert code == 1 and ".job-7.0 cannot be made: is its disk full?\n" in said, said
    assert "exit code 1: requeued" in said and not shell.called.exists()


def test_failures_alone_count(shell: Shell) -> None:
    """A long run is requeued at each time limit, and may still fail as often as any other."""
    shell.program("sqshforge")
    ends = ["1", "85", "85", "1", "85", "137", "85", "1"]
    found = [
        shell.run(SRUN_CODE=code, SLURM_RESTART_COUNT=str(starts))[1].splitlines()[-1]
        for starts, code in enumerate(ends)
    ]
    assert all("requeued" in line for line in found[:-1]), found
    assert found[-1] == "mamba_fsdp: exit code 1: given up after 3 restarts"
    assert not list(shell.folder.glob("checkpoints/*/failures.*"))


def test_a_failure_that_cannot_be_noted_is_requeued(shell: Shell) -> None:
    """As on a full disk: the file may exist, but nothing was written to it."""
    shell.program("sqshforge")
    noted = shell.folder / "checkpoints" / "mamba_fsdp-trial" / "failures.7"
    noted.parent.mkdir(parents=True)
    noted.touch()
    code, said = shell.run(SRUN_CODE="1", MEANWHILE=f"rm {noted} && /bin/ln -s /dev/full {noted}")
    assert code == 1 and "exit code 1: requeued" in said, said
    assert Path(f"{shell.called}.scontrol").read_text() == "requeue incomplete 7\n"


def test_an_image_that_cannot_be_staged(shell: Shell) -> None:
    """A full disk, for example, is tried again; what a person has to fix is not."""
    for code, end in (("1", "requeued"), ("3", "a person has to fix this; it is not tried again")):
        shell.program("sqshforge", f"#!/bin/bash\nexit {code}\n")
        got, said = shell.run(STAGE="/tmp")
        assert got == int(code) and f"exit code {code}: {end}" in said, said
    assert Path(f"{shell.called}.scontrol").read_text() == "requeue incomplete 7\n"


@pytest.mark.parametrize(("what", "env"), [("show node", {}), ("show config", {"SHRINK": "1"})])
def test_a_controller_that_does_not_answer(shell: Shell, what: str, env: dict[str, str]) -> None:
    shell.program("scontrol", SCONTROL.replace(f'"{what}")', f'"{what}") exit 1;'))
    code, said = shell.run(**env)
    assert code == 1 and "exit code 1: requeued" in said and not shell.called.exists(), said


def test_a_run_s_folder_that_cannot_be_made(shell: Shell) -> None:
    refused(shell, "x.py/run cannot be made\n", "fix: CHECKPOINTS=FOLDER", CHECKPOINTS="x.py/run")


def test_a_number_of_requeues_that_is_none(shell: Shell) -> None:
    shell.program("sqshforge")
    refused(shell, "error: REQUEUES=often is not a number of requeues\n", REQUEUES="often")


def test_a_number_may_begin_with_zero(shell: Shell) -> None:
    """For bash, 08 is an invalid octal number."""
    shell.program("sqshforge")
    folder = shell.folder / "checkpoints" / "mamba_fsdp-trial"
    folder.mkdir(parents=True)
    (folder / "failures.7").write_text("1\n" * 9)
    code, said = shell.run(SRUN_CODE="1", REQUEUES="08", SLURM_RESTART_COUNT="9")
    assert code == 1 and "given up after 9 restarts" in said, said


def test_bad_nodes_are_left_out_if_asked(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the folder's name looks like a pattern; the list is removed at the end."""
    run = shell.run
    monkeypatch.setattr(shell, "run", lambda **env: run(CHECKPOINTS="run[1]", **env))
    shell.program("sqshforge")
    bad = shell.folder / "run[1]" / "bad-nodes.7.1"
    bad.parent.mkdir(parents=True)
    bad.write_text("node-1\nnode-2\n")
    bad.with_name("bad-nodes.7.0").write_text("node-2\n")  # of the previous start
    asked = Path(f"{shell.called}.scontrol")
    shell.run(SRUN_CODE="87")
    assert asked.read_text() == "requeue incomplete 7\n"
    asked.unlink()
    shell.run(SRUN_CODE="87", EXCLUDE="1")
    assert asked.read_text() == "requeue incomplete 7\nupdate JobId=7 ExcNodeList=node-1,node-2\n"
    asked.unlink()
    own = SCONTROL.replace(" Reason=None", " ReqNodeList=(null) ExcNodeList=n[7-8] Features=x")
    shell.program("scontrol", own)
    shell.run(SRUN_CODE="87", EXCLUDE="1")
    assert "ExcNodeList=node-1,node-2,n[7-8]\n" in asked.read_text()
    shell.run(SRUN_CODE="0")
    assert not list(bad.parent.iterdir())
