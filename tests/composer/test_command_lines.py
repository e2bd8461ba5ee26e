"""The system's command lines, scaled down: from packed text to a model that writes."""

import json
from pathlib import Path

import pytest
import torch

from tests.composer.runs import run, settings, write, write_packed
from tests.training.support.runs import losses, steps
from training.convert.source import Source, load
from training.data.packed import Packed
from training.systems.composer.model import measure

CREATE = (
    *("-m", "training.create_mamba_config", "--text_paths=text.npy", "--code_paths=code.npy"),
    *("--eval_paths=held.npy", "--vocab_size=256", "--d_model=32", "--n_layer=2"),
    *("--global_batch_size=8", "--micro_batch_size=2", "--eval_batch_size=3", "--seq_len=64"),
    *("--num_workers=0", "--lr=1e-2", "--t_max=5200tok", "--t_warmup=1040tok"),
    *("--save_interval=2600tok", "--eval_interval=2600tok", "--eval_subset_num_batches=-1"),
)


def test_from_text_to_a_model_that_writes(tmp_path: Path) -> None:
    write_packed(tmp_path)
    made = run(0, program=CREATE, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    done = run(2, cwd=tmp_path, cold=True)  # it reads config.yaml of the folder, as the system does
    assert done.returncode == 0, done.stderr
    assert "0.0B_mambaoutai: 36,320 parameters, 10 steps" in done.stdout
    assert "fsdp: left out" in done.stdout and done.stdout.count(" s/step | ") == 10

    save = tmp_path / "checkpoints"
    assert (save / "latest-rank0.pt").resolve().name == "ep0-ba10-rank0.pt"
    assert (save / "ep0-ba5-rank0.pt").is_file()
    assert json.loads((save / "config.json").read_text())["world_size"] == 2
    assert json.loads((save / "hparams.json").read_text())["rank_zero_seed"] == 42
    assert [one["step"] for one in steps(save)] == list(range(1, 11))
    assert losses(save)[-1] < losses(save)[0] - 0.5

    # Whatever the number of ranks, each held-out sample is seen once.
    records = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    shown = [one for one in records if one["kind"] == "evaluation"]
    assert [(one["step"], one["label"]) for one in shown] == [(5, "held"), (10, "held")]
    source = Source.open("composer", save)
    model = load(source, torch.device("cpu"), torch.float32)
    held = Packed(str(tmp_path / "held.npy"), 64, vocab_size=256)
    assert len(held) % 6, "the ranks have equally much to read: the test shows little"
    inputs, targets = (
        torch.stack([getattr(held[number], what) for number in range(len(held))])
        for what in ("inputs", "targets")
    )
    count, loss, *tops = measure(model(inputs), targets).tolist()
    assert shown[-1]["tokens"] == count
    assert shown[-1]["loss"] == pytest.approx(loss / count, rel=1e-5)
    assert shown[-1]["perplexity"] == pytest.approx(torch.tensor(loss / count).exp().item())
    assert [shown[-1][what] for what in ("top3", "top10")] == pytest.approx(
        [one / count for one in tops], abs=2 / count
    )

    out = ("--from", "composer", "checkpoints", "--to", "hf", "hf")
    converted = run(0, *out, program=("-m", "training.convert"), cwd=tmp_path)
    assert converted.returncode == 0, converted.stderr
    again = load(Source.open("hf", tmp_path / "hf"), torch.device("cpu"), torch.float32)
    assert torch.equal(again(inputs[:2]), model(inputs[:2]))
    ask = ("--prompt=import", "--max-new-tokens=8", "--temperature=0")
    texts = [
        run(0, where, *ask, program=("-m", "training.generate"), cwd=tmp_path).stdout
        for where in ("checkpoints", "hf")
    ]
    assert texts[0] and texts[0] == texts[1]


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (
            {"data__eval_paths": [{"path": "text.npy"}]},
            "text.npy is trained on; fix: hold out other files",
        ),
        ({"model__vocab_size": 110, "data__num_workers": 1}, "is not below the vocabulary's size"),
        ({"optimizer__lr": 1e30}, "is nan; the run stops here"),
    ],
)
def test_refusals(tmp_path: Path, change: dict[str, object], shown: str) -> None:
    write_packed(tmp_path)
    given = settings(Path(), Path("save"), **change)
    done = run(0, write(tmp_path / "config.yaml", given), cwd=tmp_path)
    assert done.returncode == (1 if "optimizer__lr" in change else 2), done.stderr
    assert shown in done.stderr and "Traceback" not in done.stderr
    assert [line[:7] for line in done.stderr.splitlines()] == ["error: "]


def test_a_run_that_is_longer_than_what_is_asked_for_is_refused(tmp_path: Path) -> None:
    write_packed(tmp_path)
    file = write(tmp_path / "config.yaml", settings(Path(), Path("save")))
    assert run(0, file, cwd=tmp_path).returncode == 0
    before = (tmp_path / "save" / "config.json").read_text()
    done = run(0, file, "scheduler.t_max=4ba", cwd=tmp_path)
    assert done.returncode == 2 and "done:" not in done.stdout
    shown = "scheduler.t_max: 4 steps are less than the 6 steps of save/ep0-ba6-rank0.pt"
    assert shown in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "save" / "config.json").read_text() == before


def test_a_key_of_wandb_in_the_environment_ends_no_job(tmp_path: Path) -> None:
    """The library is not installed here, which used to end the job before its first step."""
    write_packed(tmp_path)
    file = write(tmp_path / "config.yaml", settings(Path(), Path("save")))
    done = run(2, file, cwd=tmp_path, given={"WANDB_API_KEY": "a" * 40})
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "save")) == 6
    shown = "WARNING: Weights & Biases is left out, though WANDB_API_KEY or WANDB_MODE is in the"
    assert (done.stdout + done.stderr).count(shown) == 1
    assert "; fix: pip install wandb; " in done.stdout + done.stderr


def test_the_launcher_shows_why_a_request_is_refused(tmp_path: Path) -> None:
    done = run(2, "none.yaml", cwd=tmp_path, cold=True)
    assert done.returncode != 0
    assert "none.yaml cannot be read" in done.stdout + done.stderr
