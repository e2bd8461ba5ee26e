"""How a launcher keeps both Slurm and srun from ending a job that has spare nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launcher_shell import SCONTROL, Shell

pytestmark = pytest.mark.processes

THREE = {"SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "node-[1-3]", "SPARES": "1"}


@pytest.fixture
def shell(tmp_path: Path, root: Path) -> Shell:
    shell = Shell(tmp_path, root / "launch" / "mamba_fsdp.sbatch")
    shell.program("sqshforge")
    return with_config(shell, "SlurmdTimeout           = 300 sec")


def with_config(shell: Shell, line: str) -> Shell:
    """Let Slurm have three nodes, and a line in its configuration."""
    known = SCONTROL.replace("node-1 node-2", "node-1 node-2 node-3")
    shell.program("scontrol", known.replace("${PLUGSTACK:-/none}", f"/none\n{line}"))
    return shell


@pytest.mark.parametrize(
    ("env", "line", "shown"),
    [
        ({"SPARES": "some"}, "", "SPARES=some is no number of nodes"),
        ({"SPARES": "2"}, "", "of 3 nodes fewer than two would train"),
        ({"SPARES": "0", "SHRINK": "yes"}, "", "SHRINK=yes is neither 0 nor 1"),
        (
            {"SPARES": "0", "SHRINK": "1", "SLURM_JOB_NUM_NODES": "1"},
            "",
            "SHRINK=1: one node cannot become fewer",
        ),
        (
            {"SPARES": "0", "SHRINK": "1"},
            "SlurmdTimeout           = 10 sec",
            "SHRINK=1: Slurm ends a job 10 s after a node falls silent",
        ),
        ({}, "SlurmdTimeout           = 10 sec", "Slurm ends a job 10 s after a node falls silent"),
        (
            {},
            "SchedulerParameters     = disable_job_shrink",
            "a lost node cannot be taken out of a job on this cluster",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    shell: Shell, env: dict[str, str], line: str, shown: str
) -> None:
    code, said = with_config(shell, line).run(**(THREE | env))
    assert code == 2 and shown in said and "fix: " in said
    assert not shell.called.exists()


def test_the_end_of_one_node_does_not_end_the_step(shell: Shell) -> None:
    asked = "echo 0 > $state/ended.0"
    words = shell.srun(**THREE, MEANWHILE=asked)
    assert {"-K0", "--no-kill", "--wait=0"} <= set(words) and "--wait=180" not in words
    assert "--nodes=3" in words
    assert {"--wait=180"} <= set(shell.srun()) and "--no-kill" not in shell.srun()


@pytest.mark.parametrize(
    ("seconds", "env"),
    [
        (60, {"PREFLIGHT": "0", "PREFLIGHT_SECONDS": "300"}),
        (360, {"PREFLIGHT_SECONDS": "300"}),
        (150, {"PREFLIGHT_SECONDS": "090.5"}),
        (60, {"PREFLIGHT_SECONDS": "soon"}),  # the nodes refuse it
    ],
)
def test_nodes_have_time_to_name_one_whose_container_did_not_start(
    shell: Shell, seconds: int, env: dict[str, str]
) -> None:
    assert f"--wait={seconds}" in shell.srun(**env)


def test_a_job_that_may_shrink_outlives_its_nodes_too(shell: Shell) -> None:
    """It shrinks down to the first node, whose report is awaited even if no other task ends."""
    meanwhile = """
        touch "$state/lost.node-2" "$state/lost.node-3"
        until mapfile -t calls < "$CALLED.scontrol" && ((${#calls[@]} == 2)); do sleep 0.1; done
        sleep 3; echo 0 > "$state/ended.0"
        exec sleep 1000
    """
    code, said = shell.run(**THREE | {"SPARES": "0", "SHRINK": "1"}, MEANWHILE=meanwhile)
    assert code == 0, said
    calls = Path(f"{shell.called}.scontrol").read_text().splitlines()
    assert calls == ["update JobId=7 NodeList=node-1,node-3", "update JobId=7 NodeList=node-1"]


def test_a_job_that_may_shrink_has_the_step_go_on(shell: Shell) -> None:
    asked = {"SPARES": "0", "SHRINK": "1", "MEANWHILE": "echo 0 > $state/ended.0"}
    assert {"-K0", "--no-kill", "--wait=0"} <= set(shell.srun(**THREE | asked))


def test_a_lost_node_is_taken_out_of_the_job(shell: Shell) -> None:
    """Its task keeps srun waiting, so srun is ended; the first node's code counts."""
    meanwhile = """
        touch "$state/lost.node-2"
        until [[ -s $CALLED.scontrol ]]; do sleep 0.1; done
        echo 0 > "$state/ended.2"; echo 0 > "$state/ended.0"
        exec sleep 1000
    """
    code, said = shell.run(**THREE, MEANWHILE=meanwhile)
    assert code == 0, said
    calls = Path(f"{shell.called}.scontrol").read_text().splitlines()
    assert calls == ["update JobId=7 NodeList=node-1,node-3"]
    assert "mamba_fsdp: node-2 is lost: the job goes on without it" in said
    assert said.splitlines()[-1] == "mamba_fsdp: done"


def test_the_first_node_says_how_the_job_has_ended(shell: Shell) -> None:
    """The code of srun may be that of a node that was lost, or that a spare has replaced."""
    asked = "echo 85 > $state/ended.0"
    code, said = shell.run(**THREE, MEANWHILE=asked, SRUN_CODE="137")
    assert code == 85 and "exit code 85: requeued" in said


def test_without_its_word_srun_does(shell: Shell) -> None:
    code, said = shell.run(**THREE, SRUN_CODE="137")
    assert code == 137 and "exit code 137: requeued" in said


def test_nodes_that_failed_twice_are_left_out_if_asked(shell: Shell) -> None:
    failing = THREE | {"SRUN_CODE": "1", "EXCLUDE": "1"}
    failing["MEANWHILE"] = "echo node-2 > $CHECKPOINTS/bad-nodes.7.0"
    code, _ = shell.run(**failing)
    calls = Path(f"{shell.called}.scontrol").read_text().splitlines()
    assert code == 1 and calls == ["requeue incomplete 7", "update JobId=7 ExcNodeList=node-2"]
