"""What a launcher trains on: its default, or the user's own data, by a variable or by a flag.

The user's data replaces everything that belongs to the default: the configuration and evaluation of
C4, the tokenizer of texts, the vocabulary of bytes.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from tests.support.launcher_shell import Shell
from training.config.config import Config
from training.config.global_batch import accumulate
from training.errors import RequestError

pytestmark = pytest.mark.processes

MODULES = {"mixtral_fsdp": "llama_fsdp"}
LLAMA = ("llama_fsdp", "mixtral_fsdp")
OF_C4 = ("dataset_config_name", "validation_freq")


def started(folder: Path, root: Path, name: str, *flags: str, **env: str) -> Config:
    """Return the configuration that the ranks get; their entry point must accept it."""
    words = flags_of(folder, root, name, *flags, **env)
    entry_point = importlib.import_module(f"training.{MODULES.get(name, name)}")
    made: Config = entry_point.configure(words)
    return made


def flags_of(folder: Path, root: Path, name: str, *flags: str, **env: str) -> list[str]:
    shell = Shell(folder, root / "launch" / f"{name}.sbatch")
    shell.program("sqshforge")
    words = shell.srun(*flags, **{"TRIAL": "", **env})
    return words[words.index("--", words.index("--module")) + 1 :]


@pytest.mark.parametrize("name", LLAMA)
@pytest.mark.parametrize(
    ("flags", "env"),
    [
        (["--dataset=stream:/fsx/texts"], {}),
        (["--dataset_path", "stream:/fsx/texts"], {}),
        ([], {"DATASET": "stream:/fsx/texts"}),
        (["--dataset=stream:/fsx/texts"], {"DATASET": "/fsx/other"}),
    ],
)
def test_ones_own_texts(
    tmp_path: Path, root: Path, name: str, flags: list[str], env: dict[str, str]
) -> None:
    config = started(tmp_path, root, name, *flags, **env)
    assert config.data.dataset_path == "stream:/fsx/texts"
    assert config.data.dataset_config == "" and config.run.eval_interval == 0
    assert "llama" in config.data.tokenizer or "Mixtral" in config.data.tokenizer


@pytest.mark.parametrize("name", LLAMA)
def test_texts_of_the_hub(tmp_path: Path, root: Path, name: str) -> None:
    """C4 is the default, with its own configuration and validation data; other sets have none."""
    config = started(tmp_path, root, name)
    assert config.data.dataset_path == config.data.eval_dataset_path == "stream:allenai/c4"
    assert (config.data.dataset_config, config.run.eval_interval) == ("en", 500)
    (tmp_path / "other").mkdir()
    other = started(tmp_path / "other", root, name, DATASET="me/texts")
    assert other.data.dataset_path == "stream:me/texts" and not other.data.eval_dataset_path
    assert other.data.tokenizer == config.data.tokenizer and not other.data.dataset_config


@pytest.mark.parametrize("name", LLAMA)
def test_a_tokenized_set_takes_no_tokenizer(tmp_path: Path, root: Path, name: str) -> None:
    config = started(tmp_path, root, name, DATASET="/fsx/set")
    assert config.data.dataset_path == "/fsx/set" and not config.data.tokenizer


def test_ones_own_flags_win(tmp_path: Path, root: Path) -> None:
    flags = ("--dataset=stream:/fsx/texts", "--tokenizer=bytes", "--vocab_size=256")
    config = started(tmp_path, root, "llama_fsdp", *flags)
    assert config.data.tokenizer == "bytes" and config.model.sizes.vocab_size == 256


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("llama_fsdp", ["--dataset=/fsx/set"], 32000),
        ("mixtral_fsdp", ["--dataset=/fsx/set"], 32000),
        ("mamba_fsdp", ["--dataset_path=/fsx/set"], 50280),
        ("mamba_fsdp", ["--dataset_path=/fsx/set", "--vocab_size=1000"], 1000),
        ("mamba_fsdp", [], 256),
        ("llama_fsdp", [], 256),
        ("mamba2_neuron", [], 256),
    ],
)
def test_a_trial_on_ones_own_data_has_their_vocabulary(
    tmp_path: Path, root: Path, name: str, flags: list[str], words: int
) -> None:
    config = started(tmp_path, root, name, *flags, TRIAL="1")
    assert config.model.sizes.vocab_size == words
    assert config.data.dataset_path == ("/fsx/set" if flags else "text:/usr/lib/python3.*/**/*.py")


@pytest.mark.parametrize(
    ("flags", "env", "trained"),
    [
        ([], {}, "synthetic:"),
        (["--training_dir=/fsx/set"], {}, "lines:/fsx/set/*.json.gz"),
        (["--dataset_path=/fsx/set"], {}, "lines:/fsx/set/*.json.gz"),
        (["--dataset_path", "/fsx/set"], {"DATASET": "/fsx/other"}, "lines:/fsx/set/*.json.gz"),
        ([], {"DATASET": "/fsx/set"}, "lines:/fsx/set/*.json.gz"),
        ([], {"SM_CHANNEL_TRAIN": "/opt/train"}, "lines:/opt/train/*.json.gz"),
        ([], {"SM_CHANNEL_TRAIN": "/opt/train", "DATASET": "text:/x"}, "text:/x"),
        (["--use_synthetic_data=1"], {"SM_CHANNEL_TRAIN": "/opt/train"}, "synthetic:"),
    ],
)
@pytest.mark.parametrize("trial", ["", "1"])
def test_smp_reads_made_up_data_only_without_other(
    tmp_path: Path, root: Path, flags: list[str], env: dict[str, str], trained: str, trial: str
) -> None:
    config = started(tmp_path, root, "llama_smp", *flags, **env, TRIAL=trial)
    assert config.data.dataset_path == trained
    made_up = not flags and not env
    assert config.model.sizes.vocab_size == (256 if trial and made_up else 32000)


def test_smp_sees_the_folders_that_sagemaker_names(tmp_path: Path, root: Path) -> None:
    shell = Shell(tmp_path, root / "launch" / "llama_smp.sbatch")
    shell.program("sqshforge")
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
    named = {"SM_CHANNEL_TRAIN": "train", "SM_CHANNEL_TEST": f"{tmp_path}/test"}
    words = shell.srun("--validation_freq=5", TRIAL="", **named)
    assert f"--training_dir={tmp_path}/train" in words
    for name in ("train", "test"):
        assert f"--mount={tmp_path}/{name}:{tmp_path}/{name}" in words


PRETRAINED = {
    "model_type": "mistral",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 257,
}


@pytest.mark.parametrize(
    "flags",
    [
        ("--finetune=1", "--pretrained_model_name={}", "--finetune_checkpoint_load_dir={}"),
        ("--hf_pretrained_model_name_or_dir", "{}"),
    ],
)
def test_smp_finetunes_a_model_of_any_kind_and_size(
    tmp_path: Path, root: Path, flags: tuple[str, ...]
) -> None:
    """The launcher has a default model, and the pretrained one has its own sizes."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(PRETRAINED))
    given = [flag.format(model) for flag in flags]
    config = started(tmp_path, root, "llama_smp", *given, "--training_dir=/fsx/c4")
    assert (config.model.sizes.family, config.model.init_weights) == ("mistral", str(model))
    assert config.data.dataset_path == "lines:/fsx/c4/*.json.gz"
    (tmp_path / "again").mkdir()
    code, said = Shell(tmp_path / "again", root / "launch" / "llama_smp.sbatch").run(*given)
    assert code == 2 and f"error: a trial has a tiny model of its own, not {model}\n" in said


@pytest.mark.parametrize("trial", ["", "1"])
@pytest.mark.parametrize(("kind", "family"), [("mistral", "mistral"), ("llama_v3", "llama")])
def test_smp_takes_types_that_have_no_sizes_by_name(
    tmp_path: Path, root: Path, kind: str, family: str, trial: str
) -> None:
    """The launcher's default model is Llama 2 of 70b."""
    flags = (f"--model_type={kind}", "--hidden_width=256", "--num_layers=3", "--num_heads=8")
    config = started(tmp_path, root, "llama_smp", *flags, TRIAL=trial)
    sizes = config.model.sizes
    assert (sizes.family, sizes.d_model) == (family, 256)
    (tmp_path / "again").mkdir()
    with pytest.raises(RequestError, match=f"--model_size: {kind} has none"):
        started(tmp_path / "again", root, "llama_smp", flags[0], MODEL="7b", TRIAL=trial)


@pytest.mark.parametrize("tp", ["2", "8"])
def test_a_step_of_the_neuron_launcher(tmp_path: Path, root: Path, tp: str) -> None:
    """1,024 sequences, whatever TP and the number of nodes; for 3 nodes that is impossible."""
    config = started(tmp_path, root, "mamba2_neuron", "--seq_len=512", DATASET="text:/x", TP=tp)
    for nodes in (1, 4, 16):
        readers = nodes * 32 // int(tp)
        data = accumulate(config, readers).data
        assert data.batch_size * readers * data.gradient_accumulation == 1024
    with pytest.raises(RequestError, match="fix: give the nearest,"):
        accumulate(config, 3 * 32 // int(tp))


@pytest.mark.parametrize(
    ("flags", "env", "given"),
    [
        ([], {}, {"--global_batch=1024"}),
        ([], {"GLOBAL_BATCH": "512"}, {"--global_batch=512"}),
        ([], {"GRAD_ACCUM": "4"}, {"--grad_accum_usteps=4"}),
        (["--grad_accum_usteps=4"], {}, {"--grad_accum_usteps=4"}),
    ],
)
def test_batches_or_sequences_of_a_step(
    tmp_path: Path, root: Path, flags: list[str], env: dict[str, str], given: set[str]
) -> None:
    words = flags_of(tmp_path, root, "mamba2_neuron", *flags, DATASET="/fsx/set", **env)
    sizes = {word for word in words if word.startswith(("--global_batch", "--grad_accum"))}
    assert sizes == given


def test_an_image_and_a_configuration_of_ones_own(tmp_path: Path, root: Path) -> None:
    shell = Shell(tmp_path, root / "launch" / "mamba_composer.sbatch")
    shell.program("sqshforge")
    shell.image.rename(tmp_path / "mine.sqsh")
    (tmp_path / "mine.yaml").touch()
    words = shell.srun(IMAGE="mine.sqsh", CONFIG="mine.yaml", CHECKPOINTS="saved", TRIAL="")
    assert f"{tmp_path}/mine.sqsh" in words and f"{tmp_path}/mine.yaml" in words
    assert f"trainer.save_folder={tmp_path}/saved" in words


@pytest.mark.parametrize("dashes", [[], ["--"]])
def test_the_neuron_launcher_takes_folders_as_the_systems_script(
    tmp_path: Path, root: Path, dashes: list[str]
) -> None:
    """DATA_DIR SAVE_DIR before the flags override the variables; GBS is GLOBAL_BATCH."""
    (tmp_path / "set").mkdir()
    others = {"DATASET": "/fsx/other", "CHECKPOINTS": "other", "GBS": "512", "TRIAL": ""}
    shell = Shell(tmp_path, root / "launch" / "mamba2_neuron.sbatch")
    shell.program("sqshforge")
    words = shell.srun(*dashes, "./set", "saved/7b", "--max_steps", "16", **others)
    flags = words[words.index("--", words.index("--module")) + 1 :]
    given = {f"--data_dir={tmp_path}/set", f"--checkpoint_dir={tmp_path}/saved", "--tag=7b"}
    assert {*given, "--global_batch=512"} <= set(flags)
    assert flags[-2:] == ["--max_steps", "16"] and not {"./set", "saved/7b"} & set(flags)
    assert f"--mount={tmp_path}/set:{tmp_path}/set" in words
    assert f"--env=CHECKPOINTS={tmp_path}/saved/7b" in words
    assert not (tmp_path / "other").exists()


def test_the_neuron_launcher_takes_the_data_alone(tmp_path: Path, root: Path) -> None:
    words = flags_of(tmp_path, root, "mamba2_neuron", "text:/x/*.py", GLOBAL_BATCH="64", GBS="512")
    run = tmp_path / "checkpoints"
    given = {"--data_dir=text:/x/*.py", f"--checkpoint_dir={run}", "--tag=mamba2_neuron"}
    assert {*given, "--global_batch=64"} <= set(words)


def test_a_third_folder_is_refused(tmp_path: Path, root: Path) -> None:
    shell = Shell(tmp_path, root / "launch" / "mamba2_neuron.sbatch")
    code, said = shell.run("set", "saved", "more", "--max_steps=16")
    assert code == 2
    assert "error: 'more' is one word too many" in said
    assert "fix: sbatch mamba2_neuron.sbatch DATA_DIR SAVE_DIR [--FLAG=VALUE ...]" in said


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("mamba_fsdp", ["dataset_path"]),
        ("llama_fsdp", ["dataset", "dataset_path"]),
        ("mixtral_fsdp", ["dataset", "dataset_path"]),
        ("llama_smp", ["training_dir", "dataset_path"]),
        ("mamba2_neuron", ["data_dir", "dataset_path"]),
    ],
)
def test_data_in_the_folder_of_sbatch(
    tmp_path: Path, root: Path, name: str, flags: list[str]
) -> None:
    """The container starts in another folder, and a set of the hub has a name like a path."""
    shell = Shell(tmp_path, root / "launch" / f"{name}.sbatch")
    shell.program("sqshforge")
    (tmp_path / "my" / "set").mkdir(parents=True)
    mount = f"--mount={tmp_path}/my/set:{tmp_path}/my/set"
    for asked in ("my/set", "./my/set", "stream:my/set"):
        absolute = f"--{flags[0]}={asked.rpartition(':')[0]}{':' * asked.count(':')}"
        absolute += f"{tmp_path}/my/set"
        words = shell.srun(TRIAL="", DATASET=asked)
        assert absolute in words and mount in words
        assert "--tokenizer" not in " ".join(words) or asked.startswith("stream:")
        for flag in flags:
            words = shell.srun(f"--{flag}={asked}", TRIAL="")
            assert words[-1] == absolute and mount in words
    for asked in ("me/texts", "stream:me/texts", "text:*.py", "/fsx/set", "synthetic:"):
        words = shell.srun(f"--{flags[-1]}={asked}", TRIAL="")
        assert words[-1] == f"--{flags[-1]}={asked}"
        assert f"--{flags[0]}={asked}" in shell.srun(TRIAL="", DATASET=asked)


@pytest.mark.parametrize("data", ["packed:~/a.npy", "~/a.npy"])
def test_the_home_folder_after_an_equals_sign_is_the_users(
    tmp_path: Path, root: Path, data: str
) -> None:
    """No shell expands that ~, and in the container it would mean another home."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "a.npy").touch()
    shell = Shell(tmp_path, root / "launch" / "mamba_fsdp.sbatch")
    shell.program("sqshforge")
    given = ("--save_ckpt_path=~/runs/x", f"--dataset_path={data}", "--wandb_project=a~/x", "~x")
    words = shell.srun(*given, HOME=str(home))
    assert words[-5:] == [
        *("--save_ckpt_path=~/runs/x".replace("~", str(home)), given[1].replace("~", str(home))),
        *(given[2], given[3], f"--save_ckpt_path={home}/runs/x"),
    ]
    assert f"--mount={home}/a.npy:{home}/a.npy" in words
    assert (home / "runs" / "x").is_dir() and not (tmp_path / "~").exists()
