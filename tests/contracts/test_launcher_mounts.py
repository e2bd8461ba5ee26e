"""What a launcher mounts from the host: MOUNTS, or existing paths that the job names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.launcher_shell import Shell

pytestmark = pytest.mark.processes


@pytest.fixture
def shell(tmp_path: Path, root: Path) -> Shell:
    shell = Shell(tmp_path, root / "launch" / "mamba_fsdp.sbatch")
    shell.program("sqshforge")
    return shell


@pytest.fixture
def composer(tmp_path: Path, root: Path) -> Shell:
    shell = Shell(tmp_path, root / "launch" / "mamba_composer.sbatch")
    shell.program("sqshforge")
    return shell


def mounted(shell: Shell, *flags: str, **env: str) -> list[str]:
    """Return what is mounted from the shell's folder besides the run's own, as relative paths."""
    words = shell.srun(*flags, **{"CHECKPOINTS": "run", **env})
    sources = [word.split(":")[0].removeprefix("--mount=") for word in words if "--mount" in word]
    assert f"--mount={shell.folder}/run:{shell.folder}/run" in words
    own = [source.removeprefix(f"{shell.folder}/") for source in sources]
    return [source for source in own if source not in ("run", "/fsx")]


def made(shell: Shell, *names: str) -> list[str]:
    """Create files in the shell's folder; returns their paths."""
    for name in names:
        (shell.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (shell.folder / name).touch()
    return [f"{shell.folder}/{name}" for name in names]


def test_files_of_a_stream(shell: Shell) -> None:
    """They are separated by commas; what does not exist is left out."""
    a, b = made(shell, "one/a.jsonl", "two/b,c.jsonl")
    asked = f"stream:{a},{shell.folder}/two/*.jsonl,https://host/c.jsonl,{shell.folder}/none"
    assert mounted(shell, DATASET=asked) == ["one/a.jsonl", "two"]
    assert mounted(shell, f"--eval_dataset_path={asked}") == ["one/a.jsonl", "two"]
    _, said = shell.run(DATASET=f"stream:{b}")
    assert f"{b} is not mounted: its name has a colon or a comma" in said


MIXTURE = """\
# as {0}/unused has it
- {{path: 'packed:{0}/packed/*.npy', weight: 0.5}}
- path: {0}/a set  # don't take {0}/unused
  weight: 1
- {{weight: 2, order: 3, path: lines:{0}/lines}}
- {{"path": "packed-17/13:{0}/wide.npy", "weight": 1}}
- {{path: "{0}/x,y", weight: 1}}
- {{path: packed:{0}/none.npy, weight: 1}}
- {{path: packed:relative/none.npy, weight: 1}}
"""


def test_sources_of_a_mixture(shell: Shell) -> None:
    """The file that lists them is mounted too."""
    made(shell, "packed/1.npy", "a set/state.json", "lines/a.json", "wide.npy", "x,y", "unused")
    (shell.folder / "mix.yaml").write_text(MIXTURE.format(shell.folder))
    asked = f"mixture:{shell.folder}/mix.yaml"
    found = ["mix.yaml", "packed", "a set", "lines", "wide.npy"]
    assert mounted(shell, DATASET=asked) == found
    assert mounted(shell, "--dataset_path", asked) == found
    _, said = shell.run(f"--dataset_path={asked}")
    assert said.count("is not mounted") == 1
    assert f"{shell.folder}/x,y is not mounted: its name has a colon or a comma" in said


def test_a_mixture_in_json(shell: Shell) -> None:
    one, two = made(shell, "one.npy", "two.npy")
    entries = [{"path": f"packed:{path}", "weight": 1} for path in (one, two)]
    (shell.folder / "mix").write_text(json.dumps(entries))
    asked = f"mixture:{shell.folder}/mix"
    assert mounted(shell, DATASET=asked) == ["mix", "one.npy", "two.npy"]


def test_what_the_configuration_of_composer_names(composer: Shell) -> None:
    made(composer, "packed/1.npy", "lang=en/2.npy", "held/out.npy", "other/3.npy")
    (composer.folder / "config.yaml").write_text(
        f"data:\n"
        f"  text_paths:\n"
        f"  - path: {composer.folder}/packed/*.npy\n"
        f"    weight: 0.5\n"
        f"  code_paths: [{{path: {composer.folder}/lang=en/2.npy, weight: 0.5}}]\n"
        f"  eval_paths: [{{label: a, path: {composer.folder}/held/out.npy}}]\n"
        f"trainer:\n"
        f"  save_folder: {composer.folder}/none\n"
    )
    found = ["config.yaml", "packed", "lang=en/2.npy", "held/out.npy"]
    assert mounted(composer, TRIAL="") == found
    change = f"data.code_paths=[{{path: {composer.folder}/other/3.npy, weight: 1}}]"
    assert mounted(composer, change, TRIAL="") == [*found, "other/3.npy"]


@pytest.mark.parametrize(
    "change", ["data.x={}", "data.x=[{}]", "data.x=['{}', b]", "data.x=[a, {}]", 'data.x="{}"']
)
def test_changes_of_composers_configuration(composer: Shell, change: str) -> None:
    (path,) = made(composer, "a b=c")
    assert mounted(composer, change.format(path), TRIAL="") == ["config.yaml", "a b=c"]


def test_what_variables_name(shell: Shell) -> None:
    """Caches, certificates and folders of results would be missing in the container, or lost."""
    hub, seed, pem, _ = made(shell, "hub/x", "seed/x", "ca.pem", "nsys/x")
    env = {"HF_HOME": hub, "TRITON_CACHE_SEED": seed, "SSL_CERT_FILE": pem}
    env["NSYS_OUTPUT"] = f"{shell.folder}/nsys/of_%q{{RANK}}"
    env["WANDB_DIR"] = f"{shell.folder}/none"
    env["NEURON_COMPILE_CACHE_URL"] = "s3://bucket/cache"
    assert mounted(shell, **env) == ["hub/x", "seed/x", "ca.pem", "nsys"]
    assert mounted(shell, **env, MOUNTS="") == []


def test_the_folder_that_keeps_kernels_is_made(shell: Shell) -> None:
    """Only existing paths are mounted; with the user's own MOUNTS it may lie inside one of them."""
    folder = shell.folder / "new" / "kernels"
    assert mounted(shell, TRITON_CACHE_SAVE=str(folder), MOUNTS="") == []
    assert not folder.exists()
    assert mounted(shell, TRITON_CACHE_SAVE=str(folder)) == ["new/kernels"]
    code, said = shell.run(TRITON_CACHE_SAVE=f"{shell.image}/kernels")
    assert code == 0
    assert f"TRITON_CACHE_SAVE={shell.image}/kernels is not mounted: kernels are not kept" in said


def test_relative_paths_are_those_of_the_folder_of_sbatch(shell: Shell) -> None:
    """In the container, a relative path would start at another folder, and vanish with it."""
    shell.program("sqshforge")
    for name in ("hub", "prof"):
        (shell.folder / name).mkdir()
    asked = {"HF_HOME": "hub", "TRITON_CACHE_SAVE": "kernels", "NSYS_OUTPUT": "prof/%h"}
    words = shell.srun(**asked, NEURON_COMPILE_CACHE_URL="s3://bucket/cache")
    for name in ("TRITON_CACHE_SAVE", "NSYS_OUTPUT"):  # the others are in srun's own environment
        assert f"--env={name}={shell.folder}/{asked[name]}" in words
    assert "--env=NEURON_COMPILE_CACHE_URL=s3://bucket/cache" in words
    for name in ("hub", "kernels", "prof"):
        assert f"--mount={shell.folder}/{name}:{shell.folder}/{name}" in words
    words = shell.srun(NSYS_OUTPUT="of_%h")
    assert f"--env=NSYS_OUTPUT={shell.folder}/of_%h" in words
    assert f"--mount={shell.folder}:{shell.folder}" in words


def test_only_what_is_there_is_mounted(shell: Shell) -> None:
    data = shell.folder / "set"
    assert f"--mount={data}:{data}" not in shell.srun(DATASET=str(data))
    data.mkdir()
    assert f"--mount={data}:{data}" in shell.srun(DATASET=str(data))


def test_data_that_cannot_be_mounted_is_named(shell: Shell) -> None:
    data = shell.folder / "set,12:30"
    data.mkdir()
    _, said = shell.run(DATASET=str(data))
    assert f"{data} is not mounted: its name has a colon or a comma" in said


@pytest.mark.parametrize("data", ["stream:{}", "packed:{}/*.bin", "lines:{}/a?.json", "{}"])
def test_ones_own_data_are_seen_in_the_container(shell: Shell, data: str) -> None:
    folder = shell.folder / "data"
    folder.mkdir()
    assert f"--mount={folder}:{folder}" in shell.srun(f"--dataset_path={data.format(folder)}")


def test_what_flags_name_is_seen_in_the_container(tmp_path: Path, root: Path) -> None:
    """Except for what the image has itself, and for what does not exist."""
    names = ("weights", "tokenizer.json", "held-out")
    for name in names:
        (tmp_path / name).touch()
    shell = Shell(tmp_path, root / "launch" / "llama_fsdp.sbatch")
    shell.program("sqshforge")
    words = shell.srun(
        f"--init_weights={tmp_path}/weights",
        "--tokenizer",
        f"{tmp_path}/tokenizer.json",
        f"--eval_dataset_path=stream:{tmp_path}/held-out",
        "--tensorboard_dir=/etc/hostname",
        "--dataset_path=text:/usr/**/*.py",
        f"--trace_dir={tmp_path}/none",
    )
    mounts = [word.partition(":")[0] for word in words if word.startswith("--mount=")]
    run = tmp_path / "checkpoints" / "llama_fsdp-trial"
    assert mounts == [f"--mount={path}" for path in (run, *(tmp_path / name for name in names))]


def test_the_python_sources_of_a_trial_are_the_images(shell: Shell) -> None:
    assert not [word for word in shell.srun() if word.startswith("--mount=/usr")]


def test_mounts_of_ones_own(shell: Shell) -> None:
    """Relative to the folder of sbatch; enroot refuses blanks, and spells read-only differently."""
    for name in ("data", "a b\\c"):
        (shell.folder / name).mkdir()
    asked = {"MOUNTS": "data:/data,data,/tmp:/t:ro,a b\\c:/c d", "CHECKPOINTS": "mine"}
    here = shell.folder
    run = f"{here}/mine:{here}/mine"
    shell.enroot()
    assert mounts_of(shell, **asked) == [
        f"{here}/data:/data:rbind,x-create=auto",
        f"{here}/data:{here}/data:rbind,x-create=auto",
        "/tmp:/t:bind,x-create=auto,ro",
        rf"{here}/a\040b\134c:/c\040d:rbind,x-create=auto",
        f"{run}:rbind,x-create=auto",
    ]
    shell.program("sqshforge")
    plain = [f"{here}/data:/data", f"{here}/data:{here}/data", "/tmp:/t:ro", f"{here}/a b\\c:/c d"]
    assert mounts_of(shell, RUNTIME="sqshforge", **asked) == [*plain, run]
    words = shell.srun(RUNTIME="pyxis", **asked)
    assert f"--container-mounts={','.join([*plain, run])}" in words


def test_the_run_s_folder_in_a_mount(shell: Shell) -> None:
    """It is not mounted a second time, unless the mount around it is read-only."""
    shell.program("sqshforge")
    around = f"{shell.folder}:{shell.folder}"
    run = f"{shell.folder}/mine:{shell.folder}/mine"
    assert mounts_of(shell, MOUNTS=around, CHECKPOINTS="mine") == [around]
    asked = f",{around}:ro,"
    assert mounts_of(shell, MOUNTS=asked, CHECKPOINTS="mine") == [f"{around}:ro", run]


def mounts_of(shell: Shell, **env: str) -> list[str]:
    """Return what a launcher asks its runtime to mount."""
    words = shell.srun(**env)
    return [word.removeprefix("--mount=") for word in words if word.startswith("--mount=")]
