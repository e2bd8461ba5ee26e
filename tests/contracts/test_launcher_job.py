"""Which of its environment variables, and which of Slurm's jobs, the launcher takes for its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contracts.test_launcher_faults import shell as shell
from tests.support.launcher_shell import SCONTROL, SRUN, Shell

pytestmark = pytest.mark.processes

ARRAY = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}
# An array's last task has the array's number, for which Slurm shows all tasks.
TASKS = "JobId=6 ArrayJobId=5 ArrayTaskId=1 x Restarts=0 y\nJobId=7 ArrayJobId=5 ArrayTaskId=3"
EXPORTED = 'export -p > "$CALLED.exported"'


def answering(shell: Shell, record: str) -> None:
    """Let Slurm show a job like this."""
    shell.program("sqshforge")
    shell.program("scontrol", SCONTROL.replace('"JobId=7 JobName=x', f'"{record} JobName=x'))


def asked(shell: Shell) -> list[str]:
    return Path(f"{shell.called}.scontrol").read_text().splitlines()


@pytest.mark.parametrize(
    ("record", "job"),
    [("JobId=7", "7"), (TASKS, "5_3"), ("slurm_load_jobs error: timed out", "5_3")],
)
def test_a_task_of_an_array_and_what_is_submitted_from_one(
    shell: Shell, record: str, job: str
) -> None:
    """Everything that an array's tasks submit inherits the array's variables."""
    answering(shell, record)
    code, said = shell.run(SRUN_CODE="137", **ARRAY)
    assert code == 137 and "exit code 137: requeued" in said
    assert asked(shell) == [f"requeue incomplete {job}"]


def test_restarts_of_another_job(shell: Shell) -> None:
    """It was submitted from that job, but starts for the first time."""
    answering(shell, "JobId=7")
    shown = SCONTROL.replace("${SLURM_RESTART_COUNT:-0}", "0")
    shell.program("scontrol", shown)
    shell.program("srun", SRUN.replace("${SLURM_RESTART_COUNT:-0}", "0"))
    code, said = shell.run(SLURM_RESTART_COUNT="4", MEANWHILE=EXPORTED)
    assert code == 0 and "mamba_fsdp: job 7, restart 0: " in said
    exported = Path(f"{shell.called}.exported").read_text()
    assert 'declare -x SLURM_RESTART_COUNT="0"' in exported


def test_what_steps_of_another_job_were_given(shell: Shell) -> None:
    shell.program("sqshforge")
    bound = {"SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_CPU_BIND_TYPE": "mask_cpu:"}
    memory = {"SLURM_MEM_PER_CPU": "2000", "SLURM_MEM_PER_NODE": "500000"}
    other = {"SLURM_CPUS_PER_TASK": "1", "SRUN_CPUS_PER_TASK": "1", "SLURM_TRES_PER_TASK": "cpu=1"}
    code, said = shell.run(MEANWHILE=EXPORTED, **bound, **memory, **other)
    assert code == 0, said
    exported = Path(f"{shell.called}.exported").read_text()
    assert not [name for name in bound | memory | other if f" {name}=" in exported]


def test_what_a_user_has_set_for_steps_stays(shell: Shell) -> None:
    shell.program("sqshforge")
    own = {
        "SLURM_CPU_BIND": "verbose,none",
        "SLURM_MEM_PER_NODE": "500000",
        "SLURM_TRES_PER_TASK": "gres/gpu:8",
    }
    assert shell.run(MEANWHILE=EXPORTED, **own)[0] == 0
    exported = Path(f"{shell.called}.exported").read_text()
    assert all(f'declare -x {name}="{value}"' in exported for name, value in own.items())


def test_slurm_itself_has_requeued_the_job(shell: Shell) -> None:
    """As in a preemption: records of failures and bad nodes are kept for the next start."""
    folder = shell.folder / "checkpoints" / "mamba_fsdp-trial"
    folder.mkdir(parents=True)
    for name, text in (("failures.7", "137\n"), ("bad-nodes.7.0", "node-2\n")):
        (folder / name).write_text(text)
    shell.program("sqshforge")
    requeued = SCONTROL.replace("${SLURM_RESTART_COUNT:-0}", "1")
    shell.program("scontrol", requeued)
    code, said = shell.run(SRUN_CODE="137", JOB_STATE="COMPLETING", EXCLUDE="1")
    assert code == 137 and "exit code 137: Slurm has requeued it" in said, said
    assert "not requeued" not in said
    assert (folder / "failures.7").exists() and (folder / "bad-nodes.7.0").exists()
    assert asked(shell) == ["update JobId=7 ExcNodeList=node-2"]


def test_the_user_s_own_list_of_nodes_to_leave_out_is_not_lost(shell: Shell) -> None:
    """Slurm replaces the list as a whole: if it does not show it, the list is left unchanged."""
    folder = shell.folder / "checkpoints" / "mamba_fsdp-trial"
    folder.mkdir(parents=True)
    (folder / "bad-nodes.7.0").write_text("node-2\n")
    shell.program("sqshforge")
    shell.program("sleep")
    shell.program("scontrol", SCONTROL.replace('"show job")', '"show job") exit 1;'))
    assert shell.run(SRUN_CODE="137", EXCLUDE="1")[0] == 137
    assert asked(shell) == ["requeue incomplete 7"]


def test_a_node_that_is_lost_before_its_container_starts(shell: Shell) -> None:
    """It does not count as a container that cannot start: the job continues without that node."""
    shell.program("sqshforge")
    lost = f"{shell.called}.lost"
    code, said = shell.run(
        NOT_STARTED="1",
        SRUN_CODE="1",
        MEANWHILE=f"touch {lost}",
        CHECK_MEANWHILE=f"[[ ! -e {lost} ]] || exit 233",
    )
    assert code == 233 and "the nodes could not be looked at" in said
    assert "exit code 233: requeued" in said and "started on no node" not in said


def test_pyxis_without_a_line_about_plugins_in_slurm_conf(shell: Shell) -> None:
    """Slurm then reads plugstack.conf beside slurm.conf, but does not show its path."""
    settings = shell.folder / "plugstack.conf"
    settings.write_text("required /usr/lib/slurm/spank_pyxis.so use_squashfuse=1\n")
    line = f"SLURM_CONF              = {shell.folder}/slurm.conf"
    shell.program("scontrol", SCONTROL.replace("${PLUGSTACK:-/none}", f"(null)\n{line}"))
    code, said = shell.run(RUNTIME="pyxis")
    assert code == 0 and "pyxis unpacks" not in said, said
