"""The entry point's command line: strict, complete, and all of its errors reported together."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.support.runs import ROOT
from training import llama_fsdp, mamba2_neuron
from training.cli import Parser
from training.errors import RequestError
from training.mamba_fsdp import configure

LEAST = ("--dataset_path=text:x", "--save_ckpt_path=/tmp/x")
PUBLISHED = (
    "--model_name=state-spaces/mamba-130m",
    "--load_ckpt_path=/fsx/mamba/pretrain/ckpt",
    "--save_ckpt_path=/fsx/mamba/pretrain/ckpt",
    "--dataset_path=/fsx/data/wikicorpus_llama2_7B_tokenized_4k",
    "--fsdp_activation_checkpointing=True",
    "--selective_checkpointing=1",
    "--sharding_strategy=fsdp",
    "--batch_size=2",
    "--learning_rate=3e-4",
    "--grad_clip_thresh=4.0",
    "--num_steps=1200",
    "--report_interval=200",
    "--checkpoint_interval=20000",
)


def test_the_published_command_line() -> None:
    config = configure(PUBLISHED)
    assert config.model.sizes.d_model == 768
    assert config.parallel.fsdp_activation_checkpointing is True
    assert config.data.seq_length == 4096 and config.run.seed == 2023
    assert (config.run.num_steps, config.run.report_interval) == (1200, 200)
    assert (config.optim.learning_rate, config.optim.grad_clip_thresh) == (3e-4, 4.0)
    assert config.run.load_ckpt_path == config.run.save_ckpt_path == "/fsx/mamba/pretrain/ckpt"


def test_a_home_folder_after_an_equals_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = configure(("--dataset_path=lines:~/data", "--save_ckpt_path=~/runs/x"))
    assert config.data.dataset_path == "lines:/home/me/data"
    assert config.run.save_ckpt_path == "/home/me/runs/x"
    llama = llama_fsdp.configure(("--dataset=~/set", "--checkpoint_dir=~/x"))
    assert (llama.data.dataset_path, llama.run.save_ckpt_path) == ("/home/me/set", "/home/me/x")
    neuron = ("--model=Mamba130M", "--data_dir=text:~/x", "--checkpoint_dir=~", "--seq_len=128")
    tagged = mamba2_neuron.configure((*neuron, "--max_steps=1"))
    assert tagged.run.save_ckpt_path == "/home/me/exp"
    parser = Parser("program", "about")
    parser.add_argument("--save_path", type=Path)
    assert parser.parse_args(["--save_path=~/set"]).save_path == Path("/home/me/set")
    with pytest.raises(RequestError, match=r"--save_path: must be a path, with \./ before"):
        parser.parse_args(["--save_path=~nobody-here/set"])


def test_both_spellings_of_a_flag_and_of_its_name() -> None:
    separate = configure(("--dataset_path", "text:x", "--ckpt_save_path", "/s", "--seed", "7"))
    joined = configure(("--dataset_path=text:x", "--save_ckpt_path=/s", "--seed=7"))
    assert separate == joined
    assert configure((*LEAST, "--ckpt_load_path=/l")).run.load_ckpt_path == "/l"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("True", True), ("true", True), ("1", True), ("yes", True)),
        *(("False", False), ("false", False), ("0", False), ("no", False)),
    ],
)
def test_booleans_read_as_booleans(text: str, value: bool) -> None:
    assert configure((*LEAST, f"--low_cpu_fsdp={text}")).parallel.low_cpu_fsdp is value


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--low_cpu_fsdp=maybe", "--low_cpu_fsdp: must be True or False, not 'maybe'"),
        ("--batch_size=two", "--batch_size: must be a whole number, not 'two'"),
        ("--learning_rate=fast", "--learning_rate: must be a number, not 'fast'"),
        ("--batchsize=2", "--batchsize: there is no such flag; did you mean --batch_size?"),
        ("--batch=2", "--batch: there is no such flag"),
        ("stray", "'stray' is not a flag"),
        ("--num_steps=0", "num_steps: must be at least 1, not 0"),
        (f"--seed={2**63}", f"--seed: must be a whole number of at most 64 bits, not '{2**63}'"),
        (f"--seq_length={2**70}", "--seq_length: must be a whole number of at most 64 bits, not"),
        (f"--vocab_size={2**70}", "--vocab_size: must be a whole number of at most 64 bits, not"),
        ("--learning_rate=nan", "learning_rate: must be more than 0 and finite"),
        ("--sharding_strategy=zero", "must be one of fsdp, hsdp, ddp, not 'zero'"),
        ("--shard_group_size=2", "only sharding_strategy=hsdp"),
        ("--model_name=mamba-tony", "did you mean mamba-tiny?"),
        ("--save_ckpt_path=", "save_ckpt_path: must be given"),
        ("--seed", "expected one argument"),
        ("--mixed_precision=True", "--mixed_precision: write --precision=bf16, or fp32"),
        *(
            (f"--{name}=1", f"--{name}: nothing reads it, here or in the system; fix: leave it out")
            for name in ("sep_token", "datasets", "weights", "logical_shards")
        ),
        ("--model_name=llama2_13b", "model_name: no model is called 'llama2_13b'"),
    ],
)
def test_bad_input(flag: str, message: str) -> None:
    with pytest.raises(RequestError) as error:
        configure((*LEAST, flag))
    assert message in str(error.value)


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(RequestError) as error:
        configure((*LEAST, "--sede=1", "--batch_size=x", "--low_cpu_fsdp", "2", "--unknown", "5"))
    shown = str(error.value)
    assert shown.startswith("4 faults")
    assert "did you mean --seed?" in shown and "--batch_size" in shown and "--low_cpu_fsdp" in shown
    assert "--unknown" in shown and "'5'" not in shown
    with pytest.raises(RequestError) as error:
        configure(("--batch_size=0", "--num_steps=-1", *LEAST))
    assert str(error.value).startswith("2 faults")


def test_every_setting_has_a_flag_of_its_own_name() -> None:
    from training.mamba_fsdp import FLAGS

    given = configure(LEAST)
    sections = (
        *(given.model, given.data, given.optim),
        *(given.optim.schedule, given.parallel, given.run),
    )
    names = [name for section in sections for name in section.__dataclass_fields__]
    settings = sorted(set(names) - {"name", "sizes"})
    assert sorted(flag.name for flag in FLAGS) == sorted(["model_name", "vocab_size", *settings])
    assert len(settings) == len(names) - 3  # only a model's and a schedule's names are shared


def test_settings_of_another_schedule_are_refused() -> None:
    given = configure((*LEAST, "--schedule=wsd", "--t_decay=100ba"))
    assert (given.optim.schedule.name, given.optim.schedule.t_decay) == ("wsd", "100ba")
    with pytest.raises(
        RequestError, match="min_lr: schedule=wsd does not take it; these do: cosine"
    ):
        configure((*LEAST, "--schedule=wsd", "--min_lr=1e-6"))


@pytest.mark.processes
def test_a_bad_request_needs_no_torch_and_shows_no_traceback() -> None:
    code = "import sys; sys.modules['torch'] = None; import runpy; sys.argv = ['x', '--nope=1'];"
    code += "runpy.run_module('training.mamba_fsdp', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "error: --nope: there is no such flag\n"


@pytest.mark.processes
def test_help_lists_every_flag() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "training.mamba_fsdp", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--save_ckpt_path" in done.stdout and "--ckpt_save_path" in done.stdout
