"""What each launcher makes of its environment: the `srun` line, for each container runtime.

The script runs as it stands, under bash, with programs in front of Slurm's that write down how
they were called; tests/test_cluster.py runs it on a real Slurm.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCHERS = ("mamba_fsdp",)
TOOLS = ("bash", "cat", "grep", "mkdir", "realpath")

SRUN = """\
#!/bin/bash
if [[ $1 == --help ]]; then cat "$HELP"; exit; fi
printf '%s\\n' "$@" > "$CALLED"
exit "$SRUN_CODE"
"""
SCONTROL = """\
#!/bin/bash
case "$1 $2" in
"show hostnames") printf '%s\\n' node-1 node-2 ;;
"show node") echo "NodeName=node-1 Arch=x86_64 NodeAddr=10.0.0.5 NodeHostName=node-1" ;;
*) echo "$*" >> "$CALLED.scontrol" ;;
esac
"""


class Shell:
    """A folder to submit from, with an image in it and the programs on the PATH."""

    def __init__(self, folder: Path, launcher: Path) -> None:
        self.folder, self.launcher, self.called = folder, launcher, folder / "called"
        self.programs = folder / "bin"
        self.programs.mkdir()
        for tool in TOOLS:  # and no other: whatever runtime this machine has is out of sight
            (self.programs / tool).symlink_to(str(shutil.which(tool)))
        self.program("srun", SRUN)
        self.program("scontrol", SCONTROL)
        self.help = folder / "help"
        self.help.write_text("  -N, --nodes=N   number of nodes\n")
        self.image = folder / "build" / "cpu-mamba.sqsh"
        self.image.parent.mkdir()
        self.image.write_bytes(b"hsqs")
        (folder / "x.py").touch()

    def program(self, name: str, text: str = "#!/bin/bash\n") -> None:
        path = self.programs / name
        path.write_text(text)
        path.chmod(0o755)

    def run(self, *flags: str, **env: str) -> tuple[int, str]:
        """Run the script in the folder; its exit code and all it said."""
        done = subprocess.run(
            ["bash", str(self.launcher), *flags],
            env={
                "PATH": str(self.programs),
                "HELP": str(self.help),
                "CALLED": str(self.called),
                "SRUN_CODE": "0",
                "SLURM_SUBMIT_DIR": str(self.folder),
                "SLURM_JOB_ID": "7",
                "SLURM_JOB_NODELIST": "node-[1-2]",
                **env,
            },
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, done.stdout

    def srun(self, *flags: str, **env: str) -> list[str]:
        """Run the script and return the words that `srun` got."""
        code, said = self.run(*flags, **env)
        assert code == 0, said
        return self.called.read_text().splitlines()


@pytest.fixture(params=LAUNCHERS)
def shell(request: pytest.FixtureRequest, tmp_path: Path, root: Path) -> Shell:
    return Shell(tmp_path, root / "launch" / f"{request.param}.sbatch")


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest, root: Path) -> Path:
    return root / "launch" / f"{request.param}.sbatch"


def test_a_launcher_is_short_and_clean(launcher: Path) -> None:
    assert len(launcher.read_text().splitlines()) < 80
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, launcher], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_its_variables_are_in_the_table(launcher: Path) -> None:
    table = (launcher.parent / "README.md").read_text()
    text = launcher.read_text()
    names = set(re.findall(r"\$\{([A-Z_]+)", text))
    settings = {name for name in names if not name.startswith(("SLURM_", "BASH_"))}
    assert {"IMAGE", "RUNTIME", "REQUEUES"} <= settings
    assert not {name for name in settings if f"`{name}`" not in table}


def test_own_runtime(shell: Shell) -> None:
    shell.program("sqshforge")
    words = shell.srun(NCCL_DEBUG="INFO")
    checkpoints = shell.folder / "checkpoints" / "mamba_fsdp"
    start = [
        f"{shell.programs}/sqshforge",
        "run",
        *([] if not Path("/fsx").is_dir() else ["--mount=/fsx:/fsx"]),
        f"--mount={checkpoints}:{checkpoints}",
        "--env=MASTER_ADDR=10.0.0.5",
        "--env=NCCL_DEBUG=INFO",
        str(shell.image),
        "--",
        "python3",
        "-m",
        "training.launch",
        "--",
        f"--save_ckpt_path={checkpoints}",
        "--model_name=mamba-tiny",
    ]
    begin = words.index(start[0])
    assert words[begin : begin + len(start)] == start
    assert checkpoints.is_dir()


def test_own_runtime_of_the_checkout(shell: Shell) -> None:
    own = shell.folder / ".venv" / "bin"
    own.mkdir(parents=True)
    (own / "sqshforge").write_text("")
    (own / "sqshforge").chmod(0o755)
    assert str(own / "sqshforge") in shell.srun()


def test_enroot(shell: Shell) -> None:
    shell.program("sqshforge")
    shell.program("enroot")
    words = shell.srun("--model_name=x", MOUNTS="/data:/data,/a b:/c", FI_LOG_LEVEL="1")
    begin = words.index("enroot")
    assert words[begin:] == [
        "enroot",
        "start",
        "--rw",
        "--mount=/data:/data:rbind,x-create=auto",
        "--mount=/a b:/c:rbind,x-create=auto",
        "--env=FI_LOG_LEVEL",
        "--env=MASTER_ADDR",
        "--env=SLURM_JOB_ID",
        "--env=SLURM_NODEID",
        "--env=SLURM_LOCALID",
        "--env=SLURM_STEP_NUM_NODES",
        "--env=SLURM_RESTART_COUNT",
        str(shell.image),
        "python3",
        "-m",
        "training.launch",
        "--",
        f"--save_ckpt_path={shell.folder}/checkpoints/mamba_fsdp",
        "--model_name=x",
    ]


def test_enroot_is_told_of_gpus_only_where_slurm_gave_some(shell: Shell) -> None:
    """`--env` of a variable that is not set makes it empty, and then CUDA sees no GPU."""
    shell.program("enroot")
    assert "--env=CUDA_VISIBLE_DEVICES" not in shell.srun()
    assert "--env=CUDA_VISIBLE_DEVICES" in shell.srun(CUDA_VISIBLE_DEVICES="0,1")


def test_a_cluster_that_does_not_requeue(shell: Shell) -> None:
    shell.program("sqshforge")
    shell.program("scontrol", SCONTROL.replace('echo "$*"', "exit 1; :"))
    code, said = shell.run(SRUN_CODE="137")
    assert code == 137 and said.endswith("Slurm does not requeue it: submit it again\n")


def test_pyxis(shell: Shell) -> None:
    shell.program("enroot")
    shell.help.write_text("   --container-image=...   [pyxis] the image\n" * 5000)
    words = shell.srun("--model_name=x", MOUNTS="/data:/data", OMP_NUM_THREADS="4")
    assert words == [
        "--label",
        "--kill-on-bad-exit=0",
        "--wait=30",
        f"--container-image={shell.image}",
        "--container-mounts=/data:/data",
        "--no-container-mount-home",
        "--container-env=MASTER_ADDR,OMP_NUM_THREADS",
        "python3",
        "-m",
        "training.launch",
        "--",
        f"--save_ckpt_path={shell.folder}/checkpoints/mamba_fsdp",
        "--model_name=x",
    ]


def test_runtime_can_be_forced(shell: Shell) -> None:
    shell.program("enroot")
    shell.program("sqshforge")
    code, said = shell.run(RUNTIME="sqshforge")
    assert code == 0 and f"{shell.image} by sqshforge on node-[1-2]" in said
    assert "enroot" not in shell.called.read_text().splitlines()


def test_the_cuda_image_comes_first(shell: Shell) -> None:
    cuda = shell.image.with_name("cuda-mamba.sqsh")
    cuda.write_bytes(b"hsqs")
    shell.program("sqshforge")
    assert str(cuda) in shell.srun()


def test_flags_are_not_read_by_the_shell(shell: Shell) -> None:
    shell.program("sqshforge")
    flags = ["--dataset_path=text:*.py", "--note=$(id) a  b", "-", "", "--x='\"\\"]
    assert shell.srun(*flags)[-len(flags) :] == flags


def test_defaults_of_the_flags(shell: Shell) -> None:
    shell.program("sqshforge")
    words = shell.srun(MODEL="m", DATASET="text:*.py", STEPS="5", CHECKPOINTS="here and there")
    assert {"--model_name=m", "--dataset_path=text:*.py", "--num_steps=5"} <= set(words)
    assert f"--save_ckpt_path={shell.folder}/here and there" in words


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"IMAGE": "no.sqsh"}, "there is no {folder}/no.sqsh; make sqsh TARGET=cuda-mamba"),
        ({}, "no container runtime: neither pyxis, nor enroot, nor {folder}/.venv/bin/sqshforge"),
        ({"RUNTIME": "podman"}, "RUNTIME=podman: must be pyxis, enroot or sqshforge"),
        ({"SLURM_SUBMIT_DIR": ""}, "SLURM_SUBMIT_DIR: start this with sbatch"),
    ],
)
def test_wrong_requests(shell: Shell, env: dict[str, str], told: str) -> None:
    code, said = shell.run(**env)
    assert code == (1 if "SLURM_SUBMIT_DIR" in env else 2)
    assert told.format(folder=shell.folder) in said
    assert not shell.called.exists()


@pytest.mark.parametrize(
    ("code", "env", "requeued"),
    [
        ("1", {}, True),
        ("1", {"SLURM_RESTART_COUNT": "2"}, True),
        ("1", {"SLURM_RESTART_COUNT": "3"}, False),
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
    assert not requeued or asked.read_text() == "requeue 7\n"


def test_a_master_of_ones_own(shell: Shell) -> None:
    shell.program("sqshforge")
    assert "--env=MASTER_ADDR=head" in shell.srun(MASTER_ADDR="head")
