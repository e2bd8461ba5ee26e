"""What each launcher makes of its environment: the `srun` line, for each container runtime.

The unchanged script runs under bash, with stand-ins for Slurm's programs that record their calls;
tests/cluster/test_launchers.py runs it on a real Slurm.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sqshforge import launchers, recipe
from tests.support.launcher_shell import NOTHING, Shell
from training.errors import RequestError

pytestmark = pytest.mark.processes

LAUNCHERS = (
    "llama_fsdp",
    "llama_smp",
    "mamba2_neuron",
    "mamba_composer",
    "mamba_fsdp",
    "mixtral_fsdp",
)
MODULES = {"mixtral_fsdp": "training.llama_fsdp"}
"""What a launcher starts, if not the entry point of its own name."""
NODES = dict(zip(LAUNCHERS, (4, 8, 4, 1, 4, 16), strict=True))
LOCAL_DATA = ("mamba_fsdp", "mamba2_neuron")
"""Launchers whose default data is a folder, which does not exist here."""
NOT_SETTINGS = ("SLURM_", "BASH", "XDG_DATA_", "ENROOT_", "SQSHFORGE_")
"""Prefixes of variables that belong to Slurm, the shell, enroot and sqshforge."""
GOLDEN = Path(__file__).parents[1] / "golden" / "srun"


@pytest.fixture
def shell(tmp_path: Path, root: Path) -> Shell:
    return Shell(tmp_path, root / "launch" / "mamba_fsdp.sbatch")


@pytest.fixture(params=LAUNCHERS)
def any_shell(request: pytest.FixtureRequest, tmp_path: Path, root: Path) -> Shell:
    return Shell(tmp_path, root / "launch" / f"{request.param}.sbatch")


@pytest.fixture(params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest, root: Path) -> Path:
    return root / "launch" / f"{request.param}.sbatch"


def test_all_are_there(root: Path) -> None:
    assert sorted(path.stem for path in (root / "launch").glob("*.sbatch")) == sorted(LAUNCHERS)


def test_they_are_what_their_templates_give(launcher: Path, root: Path) -> None:
    assert launchers.names(root) == sorted(LAUNCHERS)
    assert launcher.read_text() == launchers.render(root, launcher.stem), "make launchers"


def test_nodes_are_the_systems_unless_sbatch_is_given_others(launcher: Path) -> None:
    given = f"#SBATCH --nodes={NODES[launcher.stem]}\n"
    assert given in launcher.read_text()


@pytest.mark.parametrize("machine", ["targets", "arm_targets"])
def test_it_takes_the_image_of_each_target_that_carries_it(
    machine: str, launcher: Path, root: Path
) -> None:
    platform = {"targets": "linux/amd64", "arm_targets": "linux/arm64"}[machine]
    template = (root / "launch" / "template" / f"{launcher.stem}.sbatch.j2").read_text()
    found = re.search(rf"set {machine} = (\[.*\])", template)
    assert found is not None
    carried_by = {
        name
        for name in recipe.targets(root / "recipes")
        if platform in recipe.platforms_of(name, root / "recipes")
        and launcher.stem in recipe.find(name, root / "recipes", platform=platform).launchers
    }
    assert set(json.loads(found[1])) == carried_by


def test_a_launcher_is_clean(launcher: Path) -> None:
    assert max(map(len, launcher.read_text().splitlines())) <= 100
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, launcher], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_its_variables_are_in_the_table(launcher: Path) -> None:
    table = (launcher.parent / "README.md").read_text()
    text = launcher.read_text()
    names = set(re.findall(r"\$\{([A-Z_]+)[:+/}-]", text))
    settings = {name for name in names if not name.startswith(NOT_SETTINGS)}
    assert {"IMAGE", "RUNTIME", "REQUEUES", "STAGE", "TRIAL"} <= settings
    assert not {name for name in settings if f"`{name}`" not in table}


# What each launcher calls, as golden files: one word per line, with FOLDER and BIN for our paths.


CALLS = (
    *((name, "pyxis", "") for name in LAUNCHERS),
    *((name, "sqshforge", "1") for name in LAUNCHERS),
    ("mamba_fsdp", "enroot", ""),
)


def golden(name: str, runtime: str, trial: str) -> Path:
    return GOLDEN / f"{name}-{runtime}{'-trial' if trial else ''}.txt"


def call(shell: Shell, runtime: str, trial: str) -> str:
    shell.program("sqshforge")
    if runtime == "enroot":
        shell.enroot()
    data = {} if trial or shell.launcher.stem not in LOCAL_DATA else {"DATASET": "/data/set"}
    words = shell.srun(RUNTIME=runtime, TRIAL=trial, NCCL_DEBUG="INFO", HF_TOKEN="secret", **data)
    said = "\n".join(words).replace(str(shell.programs), "BIN")
    return said.replace(str(shell.folder), "FOLDER") + "\n"


@pytest.mark.parametrize(("name", "runtime", "trial"), CALLS)
def test_srun(name: str, runtime: str, trial: str, tmp_path: Path, root: Path) -> None:
    said = call(Shell(tmp_path, root / "launch" / f"{name}.sbatch"), runtime, trial)
    assert said == golden(name, runtime, trial).read_text()
    assert "secret" not in said  # every user of a machine can see command lines


def test_the_flags_are_those_of_its_entry_point(any_shell: Shell) -> None:
    """The entry point accepts them, except for data that is not here."""
    any_shell.program("sqshforge")
    entry_point = importlib.import_module(
        MODULES.get(any_shell.launcher.stem, f"training.{any_shell.launcher.stem}")
    )
    for trial in ("", "1"):
        words = any_shell.srun(TRIAL=trial, **({} if trial else {"DATASET": "/data/set"}))
        flags = words[words.index("--", words.index("--module")) + 1 :]
        try:
            entry_point.configure(flags)
        except RequestError as error:
            assert not trial and re.search("is not a folder|must have sections", str(error))


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        *((name, "--keep_checkpoints=0") for name in ("mamba_fsdp", "llama_fsdp", "mixtral_fsdp")),
        ("mamba2_neuron", "--num_kept_checkpoint=-1"),
    ],
)
def test_all_checkpoints_may_be_kept(name: str, flag: str, tmp_path: Path, root: Path) -> None:
    """Nothing is said of `keep_every`, which the launcher gives by default."""
    words = Shell(tmp_path, root / "launch" / f"{name}.sbatch").srun(flag, RUNTIME="pyxis")
    entry_point = importlib.import_module(MODULES.get(name, f"training.{name}"))
    entry_point.configure(words[words.index("--", words.index("--module")) + 1 :])


def test_own_runtime_of_the_checkout(shell: Shell) -> None:
    own = shell.folder / ".venv" / "bin"
    own.mkdir(parents=True)
    (own / "sqshforge").write_text("")
    (own / "sqshforge").chmod(0o755)
    assert str(own / "sqshforge") in shell.srun()


def test_the_host_s_python_is_not_the_image_s(shell: Shell) -> None:
    """A PYTHONHOME set by a module system would keep the image's Python from starting."""
    shell.program("sqshforge")
    shell.srun(PYTHONHOME="/apps/python", MEANWHILE="echo ${PYTHONHOME-none} > $CHECKPOINTS/seen")
    assert (shell.folder / "checkpoints/mamba_fsdp-trial/seen").read_text() == "none\n"


SAVES_TO = ("save_ckpt_path", "checkpoint_dir")
"""The names of entry points' flags for the run's folder, besides its aliases."""


def saving_flags(launcher: str) -> list[str]:
    """Return each spelling of the run's folder's flag that a launcher's entry point accepts."""
    if launcher == "mamba_composer":
        return ["trainer.save_folder"]
    module = importlib.import_module(MODULES.get(launcher, f"training.{launcher}"))
    return [name for flag in module.FLAGS if flag.name in SAVES_TO for name in flag.spellings]


def test_the_folder_that_a_flag_names_is_the_runs(any_shell: Shell) -> None:
    """It is created and mounted, so what is saved there outlives the container."""
    any_shell.program("sqshforge")
    name = any_shell.launcher.stem
    below = "/tagged" if name == "mamba2_neuron" else ""
    tag = ["--tag=tagged"] if below else []
    run = f"{any_shell.folder}/new/run"
    flags = saving_flags(name)
    for flag in flags:
        words = any_shell.srun(f"{flag}=new/run", *tag, CHECKPOINTS="other")
        assert words[-2 if below else -1] == f"{flags[0]}={run}"  # the last one counts
        assert f"--mount={run}{below}:{run}{below}" in words
        assert f"--env=CHECKPOINTS={run}{below}" in words
        assert not (any_shell.folder / "other").exists()
        shutil.rmtree(any_shell.folder / "new")
    assert len(flags) == (2 if name == "mamba_fsdp" else 1)


@pytest.mark.parametrize("folder", ["lr=3e-4,bs=8", "12:30"])
def test_a_run_that_cannot_be_mounted_is_refused(shell: Shell, folder: str) -> None:
    shell.program("sqshforge")
    code, said = shell.run(CHECKPOINTS=folder)
    assert code == 2 and not shell.called.exists()
    assert f"error: the run's folder {shell.folder}/{folder} has a colon or a comma" in said


def test_a_working_copy_over_that_of_the_image(shell: Shell) -> None:
    shell.program("sqshforge")
    (shell.folder / "training").mkdir()
    (shell.folder / "other" / "training").mkdir(parents=True)
    mount = f"--mount={shell.folder}/training:/sqshforge/training"
    assert mount in shell.srun(DEV="1")
    assert mount.replace("/training:", "/other/training:") in shell.srun(DEV="other")
    assert not any(mount.split(":")[1] in word for word in shell.srun(DEV="0"))


def enroot_words(shell: Shell, **env: str) -> list[str]:
    """Return the words that enroot gets on a node, where srun has set these variables."""
    shell.enroot()
    words = shell.srun()
    begin = next(n for n, word in enumerate(words) if word.endswith("/start_enroot"))
    assert words[begin + 1] == words[begin].replace("start_enroot", "enroot.conf")
    done = subprocess.run(
        ["bash", shell.state / "start_enroot", shell.state / "enroot.conf", *words[begin + 2 :]],
        env={"PATH": str(shell.programs), "XDG_RUNTIME_DIR": str(shell.folder), **env},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_secrets_are_enroots_by_name(shell: Shell) -> None:
    """Enroot passes on only named variables; the other runtimes pass on all of the host's."""
    words = enroot_words(shell, HF_TOKEN="hidden", WANDB_API_KEY="hidden", PYTHONPATH="/x")
    assert {"--env=HF_TOKEN", "--env=WANDB_API_KEY"} <= set(words)
    assert not any("hidden" in word or "PYTHONPATH" in word for word in words)


def test_enroot_is_given_what_slurm_says_on_the_node(shell: Shell) -> None:
    words = enroot_words(shell, SLURM_NODEID="1", SLURM_STEP_NUM_NODES="2", NCCL_X="a\nb")
    assert {"--env=SLURM_NODEID", "--env=SLURM_STEP_NUM_NODES"} <= set(words)
    assert "--env=NCCL_X" not in words  # with its newline it would become two variables


def test_auto_resume_where_it_exists(shell: Shell) -> None:
    shell.program("sqshforge")
    assert "--auto-resume=1" not in shell.srun()
    shell.help.write_text("   --auto-resume=[0|1]   of SageMaker HyperPod\n")
    assert "--auto-resume=1" in shell.srun()


def test_a_python_of_ones_own(shell: Shell) -> None:
    shell.program("sqshforge")
    words = shell.srun(PYTHON="/env/bin/python")
    assert words[words.index("training.launch") - 2] == "/env/bin/python"


def test_the_image_is_staged_on_all_nodes(shell: Shell) -> None:
    shell.program("sqshforge", '#!/bin/bash\necho "$*" >&2\necho /nvme/key.sqsh\n')
    code, said = shell.run(STAGE="/nvme")
    assert code == 0 and f"stage {shell.image} /nvme --all-nodes" in said
    assert "/nvme/key.sqsh" in shell.called.read_text().splitlines()
    shell.program("sqshforge", "#!/bin/bash\nexit 3\n")
    shell.called.unlink()
    assert shell.run(STAGE="/nvme")[0] == 3 and not shell.called.exists()


def test_an_image_that_is_not_signed_does_not_start(shell: Shell) -> None:
    shell.program("sqshforge", '#!/bin/bash\necho "$*" >&2\n[[ $1 != verify ]]\n')
    code, said = shell.run(SIGNERS="team")
    assert code == 1 and f"verify {shell.image} --signers team" in said
    assert not shell.called.exists()


def test_flags_after_two_dashes(shell: Shell) -> None:
    shell.program("sqshforge")
    words = shell.srun("--", "--model_name=x")
    assert words[-1] == "--model_name=x" and words.count("--") == 2


def test_without_data_it_says_how_to_go_on(shell: Shell) -> None:
    """It must not train anything else instead, and certainly not another model."""
    shell.program("sqshforge")
    build = shell.image.parent
    for asked in ({}, {"MODEL": "state-spaces/mamba-130m"}, {"IMAGE": "my image.sqsh"}):
        code, said = shell.run("--batch_size=1", TRIAL="", **asked)
        assert code == 2 and not shell.called.exists()
        assert "error: there is no /fsx/data/wikicorpus_llama2_7B_tokenized_4k, the" in said
        assert "(DATASET=... trains on another, TRIAL=1 a tiny model)\n" in said
        image = "my\\ image.sqsh" if "IMAGE" in asked else "build/cpu-mamba.sqsh"
        make = f"sqshforge run {image} --mount=/fsx:/fsx -- python3 -m training.get_dataset"
        assert said.endswith(f"fix: {make} --launcher=mamba_fsdp\n")
    shell.image.rename(build / "cuda13-mamba.sqsh")
    assert "run build/cuda13-mamba.sqsh --" in shell.run(TRIAL="")[1]
    (build / "cuda13-mamba.sqsh").rename(shell.folder / "elsewhere")
    _, said = shell.run(TRIAL="")  # there is no image: the fix makes the first one
    make = "make sqsh TARGET=cuda-mamba && sqshforge run build/cuda-mamba.sqsh --mount="
    assert f"fix: {make}" in said
    (shell.folder / "elsewhere").rename(shell.image)
    tiny = "--model_name=mamba-tiny"
    assert tiny in shell.srun()
    assert tiny not in shell.srun(TRIAL="", DATASET="/data")
    assert tiny not in shell.srun("--dataset_path=/data", TRIAL="")
    assert tiny not in shell.srun(TRIAL="0", DATASET="/data")


def test_a_trial_has_a_folder_of_its_own(any_shell: Shell) -> None:
    """The next run has another model, and would not be allowed to use the trial's folder."""
    any_shell.program("sqshforge")
    folders = {}
    for trial in ("1", "0", ""):
        any_shell.srun(TRIAL=trial, DATASET="/data")
        (path,) = (any_shell.folder / "checkpoints").iterdir()
        folders[trial] = path.name
        shutil.rmtree(path)
    name = any_shell.launcher.stem
    assert folders == {"1": f"{name}-trial", "0": name, "": name}
    any_shell.srun(TRIAL="1", CHECKPOINTS="mine")
    assert (any_shell.folder / "mine").is_dir()


def test_enroot_is_given_gpus_only_where_slurm_gave_some(shell: Shell) -> None:
    """`--env` makes an unset variable empty, and then CUDA sees no GPU."""
    assert "--env=CUDA_VISIBLE_DEVICES" not in enroot_words(shell)
    assert "--env=CUDA_VISIBLE_DEVICES" in enroot_words(shell, CUDA_VISIBLE_DEVICES="0,1")


def test_pyxis_is_known_by_its_help(shell: Shell) -> None:
    shell.enroot()
    shell.help.write_text("   --container-image=...   [pyxis] the image\n" * 5000)
    assert f"--container-image={shell.image}" in shell.srun()


def test_runtime_can_be_forced(shell: Shell) -> None:
    shell.enroot()
    shell.program("sqshforge")
    code, said = shell.run(RUNTIME="sqshforge")
    assert code == 0 and f"{shell.image} by sqshforge on node-[1-2]" in said
    assert "enroot" not in shell.called.read_text()


def test_the_cuda_image_comes_first(shell: Shell) -> None:
    cuda = shell.image.with_name("cuda-mamba.sqsh")
    cuda.write_bytes(NOTHING)
    shell.program("sqshforge")
    assert str(cuda) in shell.srun()


def test_flags_are_not_read_by_the_shell(shell: Shell) -> None:
    shell.program("sqshforge")
    flags = ["--dataset_path=text:*.py", "--note=$(id) a  b", "-", "", "--x='\"\\"]
    assert shell.srun(*flags)[-len(flags) :] == flags


def test_defaults_of_the_flags(shell: Shell) -> None:
    shell.program("sqshforge")
    asked = {"MODEL": "m", "DATASET": "text:*.py", "STEPS": "5", "CHECKPOINTS": "here and there"}
    words = shell.srun(TRIAL="", **asked)
    assert {"--model_name=m", "--dataset_path=text:*.py", "--num_steps=5"} <= set(words)
    assert f"--save_ckpt_path={shell.folder}/here and there" in words


@pytest.mark.parametrize(
    ("env", "shown"),
    [
        ({"IMAGE": "no.sqsh"}, "error: there is no {folder}/no.sqsh (on node-1 node-2)\n"),
        ({"IMAGE": "no.sqsh"}, "fix: make sqsh TARGET=cuda-mamba, or IMAGE=FILE.sqsh\n"),
        ({"RUNTIME": "podman"}, "error: RUNTIME=podman is none\n"),
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID: start this with sbatch"),
    ],
)
def test_wrong_requests(shell: Shell, env: dict[str, str], shown: str) -> None:
    code, said = shell.run(**env)
    assert code == (1 if "SLURM_JOB_ID" in env else 2)
    assert shown.format(folder=shell.folder) in said
    assert not shell.called.exists()


def test_a_master_of_ones_own(shell: Shell) -> None:
    shell.program("sqshforge")
    assert "--env=MASTER_ADDR=head" in shell.srun(MASTER_ADDR="head")
