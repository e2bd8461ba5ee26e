"""`python -m training --config FILE key=value`: what files may contain, and errors in them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.support.runs import ROOT, losses, run, train, write_text
from training.__main__ import configure
from training.config.config import Config
from training.convert import hf
from training.errors import RequestError

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
POSITIONS = "max_position_embeddings"


def read(tmp_path: Path, text: str, *changes: str) -> Config:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return configure(["--config", str(file), *changes])


LEAST = """
model: {name: mamba-tiny}
data: {dataset_path: "text:x"}
run: {save_ckpt_path: /x}
"""


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_system_has_a_file_that_holds(path: Path) -> None:
    config = configure(["--config", str(path)])
    said = path.read_text().replace(",", "")
    ranks = {"mamba_composer": 8, "mixtral_fsdp": 128, "llama_smp": 64}.get(path.stem, 32)
    data = config.data
    step = data.batch_size * data.gradient_accumulation * ranks * data.seq_length
    assert f"{step} tokens a step" in said and f"{step * config.run.num_steps} tokens" in said


def test_all_systems_are_there() -> None:
    assert {path.stem for path in CONFIGS} == {
        *("mamba_fsdp", "mamba2_neuron", "mamba_composer"),
        *("llama_fsdp", "mixtral_fsdp", "llama_smp"),
    }


def test_what_follows_the_file_counts_more(tmp_path: Path) -> None:
    text = LEAST + "optim: {learning_rate: 1e-3}\nparallel:\nschedule: {name: cosine}\n"
    given = read(tmp_path, text, "learning_rate=3e-4", "run.num_steps=7", "model.n_layer=5")
    assert (given.optim.learning_rate, given.run.num_steps) == (3e-4, 7)
    assert given.model.sizes.n_layer == 5 and given.model.sizes.d_model == 128
    assert given.optim.schedule.name == "cosine"
    assert read(tmp_path, text, "schedule=linear").optim.schedule.name == "linear"
    assert read(tmp_path, text, "use_wandb=1", "wandb_run_id=12e3").run.wandb_run_id == "12e3"
    assert read(tmp_path, text, "use_wandb=1", "wandb_run_id=2026-02-30").run.wandb_run_id
    assert read(tmp_path, text, "low_cpu_fsdp=yes").parallel.low_cpu_fsdp is True


@pytest.mark.parametrize("name", ["llama-tiny", "bamba-tiny"])
def test_a_model_is_meant_for_the_sequences_that_it_is_trained_on(
    tmp_path: Path, name: str
) -> None:
    text = LEAST.replace("mamba-tiny", name)

    def written(*changes: str) -> int:
        context: int = hf.write(read(tmp_path, text, *changes).model.sizes)[POSITIONS]
        return context

    assert written("seq_length=6000") == written("seq_length=6000", "model.context=16") == 6000
    assert written("seq_length=32") == 4096 and written("model.context=8000") == 8000


def test_a_home_folder_is_one_in_files_and_after_an_equals_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No shell expands either of them, and a folder named ~ is not meant."""
    monkeypatch.setenv("HOME", "/home/me")
    text = "model: {name: mamba-tiny}\ndata: {dataset_path: packed-17/13:~/x/*.npy}\n"
    text += "run: {save_ckpt_path: ~/runs/x}\n"
    given = read(tmp_path, text, "tensorboard_dir=~/tb", "data.eval_dataset_path=text:~")
    assert given.data.dataset_path == "packed-17/13:/home/me/x/*.npy"
    assert given.data.eval_dataset_path == "text:/home/me"
    assert (given.run.save_ckpt_path, given.run.tensorboard_dir) == (
        *("/home/me/runs/x", "/home/me/tb"),
    )
    kept = read(tmp_path, text, "save_ckpt_path=./~", "use_wandb=1", "wandb_project=~/x").run
    assert (kept.save_ckpt_path, kept.wandb_project) == ("./~", "~/x")
    with pytest.raises(RequestError, match=r"a path, with \./ before a ~ .*, not '~nobody-here/x'"):
        read(tmp_path, text, "save_ckpt_path=~nobody-here/x")


def test_a_variable_in_a_path_is_refused_unless_a_folder_has_its_name(tmp_path: Path) -> None:
    """Nothing expands it: a folder of that name used to be created."""
    text = LEAST
    for value in ("$SCRATCH/run", "${SCRATCH}/run", f"{tmp_path}/$USER", f"text:{tmp_path}/$A/*"):
        for key in ("run.save_ckpt_path", "data.dataset_path"):
            with pytest.raises(RequestError, match=rf"{key}: must be a path without \$"):
                read(tmp_path, text, f"{key}={value}")
    (tmp_path / "$A").mkdir()
    for value in (f"{tmp_path}/$A/new", f"text:{tmp_path}/$A/*", f"{tmp_path}/5$", "s3://x/$A"):
        assert read(tmp_path, text, f"dataset_path={value}").data.dataset_path == value
    assert read(tmp_path, text, "use_wandb=1", "wandb_project=$A").run.wandb_project == "$A"


def test_numbers_and_booleans_are_those_of_flags(tmp_path: Path) -> None:
    """YAML 1.1 would read 0123 as 83, 1:30 as 90, and on as true."""
    inside = LEAST.replace("save_ckpt_path", "wandb_run_id: 0123, use_wandb: yes, save_ckpt_path")
    given = read(tmp_path, inside.replace("/x", "on"), "seed=0123", "learning_rate=01.5")
    assert (given.run.wandb_run_id, given.run.save_ckpt_path) == ("0123", "on")
    assert (given.run.seed, given.optim.learning_rate) == (123, 1.5)
    given = read(tmp_path, LEAST + "optim: {beta1: 00.5}", "num_steps=1_000", "seed=0x10")
    assert (given.optim.beta1, given.run.num_steps, given.run.seed) == (0.5, 1000, 16)
    for key, word, must in (
        ("run.progress", "on", "True or False"),
        ("run.progress", "Off", "True or False"),
        ("run.seed", "1:30", "a whole number"),
        ("run.seed", "0o17", "a whole number"),
        ("optim.learning_rate", "1:30.5", "a number"),
        ("model.n_layer", "1:30", "a whole number"),
    ):
        fault = f"{key}: must be {must}, not {word!r}"
        with pytest.raises(RequestError) as error:
            read(tmp_path, LEAST, f"{key}={word}")
        assert str(error.value) == fault
        section, _, name = key.partition(".")
        text = LEAST.replace(f"{section}: {{", f"{section}: {{{name}: {word}, ")
        text += f"{section}: {{{name}: {word}}}" if section == "optim" else ""
        with pytest.raises(RequestError) as error:
            read(tmp_path, text)
        assert str(error.value).endswith(fault)


def test_sizes_alone_make_a_model(tmp_path: Path) -> None:
    sizes = """
model:
  family: llama
  d_model: 64
  n_layer: 2
  n_head: 4
  n_kv_head: 2
  d_ff: 96
  rope_scaling: {kind: linear, factor: 2}
"""
    model = read(tmp_path, LEAST.replace("model: {name: mamba-tiny}", sizes)).model
    assert model.name == model.sizes.family == "llama"
    assert model.sizes.rope_scaling.factor == 2  # type: ignore[attr-defined]


def test_every_size_that_is_not_there_is_named(tmp_path: Path) -> None:
    text = LEAST.replace("{name: mamba-tiny}", "{family: llama, d_model: 64, n_layer: x, n_hed: 4}")
    with pytest.raises(RequestError) as error:
        read(tmp_path, text)
    assert error.value.faults == [
        "model.n_layer: must be a whole number, not 'x'",
        "model.n_hed: llama has no such size; did you mean n_head?",
        *(
            f"model.{name}: must be given, as there is no model.name to take it from"
            for name in ("n_head", "n_kv_head", "d_ff")
        ),
    ]


@pytest.mark.parametrize(
    ("more", "changes", "shown"),
    [
        ("dat: {x: 1}", (), "dat: there is no such section; did you mean data?"),
        ("1: {x: 1}", (), "run.yaml: 1: there is no such section"),
        ("on: {x: 1}", (), "run.yaml: on: there is no such section"),
        ("", ("model.name=", "model.family=[a]"), "model.family: there is no family "),
        ("", ("model.name=", "model.family=gpt_neox"), "model.d_ff: must be given, as there is no"),
        ("optim: [1]", (), "optim: must be a list of settings"),
        ("optim: {seed: 1}", (), "optim.seed: there is no such setting; it belongs to run"),
        ("optim: {learning_rat: 1}", (), "there is no such setting; did you mean learning_rate?"),
        ("optim: {learning_rate: true}", (), "learning_rate: must be a number, not True"),
        ("parallel: {low_cpu_fsdp: 2}", (), "low_cpu_fsdp: must be True or False, not 2"),
        ("parallel: {tensor_parallel: 1.5}", (), "must be a whole number, not 1.5"),
        ("", ("num_step=1",), "num_step: there is no such setting; did you mean num_steps?"),
        ("", ("n_layer=3",), "n_layer: there is no such setting; fix: write model.n_layer=3"),
        ("", ("family=llama",), "family: there is no such setting; fix: write model.family=llama"),
        ("", ("schedule=cosin",), "schedule: must be one of "),
        ("", ("runs.seed=1",), "runs.seed: there is no section 'runs'; did you mean run?"),
        ("", ("model.d_stat=1",), "model.d_stat: mamba has no such size; did you mean d_state?"),
        ("", ("model.d_state=x",), "model.d_state: must be a whole number, not 'x'"),
        ("", (f"model.vocab_size={2**63}",), "must be a whole number of at most 64 bits"),
        ("", ("model.name=lama",), "no model is called 'lama'"),
        ("", ("model.family=llama",), "mamba-tiny is of family mamba"),
        ("", ("--seed=1",), "'--seed=1' is not a change of a setting"),
        ("", ("seed",), "'seed' is not a change of a setting"),
        ("", ("num_steps=0",), "num_steps: must be at least 1, not 0"),
        ("", ("schedule.name=wsd", "min_lr=1e-6"), "min_lr: schedule=wsd does not take it"),
    ],
)
def test_bad_input(tmp_path: Path, more: str, changes: tuple[str, ...], shown: str) -> None:
    with pytest.raises(RequestError) as error:
        read(tmp_path, LEAST + more, *changes)
    assert shown in str(error.value)


def test_every_fault_is_reported_with_its_place(tmp_path: Path) -> None:
    text = "model: {family: lama}\ndata: {seq_length: 2.5}\nrun: {nothing: 1}\n"
    with pytest.raises(RequestError) as error:
        read(tmp_path, text)
    shown = str(error.value).splitlines()
    assert shown[0] == "3 faults"
    assert f"{tmp_path}/run.yaml: data.seq_length: must be a whole number, not 2.5" in shown[1]
    assert "did you mean llama?" in shown[3]


def test_what_stands_twice_is_refused_with_its_lines(tmp_path: Path) -> None:
    """YAML itself takes the last one, so settings would be lost silently."""
    text = LEAST + "optim: {beta1: .8,\n  beta2: .9, beta1: .7}\nrun: {num_steps: 3}\n"
    with pytest.raises(RequestError) as error:
        read(tmp_path, text)
    where = f"--config: {tmp_path}/run.yaml: "
    assert error.value.faults == [
        f"{where}optim.beta1: is given twice, in lines 5 and 6; fix: leave one out",
        f"{where}run: is given twice, in lines 4 and 7; fix: leave one out",
    ]
    alias = "model: &m {name: mamba-tiny}\ndata: {dataset_path: x}\nrun: &r {save_ckpt_path: *r}\n"
    with pytest.raises(RequestError, match=r"run\.save_ckpt_path: must be text,"):
        read(tmp_path, alias)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (None, "cannot be read: No such file"),
        (b"a: [", "is not YAML"),
        (b"a: 2026-02-30", "is not YAML: day is out of range"),
        (b"- 1", "must have sect"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, content: bytes | None, shown: str) -> None:
    file = tmp_path / "run.yaml"
    if content is not None:
        file.write_bytes(content)
    argv = [sys.executable, "-m", "training", "--config", str(file)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: --config: ")
    assert shown in done.stderr and "Traceback" not in done.stderr


@pytest.mark.processes
def test_a_file_trains_like_the_flags_of_its_system(tmp_path: Path) -> None:
    data = write_text(tmp_path / "text")
    expected = train(tmp_path / "flags", data, 2, 2, 3)
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {{name: mamba-tiny}}\ndata: {{dataset_path: '{data}', seq_length: 17}}\n"
        "optim: {learning_rate: 3e-3}\nrun: {num_steps: 3}\n"
    )
    change = f"save_ckpt_path={tmp_path}/plain"
    done = run(2, "--config", str(file), change, program=("-m", "training"))
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "plain") == expected
    record = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert record["config"]["run"]["num_steps"] == 3 and record["versions"]["torch"]
