"""One run on 1, 2 and 4 real processes: the same losses, whatever the layout."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.training.support.families import HYBRIDS
from tests.training.support.runs import ENGINES, TINY, run, steps, train, write_text

pytestmark = pytest.mark.processes

STEPS, GLOBAL_BATCH = 4, 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, data: str) -> Any:
    """The losses of plain python, without torchrun."""
    return train(tmp_path_factory.mktemp("alone"), data, 0, GLOBAL_BATCH, STEPS)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, ()),
        (2, ()),
        (4, ("--low_cpu_fsdp=True",)),
        (2, ("--sharding_strategy=ddp", "--low_cpu_fsdp=True")),
        (4, ("--sharding_strategy=hsdp", "--shard_group_size=2")),
        (2, ("--fsdp_activation_checkpointing=True", "--selective_checkpointing=2")),
        (2, ("--fsdp_engine=fsdp1", "--low_cpu_fsdp=True")),
        (2, ("--fsdp_engine=fsdp1", "--sharding_strategy=ddp")),
        (4, ("--fsdp_engine=fsdp1", "--sharding_strategy=hsdp", "--shard_group_size=2")),
    ],
    ids=lambda value: value if isinstance(value, int) else " ".join(value) or "fsdp",
)
def test_losses_do_not_depend_on_the_layout(
    tmp_path: Path, data: str, alone: Any, ranks: int, flags: Any
) -> None:
    losses = train(tmp_path, data, ranks, GLOBAL_BATCH // ranks, STEPS, *flags)
    assert losses == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize(("ranks", "accumulation"), [(0, 4), (2, 2)])
def test_losses_do_not_depend_on_the_accumulation(
    tmp_path: Path, data: str, alone: Any, ranks: int, accumulation: int
) -> None:
    batch = GLOBAL_BATCH // max(1, ranks) // accumulation
    flags = (f"--gradient_accumulation={accumulation}",)
    losses = train(tmp_path, data, ranks, batch, STEPS, *flags)
    assert losses == pytest.approx(alone, abs=1e-5)
    assert steps(tmp_path)[-1]["tokens_seen"] == STEPS * GLOBAL_BATCH * 17


@pytest.mark.parametrize("name", ["mamba2-tiny", "llama-tiny", "mixtral-tiny", *HYBRIDS])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_family_can_be_spread(tmp_path: Path, data: str, name: str, engine: str) -> None:
    """With recomputation and a start on the meta device, which must find every parameter."""
    flags = (f"--model_name={name}", f"--fsdp_engine={engine}")
    spread = ("--low_cpu_fsdp=True", "--fsdp_activation_checkpointing=True")
    alone = train(tmp_path / "alone", data, 0, GLOBAL_BATCH, STEPS, *flags)
    losses = train(tmp_path / "spread", data, 2, GLOBAL_BATCH // 2, STEPS, *flags, *spread)
    assert losses == pytest.approx(alone, abs=1e-5)
    assert losses[-1] < losses[0]


def test_bfloat16_is_close_and_keeps_float32_weights(tmp_path: Path, data: str, alone: Any) -> None:
    losses = train(tmp_path, data, 2, 2, STEPS, "--precision=bf16")
    assert losses != alone
    assert losses == pytest.approx(alone, abs=0.05)


def test_compiled_blocks_give_the_same_losses(tmp_path: Path, data: str, alone: Any) -> None:
    losses = train(tmp_path, data, 0, GLOBAL_BATCH, STEPS, "--use_torch_compile=True")
    assert losses == pytest.approx(alone, abs=1e-4)


def test_the_published_command_line_scaled_down(tmp_path: Path, data: str) -> None:
    """The flags of the known program, with its checkpoint flags in both spellings."""
    done = run(
        2,
        "--model_name=mamba-tiny",
        f"--ckpt_load_path={tmp_path}/ckpt",
        f"--ckpt_save_path={tmp_path}/ckpt",
        f"--dataset_path={data}",
        "--seq_length=16",
        "--fsdp_activation_checkpointing=True",
        "--selective_checkpointing=1",
        "--sharding_strategy=fsdp",
        "--batch_size=2",
        "--learning_rate=3e-4",
        "--grad_clip_thresh=4.0",
        "--num_steps=12",
        "--report_interval=6",
        "--checkpoint_interval=5",
        "--keep_checkpoints=2",
        "--use_profiler=True",
    )
    assert done.returncode == 0, done.stderr
    save = tmp_path / "ckpt"
    reports = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert [line.split(" |")[0] for line in reports] == ["step 1/12", "step 6/12", "step 12/12"]
    assert reports[2].startswith("step 12/12 | loss ")
    kept = sorted(path.name for path in (save / "checkpoints").iterdir())
    assert kept == ["step_10_ckp", "step_12_ckp"]
    assert {path.name for path in (save / "profile_traces").iterdir()} == {
        "rank_0.json",
        "rank_1.json",
    }
    assert '"selective_checkpointing": 1' in (save / "config.json").read_text()
    assert [line["step"] for line in steps(save)] == list(range(1, 13))


@pytest.mark.parametrize(
    ("ranks", "flags", "code", "message"),
    [
        (0, ("--learning_rate=1e30", "--num_steps=9"), 1, "error: step 2: loss is "),
        (0, ("--dataset_path=text:/nowhere/*",), 2, "error: dataset_path: no file matches"),
        (0, ("--dataset_path=/fsx/data",), 2, "use text:GLOB"),
        (0, ("--device=cuda",), 2, "error: device: cuda was asked for"),
        (2, ("--sharding_strategy=hsdp", "--shard_group_size=3"), 2, "groups of 3"),
    ],
)
def test_what_is_wrong_is_reported_once_without_a_traceback(
    tmp_path: Path, data: str, ranks: int, flags: Any, code: Any, message: str
) -> None:
    given = (f"--dataset_path={data}", f"--save_ckpt_path={tmp_path}", "--num_steps=2", *flags)
    done = run(ranks, *TINY, *given)
    shown = done.stderr.partition("torch.distributed.elastic")[0]
    assert message in shown and shown.count("error: ") == 1
    assert not list((tmp_path / "checkpoints").glob("*"))
    if ranks == 0:
        assert done.returncode == code and "Traceback" not in done.stderr


def test_an_evaluation_is_reported_and_changes_nothing(
    tmp_path: Path, data: str, alone: Any
) -> None:
    found = []
    held_out = write_text(tmp_path / "held")
    for ranks in (0, 2):
        save = tmp_path / str(ranks)
        flags = (f"--eval_dataset_path={held_out}", "--eval_interval=2", "--eval_batches=3")
        batch = GLOBAL_BATCH // max(1, ranks)
        assert train(save, data, ranks, batch, STEPS, *flags) == pytest.approx(alone, abs=1e-5)
        lines = map(json.loads, (save / "metrics.jsonl").read_text().splitlines())
        found.append([line for line in lines if line["kind"] == "evaluation"])
    assert [line["step"] for line in found[0]] == [2, 4]
    assert found[0][1]["loss"] < found[0][0]["loss"] < 6
    assert found[0][0]["perplexity"] == pytest.approx(math.exp(found[0][0]["loss"]))
    assert found[0][0]["tokens"] == 3 * GLOBAL_BATCH * 17
    for one, other in zip(*found, strict=True):
        assert other == pytest.approx(one, abs=1e-4)


def test_evaluating_on_nothing_is_refused(tmp_path: Path, data: str) -> None:
    given = (f"--dataset_path={data}", f"--save_ckpt_path={tmp_path}", "--num_steps=2")
    done = run(0, *TINY, *given, "--eval_interval=1")
    assert done.returncode == 2 and "eval_interval: there is no eval_dataset_path" in done.stderr
    done = run(0, *TINY, *given, "--eval_dataset_path=text:/nowhere/*")
    assert done.returncode == 2 and "eval_dataset_path: no file matches" in done.stderr


def test_an_evaluation_on_nothing_has_no_loss(tmp_path: Path, data: str) -> None:
    """A held-out stream may turn out to have no target; a loss of 0 would look perfect."""
    pytest.importorskip("datasets")
    save, held_out = tmp_path / "save", tmp_path / "held.jsonl"
    held_out.write_text('{"text": ""}\n')
    flags = (f"--eval_dataset_path=stream:{held_out}", "--tokenizer=bytes", "--num_steps=1")
    done = run(0, *TINY, f"--dataset_path={data}", f"--save_ckpt_path={save}", *flags)
    assert done.returncode == 0, done.stderr
    assert "evaluation on 0 tokens | loss - | perplexity -" in done.stdout
    assert "WARNING: eval_dataset_path has no target" in done.stdout
    records = map(json.loads, (save / "metrics.jsonl").read_text().splitlines())
    (found,) = [record for record in records if record["kind"] == "evaluation"]
    assert (found["tokens"], found["loss"], found["perplexity"]) == (0, None, None)
