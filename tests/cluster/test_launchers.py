"""How the launcher's jobs start, fail and end on a real Slurm of two nodes.

The tasks here are small programs in place of `sqshforge`; test_systems.py trains for real.
"""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqshforge.host.programs import Programs
from sqshforge.squashfs import hot_range
from tests.support import page_cache, processes, slurm_config
from tests.support.launcher_shell import NOTHING
from tests.support.slurm import Cluster, ClusterError, cluster


@pytest.fixture(scope="module")
def slurm(as_root: None) -> Iterator[Cluster]:
    # On many clusters, a step's other tasks are killed some time after the first one has ended.
    with cluster(kill_wait=60, settings=("WaitTime=1",)) as started:
        yield started


# Tests of the cluster itself.


def test_a_job_runs_on_both_nodes(slurm: Cluster, tmp_path: Path) -> None:
    script = "#!/bin/bash\nsrun --ntasks-per-node=1 printenv SLURMD_NODENAME\nexit 7\n"
    job = slurm.submit("--nodes=2", script=script, folder=tmp_path)
    assert slurm.wait(job) == "FAILED"
    assert slurm.exit_code(job) == 7
    assert sorted(slurm.output(job).split()) == ["n1", "n2"]


def test_two_clusters_stand_side_by_side_and_leave_nothing(slurm: Cluster) -> None:
    with cluster() as other:
        folder = other.folder
        job = other.submit("--nodes=2", script="#!/bin/bash\nsrun --ntasks-per-node=1 sleep 600\n")
        other.until(lambda: len(other.processes("n2", job)) == 1, 300, "no task on n2")
        assert slurm.processes("n2") == []
    assert processes.having({"SLURM_CONF": f"{folder}/slurm.conf"}) == []
    assert not folder.exists()


@pytest.mark.root
def test_a_failing_test_leaves_nothing_either() -> None:
    with pytest.raises(ZeroDivisionError), cluster() as left:
        left.submit("--nodes=1", script="#!/bin/bash\nsleep 600\n")
        left.until(lambda: left.processes("n1"), 300, "no job on n1")
        _ = 1 / 0
    assert processes.having({"SLURM_CONF": left.env["SLURM_CONF"]}) == []


@pytest.mark.root
def test_daemons_die_with_a_killed_test(root: Path) -> None:
    code = (
        "import sys, time\nfrom tests.support.slurm import cluster\n"
        "with cluster() as c:\n print(c.env['SLURM_CONF'], flush=True)\n time.sleep(600)\n"
    )
    victim = subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE)
    assert victim.stdout is not None
    config = victim.stdout.readline().decode().strip()
    victim.kill()
    victim.communicate()
    assert config.endswith("/slurm.conf"), "the cluster did not start"
    deadline = time.monotonic() + 120
    while (left := processes.having({"SLURM_CONF": config})) and time.monotonic() < deadline:
        time.sleep(0.1)
    shutil.rmtree(Path(config).parent)
    assert left == []


def test_a_lost_node_sends_the_job_back(slurm: Cluster) -> None:
    script = "#!/bin/bash\n((${SLURM_RESTART_COUNT:-0})) || srun --ntasks-per-node=1 sleep 600\n"
    job = slurm.submit("--nodes=2", "--requeue", script=script)
    slurm.until(lambda: slurm.processes("n2", job), 300, "no task on n2")
    slurm.lose("n2")
    assert slurm.processes("n2", job) == []
    slurm.until(lambda: slurm.restarts(job) == 1, 300, "the job is not requeued")
    slurm.bring("n2")
    assert slurm.wait(job, 60) == "COMPLETED"


@pytest.mark.root
def test_a_daemon_that_does_not_start_is_reported_with_its_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slurm_config, "CONFIG", slurm_config.CONFIG + "NoSuchSetting=1\n")
    with pytest.raises(ClusterError, match=r"has ended(.|\n)*NoSuchSetting"), cluster():
        pass


@pytest.mark.root
def test_a_port_that_somebody_else_has_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    free = slurm_config.free_ports
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        answers = iter([[*free(2), port], free(3)])
        monkeypatch.setattr(slurm_config, "free_ports", lambda count: next(answers))
        with cluster() as started:
            assert f"Port={port}" not in (started.folder / "slurm.conf").read_text()


def test_what_is_missing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(ClusterError, match="apt-get install slurm-wlm munge"), cluster():
        pass


# Tests of the launcher on it. `sqshforge` is a program of a few lines, which does what CASE says.

SQSHFORGE = """\
#!/bin/bash
[[ $1 == run ]] || exit 2
while [[ $1 != -- ]]; do shift; done; shift
touch "$CHECKPOINTS/.job-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}/started.$SLURM_NODEID"
echo "at $SLURM_NODEID of $SLURM_STEP_NUM_NODES, restart ${SLURM_RESTART_COUNT:-0}: $*"
case $CASE in
fine) ;;
last-of-two) if [[ $SLURM_ARRAY_TASK_ID == 1 ]]; then
    until [[ -e crashed ]]; do sleep 0.1; done; sleep 5
    elif ((!${SLURM_RESTART_COUNT:-0})); then touch crashed; kill -9 $$; fi ;;
wrong) [[ $SLURM_NODEID == 0 ]] || sleep 2; exit 2 ;;
wrong-on-one) [[ $SLURM_NODEID == 1 ]] || sleep 600
    echo 2 > "$CHECKPOINTS/.job-$SLURM_JOB_ID.0/ended.1"; exit 2 ;;
late) [[ $SLURM_NODEID == 0 ]] || exit 1
    sleep 70; exit 87 ;;
crash-once) ((${SLURM_RESTART_COUNT:-0})) || kill -9 $$ ;;
crash) exit 1 ;;
stopped) ((${SLURM_RESTART_COUNT:-0})) && exit 0
    trap 'echo saved; exit 85' TERM; touch ready-$SLURM_NODEID; while :; do sleep 0.1; done ;;
asked) ((${SLURM_RESTART_COUNT:-0})) && exit 0
    trap 'echo signalled; exit 1' TERM; touch ready-$SLURM_NODEID
    until [[ -s $CHECKPOINTS/.job-$SLURM_JOB_ID.0/stop ]]; do sleep 0.1; done
    echo saved; exit 85 ;;
*) ((${SLURM_RESTART_COUNT:-0})) || sleep 600 ;;
esac
"""


class Desk:
    """A folder to submit from: an image, and our `sqshforge` on the PATH."""

    def __init__(self, slurm: Cluster, folder: Path, root: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self.launcher = root / "launch" / "mamba_fsdp.sbatch"
        program = folder / "bin" / "sqshforge"
        program.parent.mkdir()
        program.write_text(SQSHFORGE)
        program.chmod(0o755)
        (folder / "build").mkdir()
        (folder / "build" / "cpu-mamba.sqsh").write_bytes(NOTHING)

    def submit(self, case: str, *words: str | Path, script: str = "", **env: str) -> int:
        path = f"{self.folder}/bin:{self.slurm.env['PATH']}"
        return self.slurm.submit(
            "--nodes=2",
            *(words or (self.launcher,)),
            script=script,
            env={"PATH": path, "CASE": case, "TRIAL": "1", **env},
            folder=self.folder,
        )


@pytest.fixture
def desk(slurm: Cluster, tmp_path: Path, root: Path) -> Desk:
    return Desk(slurm, tmp_path, root)


def test_a_wrong_request_is_final(desk: Desk) -> None:
    """Final even though one node reports it two seconds before the other."""
    job = desk.submit("wrong")
    assert desk.slurm.wait(job) == "FAILED"
    assert (desk.slurm.exit_code(job), desk.slurm.restarts(job)) == (2, 0)
    assert "not tried again" in desk.slurm.output(job)


def test_what_is_wrong_on_one_node_is_final(desk: Desk) -> None:
    """The other node waits for it, until srun kills that one's task."""
    job = desk.submit("wrong-on-one", PREFLIGHT="0")
    assert desk.slurm.wait(job) == "FAILED"
    assert (desk.slurm.exit_code(job), desk.slurm.restarts(job)) == (2, 0)
    assert "not tried again" in desk.slurm.output(job)


def test_preflight_may_name_a_node_that_has_ended(desk: Desk) -> None:
    """As when its container does not start: the others are not killed before they have said so."""
    job = desk.submit("late", REQUEUES="0", PREFLIGHT_SECONDS="60")
    assert desk.slurm.wait(job) == "FAILED"
    assert desk.slurm.exit_code(job) == 87, desk.slurm.output(job)


def test_a_crash_is_tried_again(desk: Desk) -> None:
    job = desk.submit("crash-once")
    assert desk.slurm.wait(job) == "COMPLETED"
    assert desk.slurm.restarts(job) == 1
    said = desk.slurm.output(job)
    assert "exit code 137: requeued" in said
    assert "0: at 0 of 2, restart 1: python3 -m training.launch --" in said
    assert said.splitlines()[-1] == "mamba_fsdp: done"


def test_what_is_submitted_from_a_job_that_has_restarted(desk: Desk) -> None:
    """A task of an array passes on its variables when it submits; that array is left alone."""
    array = {"SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "1"}
    job = desk.submit("crash-once", SLURM_RESTART_COUNT="3", **array)
    assert desk.slurm.wait(job) == "COMPLETED"
    assert desk.slurm.restarts(job) == 1
    said = desk.slurm.output(job)
    assert f"job {job}, restart 0: " in said and f"job {job}, restart 1: " in said
    assert "0: at 0 of 2, restart 1: " in said


def test_slurm_s_own_requeue_forgets_no_failure(desk: Desk) -> None:
    job = desk.submit("stopped")
    noted = desk.folder / "checkpoints" / "mamba_fsdp-trial" / f"failures.{job}"
    ready = [desk.folder / "ready-0", desk.folder / "ready-1"]
    desk.slurm.until(lambda: all(path.exists() for path in ready), 300, "not started")
    noted.write_text("137\n")
    desk.slurm.ask("scontrol", "requeue", str(job))
    shown = "Slurm has requeued it"
    desk.slurm.until(lambda: shown in desk.slurm.output(job), 300, lambda: desk.slurm.output(job))
    assert desk.slurm.wait(job) == "COMPLETED"
    assert desk.slurm.restarts(job) == 1
    assert "not requeued" not in desk.slurm.output(job)


def test_but_not_for_ever(desk: Desk) -> None:
    job = desk.submit("crash", REQUEUES="1")
    assert desk.slurm.wait(job) == "FAILED"
    assert (desk.slurm.exit_code(job), desk.slurm.restarts(job)) == (1, 1)
    assert "exit code 1: given up after 1 restarts" in desk.slurm.output(job)


@pytest.mark.parametrize(
    ("case", "words"),
    [("asked", ("--batch", "--signal=TERM")), ("stopped", ("--signal=TERM",))],
)
def test_sigterm_saves_and_goes_on(desk: Desk, case: str, words: tuple[str, ...]) -> None:
    """SIGTERM goes to the launcher, which tells the nodes but signals nothing, or to everything."""
    job = desk.submit(case, REQUEUES="0")
    ready = [desk.folder / "ready-0", desk.folder / "ready-1"]
    desk.slurm.until(lambda: all(path.exists() for path in ready), 300, "not started")
    desk.slurm.cancel(job, *words)
    assert desk.slurm.wait(job) == "COMPLETED"
    assert desk.slurm.restarts(job) == 1
    assert desk.slurm.output(job).count("saved") == 2


def test_variables_that_sbatch_exports_by_name(desk: Desk) -> None:
    """Slurm passes only the variables named by --export to steps, unless the launcher forces it."""
    path = f"{desk.folder}/bin:{desk.slurm.env['PATH']}"
    asked = f"--export=TRIAL=1,CASE=fine,PATH={path}"
    job = desk.submit("", asked, desk.launcher)
    assert desk.slurm.wait(job) == "COMPLETED", desk.slurm.output(job)
    said = desk.slurm.output(job)
    assert "1: at 1 of 2, restart 0: python3 -m training.launch" in said
    assert "cannot touch" not in said  # files of the run's folder


def test_a_task_of_an_array_requeues_itself_alone(desk: Desk) -> None:
    """The number of the array's last task is also that of the whole array."""
    job = desk.submit("last-of-two", "--nodes=1", "--array=1-2", "--output=%a.out", desk.launcher)
    logs = [desk.folder / "1.out", desk.folder / "2.out"]

    def said() -> list[str]:
        return [path.read_text() if path.exists() else "" for path in logs]

    try:
        desk.slurm.until(
            lambda: all(text.endswith("mamba_fsdp: done\n") for text in said()),
            120,
            lambda: f"not done: {said()}",
        )
    finally:
        desk.slurm.cancel(job)
    assert ["restart 1" in text for text in said()] == [False, True]


def test_scancel_is_the_end(desk: Desk) -> None:
    job = desk.submit("sleep")
    desk.slurm.until(lambda: "at 1 of 2" in desk.slurm.output(job), 300, "not started")
    desk.slurm.cancel(job)
    assert desk.slurm.wait(job) == "CANCELLED"
    time.sleep(1)
    assert (desk.slurm.state(job), desk.slurm.restarts(job)) == ("CANCELLED", 0)
    assert "requeued, to go on" not in desk.slurm.output(job)
    assert not list(desk.folder.glob("checkpoints/*/.job-*"))


def test_a_cancelled_job_stays_so_if_slurm_does_not_answer(desk: Desk) -> None:
    """The launcher asks for the job's state, but a busy slurmctld does not answer in time."""
    program = desk.folder / "bin" / "scontrol"
    program.write_text(f"""\
#!/bin/bash
if [[ $1 == show && $2 == job ]]; then echo timed out >&2; exit 1; fi
exec {shutil.which("scontrol")} "$@"
""")
    program.chmod(0o755)
    job = desk.submit("sleep")
    desk.slurm.until(lambda: "at 1 of 2" in desk.slurm.output(job), 300, "not started")
    desk.slurm.cancel(job)
    assert desk.slurm.wait(job) == "CANCELLED"
    desk.slurm.until(lambda: "timed out" in desk.slurm.output(job), 60, "it did not ask")
    assert (desk.slurm.state(job), desk.slurm.restarts(job)) == ("CANCELLED", 0)


def test_what_cannot_work_is_reported_once_and_is_final(desk: Desk) -> None:
    job = desk.submit("sleep", MOUNTS="/nonexistent:/data")
    assert desk.slurm.wait(job) == "FAILED"
    assert (desk.slurm.exit_code(job), desk.slurm.restarts(job)) == (2, 0)
    shown = "error: there is no /nonexistent, which is to be mounted (on n1 n2)"
    assert desk.slurm.output(job).count(shown) == 1


def test_a_container_that_does_not_start_is_final(desk: Desk) -> None:
    (desk.folder / "bin" / "sqshforge").write_text("#!/bin/bash\necho no start >&2\nexit 1\n")
    job = desk.submit("sleep")
    assert desk.slurm.wait(job) == "FAILED"
    assert (desk.slurm.exit_code(job), desk.slurm.restarts(job)) == (3, 0)
    assert "the container has started on no node" in desk.slurm.output(job)


def test_it_works_piped(desk: Desk) -> None:
    text = desk.launcher.read_text()
    first = desk.submit("crash-once", "--parsable", script=text)
    second = desk.submit("crash-once", "/dev/stdin", "--model_name=x", "--a=*", script=text)
    for job, flags in ((first, "--model_name=mamba-tiny"), (second, "--model_name=x --a=*")):
        assert desk.slurm.wait(job) == "COMPLETED"
        assert flags in desk.slurm.output(job)


# Before a container starts under pyxis, a separate step reads the parts of the image that it needs.
# pyxis itself is not installed here: its options do not reach Slurm, and the command runs on the
# node.

SRUN = """\
#!/bin/bash
words=()
for word in "$@"; do
    [[ $word == --*container* ]] || words+=("$word")
done
exec SRUN "${words[@]}"
"""
SCONTROL = """\
#!/bin/bash
if [[ "$1 $2" == "show config" ]]; then echo "PlugStackConfig = FOLDER/plugstack.conf"; exit; fi
exec SCONTROL "$@"
"""
PYTHON = """\
#!/bin/bash
touch "$CHECKPOINTS/.job-$SLURM_JOB_ID.0/started.$SLURM_NODEID"
sleep 3
"""


@pytest.fixture
def image() -> Iterator[Path]:
    """An image whose files are all hot; it lies on a disk, as a tmpfs is always in memory."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        tree, path = Path(name, "tree"), Path(name, "hot.sqsh")
        tree.mkdir()
        (tree / "hot").write_bytes(random.Random(1).randbytes(24 << 20))
        Programs().capture(["mksquashfs", tree, path, "-quiet", "-no-progress"])
        found = hot_range.locate(path, [b"hot"])
        assert found is not None
        hot_range.note(path, found)
        yield path


@pytest.mark.parametrize(("wanted", "least", "most"), [("1", 0.6, 1.0), ("0", 0.0, 0.4)])
def test_under_pyxis_a_step_reads_the_image(
    desk: Desk, image: Path, wanted: str, least: float, most: float
) -> None:
    """The step ends with its job, here perhaps before everything is read."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "python": PYTHON}.items():
        program = desk.folder / "bin" / name
        text = text.replace("FOLDER", str(desk.folder))
        program.write_text(text.replace(name.upper(), str(shutil.which(name))))
        program.chmod(0o755)
    (desk.folder / "plugstack.conf").write_text("required spank_pyxis.so use_squashfuse=1\n")
    page_cache.forget(image)
    asked = {"RUNTIME": "pyxis", "PYTHON": f"{desk.folder}/bin/python", "IMAGE": str(image)}
    job = desk.submit("", WARM=wanted, **asked)
    assert desk.slurm.wait(job) == "COMPLETED", desk.slurm.output(job)
    assert "by pyxis on n[1-2]" in desk.slurm.output(job)
    begin, length = 1 << 20, 22 << 20  # without both ends, which are read to recognize the file
    assert least <= page_cache.share(image, begin, length) <= most
