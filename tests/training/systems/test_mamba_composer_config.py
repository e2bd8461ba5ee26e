"""The Composer system's config.yaml: read unchanged, written, and refused with the place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.training.support.families import filled
from training import models
from training.convert.folders import detect
from training.convert.source import Source
from training.errors import RequestError
from training.systems.composer import checkpoints
from training.systems.composer import yaml as file
from training.systems.composer.config import (
    ComposerConfig,
    FsdpSection,
    HeldOut,
    check_ranks,
    fsdp_settings,
)

WEIGHTS = {
    "text_paths": (0.19581, 0.24358, 0.06882, 0.06457, 0.01188, 0.00453),
    "code_paths": (0.05313, 0.04221, 0.02372, 0.06074, 0.12794, 0.04813, 0.048, 0.00693),
}
INTERVAL = "1006878720tok"
SHIPPED: dict[str, dict[str, Any]] = {
    "model": {
        "vocab_size": 65024,
        "d_model": 2688,
        "n_layer": 28,
        "fsdp_layer_wrap": True,
        "activation_checkpointing": True,
    },
    "data": {
        "global_batch_size": 896,
        "micro_batch_size": 7,
        "eval_batch_size": 8,
        "seq_len": 4096,
        "num_workers": 2,
        "prefetch_factor": 2,
        "n_total_tokens": 400039358022,
        "n_samples_to_skip": 0,
        **{
            kind: [
                {"path": f"/data/{kind}{number}.npy", "weight": weight, "order": 0}
                for number, weight in enumerate(weights)
            ]
            for kind, weights in WEIGHTS.items()
        },
        "code_percentage": sum(WEIGHTS["code_paths"]),
        "text_percentage": sum(WEIGHTS["text_paths"]),
    },
    "optimizer": {"lr": 0.00045, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1},
    "scheduler": {
        "name": "wsd",
        "t_warmup": INTERVAL,
        "t_max": "10068787200tok",
        "t_decay": INTERVAL,
        "alpha_f": 0.1,
    },
    "fsdp": {
        "sharding_strategy": "FULL_SHARD",
        "process_group": None,
        "backward_prefetch": "BACKWARD_PRE",
        "activation_checkpointing_reentrant": True,
        "activation_checkpointing": True,
        "limit_all_gathers": False,
        "verbose": True,
    },
    "trainer": {
        "cp_interval": INTERVAL,
        "eval_interval": INTERVAL,
        "save_interval": INTERVAL,
        "eval_subset_num_batches": 16,
        "save_folder": "checkpoints",
        "auto_log_hparams": True,
        "autoresume": True,
    },
    "general": {
        "project_name": "mamba-science",
        "full_name": "mambaoutai",
        "window_size": 10,
        "clipping_threshold": 1.0,
        "position_weighting": True,
    },
}
"""The system's file, except for the names of its 14 sources and the last digits of weights."""


def load(path: Path, **changes: Any) -> ComposerConfig:
    """Read the system's file with changes, section__key=value; a value of ... removes it."""
    content = deepcopy(SHIPPED)
    for place, value in changes.items():
        section, _, key = place.partition("__")
        if value is ...:
            del content[section][key]
        else:
            content.setdefault(section, {})[key] = value
    (path / "config.yaml").write_text(yaml.safe_dump(content))
    return file.read(path / "config.yaml")


def test_the_systems_file_as_it_stands(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config.num_steps == 2743 and config.tokens_per_step == 896 * 4097
    parameters = models.parameters(config.model.sizes)
    assert config.run_name(parameters) == "1.6B_mambaoutai"
    assert round(parameters, -6) == 1_622_000_000
    assert not config.model.sizes.tie_embeddings and not config.model.sizes.residual_in_fp32
    assert len(config.data.parts) == 14 and config.schedule.name == "wsd"
    for ranks in (1, 8, 16, 128):
        check_ranks(config, ranks)
    with pytest.raises(
        RequestError, match=r"^data.global_batch_size: 896 sequences are not a whole"
    ):
        check_ranks(config, 12)


def test_numbers_without_a_point(tmp_path: Path) -> None:
    """YAML reads 5e-1 as text."""
    data = {"text_paths": [{"path": "x", "weight": "5e-1"}, {"path": "y", "weight": "5e-1"}]}
    config = load(tmp_path, data__text_paths=data["text_paths"], data__text_percentage="1e0")
    assert [part.weight for part in config.data.text_paths] == [0.5, 0.5]
    assert config.data.text_percentage == 1
    with pytest.raises(RequestError, match=r"entry 1: weight must be a number, and order a whole"):
        load(tmp_path, data__text_paths=[{"path": "x", "weight": True}])
    with pytest.raises(RequestError, match=r"text_percentage: must be a number, not True"):
        load(tmp_path, data__text_percentage=True)


def test_a_change_means_what_it_would_in_the_file(tmp_path: Path) -> None:
    load(tmp_path)
    path = tmp_path / "config.yaml"
    trainer = file.read(path, ["trainer.save_interval=100ba"]).trainer
    assert (trainer.save_interval, trainer.cp_interval) == ("100ba", "")
    both = ["trainer.cp_interval=100ba", "trainer.save_interval=100ba"]
    assert file.read(path, both).trainer.cp_interval == "100ba"
    with pytest.raises(RequestError, match=r"trainer.cp_interval: checkpoints are saved each save"):
        file.read(path, ["trainer.cp_interval=5ba", "trainer.save_interval=100ba"])
    for empty in ("null", "~", ""):
        assert file.read(path, [f"fsdp.process_group={empty}"]).fsdp.process_group == ""
    assert file.read(path, ["fsdp.process_group=1e3"]).fsdp.process_group == "1e3"
    assert file.read(path, ["general.window_size=017"]).general.window_size == 17
    with pytest.raises(RequestError, match=r"fsdp.verbose: must be True or False, not 'on'"):
        file.read(path, ["fsdp.verbose=on"])


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    data = {"data__eval_paths": [{"path": "/data/fr.valid.npy"}, {"path": "/x.npy", "label": "en"}]}
    config = load(tmp_path, **data, scheduler__name="cosine", data__code_percentage=...)
    assert config.data.eval_paths[0] == HeldOut(path="/data/fr.valid.npy", label="fr")
    assert config.schedule.name == "cosine-tokens"
    file.write(config, tmp_path / "again.yaml")
    again = file.read(tmp_path / "again.yaml")
    assert again.data == config.data and again.scheduler == config.scheduler
    written = yaml.safe_load((tmp_path / "again.yaml").read_text())
    for section, keys in SHIPPED.items():
        assert keys.keys() - written[section].keys() <= {"code_percentage"}


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"model__d_modell": 1}, "model.d_modell: there is no such setting; did you mean d_model?"),
        ({"optimiser__lr": 1}, "optimiser: there is no such section; did you mean optimizer?"),
        ({"model__vocab_size": 65537}, "model.vocab_size: packed words hold ids below 65,536"),
        ({"model__n_layer": 2.5}, "model.n_layer: must be a whole number, not 2.5"),
        ({"fsdp__verbose": "maybe"}, "fsdp.verbose: must be True or False, not 'maybe'"),
        ({"fsdp__sharding_strategy": "ALL"}, "fsdp.sharding_strategy: must be one of FULL_SHARD"),
        ({"scheduler__name": "linear"}, "scheduler.name: must be one of wsd, cosine"),
        ({"scheduler__t_max": "1dur"}, "scheduler.t_max: must be in tok or ba, not '1dur'"),
        ({"scheduler__t_max": "1.5ba"}, "scheduler.t_max: must be a whole number of at least 1"),
        ({"scheduler__t_decay": "2ep"}, "scheduler.t_decay: must be a number of tokens, steps"),
        ({"scheduler__t_max": INTERVAL}, "scheduler.t_max: its 1,006,878,720 tokens must hold"),
        (
            {"scheduler__name": "cosine", "scheduler__t_decay": "5ba"},
            "scheduler.t_decay: cosine does not take it; wsd does",
        ),
        ({"trainer__cp_interval": "5ba"}, "trainer.cp_interval: checkpoints are saved each"),
        ({"trainer__save_interval": "0tok"}, "trainer.save_interval: must be a whole number"),
        ({"trainer__save_interval": "0dur"}, "trainer.save_interval: must be more than 0 of"),
        ({"trainer__eval_interval": "0.0dur"}, "trainer.eval_interval: must be more than 0 of the"),
        ({"trainer__eval_subset_num_batches": 0}, "trainer.eval_subset_num_batches: must be at"),
        ({"trainer__save_num_checkpoints_to_keep": 0}, "trainer.save_num_checkpoints_to_keep: mu"),
        ({"trainer__save_folder": "s3://x/y"}, "trainer.save_folder: must be a folder"),
        (
            {"trainer__save_folder": "x/{run_name}/{rank}"},
            "trainer.save_folder: all ranks save to one folder, and only {run_name} is filled in, "
            "not {rank}; fix: leave that out",
        ),
        ({"trainer__save_folder": "x/{{run_name}}"}, "trainer.save_folder: all ranks save to one"),
        (
            {"general__full_name": "a{local_rank}"},
            "general.full_name: is part of the names of files, and nothing in braces is filled in; "
            "fix: leave {local_rank} out",
        ),
        ({"general__full_name": "a/b"}, "general.full_name: is part of the names of files"),
        ({"data__code_percentage": 0.5}, "data.code_percentage: is 0.5, but the weights of code"),
        ({"data__text_paths": [{"weight": 1}]}, "data.text_paths: entry 1: must have path"),
        ({"data__text_paths": "x.npy"}, "data.text_paths: must be a list of path, weight, order"),
        (
            {"data__code_paths": [{"path": "x", "weight": "much"}]},
            "data.code_paths: entry 1: weight must be a number, and order a whole number",
        ),
        (
            {"data__eval_paths": [{"path": "a/x.npy"}, {"path": "b/x.npy"}]},
            "data.eval_paths: x is the label of 2 of them; fix: give each its own",
        ),
        (
            {"data__num_workers": 0, "data__prefetch_factor": 4},
            "data.prefetch_factor: only num_workers read ahead, and there are none",
        ),
        ({"optimizer__beta2": 1.0}, "optimizer.beta2: must be less than 1, but is 1.0"),
    ],
)
def test_bad_input(tmp_path: Path, change: dict[str, Any], shown: str) -> None:
    with pytest.raises(RequestError) as error:
        load(tmp_path, **change)
    assert f"{tmp_path}/config.yaml: {shown}" in str(error.value)


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    parts = [{**one, "path": f"~{one['path']}"} for one in SHIPPED["data"]["text_paths"]]
    config = load(tmp_path, trainer__save_folder="~/runs/{run_name}", data__text_paths=parts)
    assert config.trainer.save_folder == "/home/me/runs/{run_name}"
    assert config.data.text_paths[0].path == "/home/me/data/text_paths0.npy"


def test_all_faults_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"^4 faults\n") as error:
        load(tmp_path, model__d_model=0, data__seq=1, optimizer__lr=-1.0, trainer__autoresume=3)
    assert str(error.value).count("config.yaml: ") == 4


@pytest.mark.processes
@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("model: {layers: 3}", "config.yaml: model.layers: there is no such setting"),
        (
            "data:\n  code_paths:\n  - path: x\n    weight: 1\n    path: y",
            "config.yaml: data.code_paths: entry 1: path: is given twice, in lines 3 and 5",
        ),
        ("", "config.yaml must have sections: model, data, optimizer"),
        (
            None,
            "config.yaml cannot be read: No such file or directory; fix: write one, with every "
            "key, by python -m training.create",
        ),
    ],
)
def test_the_entry_point_refuses_without_torch(
    tmp_path: Path, content: str | None, shown: str
) -> None:
    if content is not None:
        (tmp_path / "config.yaml").write_text(content)
    code = (
        "import sys; sys.modules['torch'] = sys.modules['composer'] = None; import runpy; "
        "sys.argv = ['mamba_composer']; "
        "runpy.run_module('training.mamba_composer', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and shown in done.stderr and "Traceback" not in done.stderr


def test_what_fsdp_is_given() -> None:
    shown = fsdp_settings(FsdpSection(), bf16=True, world_size=16, local_world_size=8)
    assert {name: shown[name] for name in SHIPPED["fsdp"] if name != "process_group"} == {
        name: value for name, value in SHIPPED["fsdp"].items() if name != "process_group"
    }
    assert shown["mixed_precision"]["reduce_dtype"] == "fp32" and "process_group" not in shown
    hybrid = FsdpSection(sharding_strategy="HYBRID_SHARD")
    shown = fsdp_settings(hybrid, bf16=False, world_size=16, local_world_size=8)
    assert shown["mixed_precision"] == "FULL"
    assert (shown["data_parallel_shard_degree"], shown["data_parallel_replicate_degree"]) == (8, 2)
    node = FsdpSection(sharding_strategy="HYBRID_SHARD", process_group="node")
    shown = fsdp_settings(node, bf16=False, world_size=16, local_world_size=8)
    assert shown["process_group"] == "node" and "data_parallel_shard_degree" not in shown


def test_the_folder_of_a_run(tmp_path: Path) -> None:
    config, save = load(tmp_path), tmp_path / "save"
    said: list[str] = []
    checkpoints.prepare(config, save, 1000, 2, said.append)
    assert not said and not (save / checkpoints.LINK).is_symlink()
    for batch in (9, 10):
        torch.save({"batch": batch}, save / f"ep0-ba{batch}-rank0.pt")
    (save / "ep0-ba11-rank0.pt").write_bytes((save / "ep0-ba9-rank0.pt").read_bytes()[:-40])
    (save / checkpoints.LINK).symlink_to("ep0-ba11-rank0.pt")
    checkpoints.prepare(config, save, 1000, 2, said.append)
    assert said == [f"resuming from {save}/ep0-ba10-rank0.pt"]
    assert torch.load(save / checkpoints.LINK)["batch"] == 10

    short = {"scheduler__t_warmup": "1ba", "scheduler__t_decay": "1ba"}
    with pytest.raises(RequestError, match=r"^scheduler.t_max: 9 steps are less than the 10 steps"):
        less = load(tmp_path, **short, scheduler__t_max="9ba")
        checkpoints.prepare(less, save, 1000, 2, said.append)
    # Steps used to have half the tokens: 10 of them are 5 of these.
    less = load(tmp_path, **short, scheduler__t_max=f"{9 * 896 * 4097}tok")
    record = {"kind": "step", "step": 10, "tokens_seen": 10 * 448 * 4097}
    (save / "metrics.jsonl").write_text(json.dumps(record) + "\n{cut off")
    checkpoints.prepare(less, save, 1000, 2, said.append)
    with pytest.raises(RequestError, match=r"has checkpoints, such as ep0-ba10-rank0.pt; fix: set"):
        checkpoints.prepare(load(tmp_path, trainer__autoresume=False), save, 1000, 2, said.append)
    with pytest.raises(RequestError, match=r"^2 faults\n  - model.d_model: is 64, but 2688 in the"):
        other = load(tmp_path, model__d_model=64, model__n_layer=2)
        checkpoints.prepare(other, save, 1000, 2, said.append)
    with pytest.raises(RequestError, match=r"^trainer.save_folder: /proc/x cannot be written"):
        checkpoints.prepare(config, Path("/proc/x"), 1000, 2, said.append)
    with pytest.raises(RequestError, match="bytes free, but a checkpoint takes 12,000,000,000,"):
        checkpoints.prepare(config, save, 10**15, 2, said.append)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("was-run",)


def test_a_checkpoint_is_read_and_nothing_in_it_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Composer writes them; tests/composer reads real ones."""
    monkeypatch.chdir(tmp_path)
    sizes = models.MambaConfig(d_model=32, n_layer=1, vocab_size=61, tie_embeddings=False)
    model = filled(sizes)
    described = {"family": "mamba", "sizes": vars(sizes)}
    state = {
        "model": {f"model.language.{name}": one for name, one in model.state_dict().items()},
        "callbacks": {"Described": described},
        "timestamp": {"total_wct": timedelta(seconds=3), "evil": Evil()},
    }
    rng = [{"numpy": torch.get_rng_state().numpy()}]
    torch.save({"state": state, "rng": rng}, "ep0-ba2-rank0.pt")
    Path("latest-rank0.pt").symlink_to("ep0-ba2-rank0.pt")
    for path in (tmp_path, tmp_path / "ep0-ba2-rank0.pt"):
        assert detect(path) == "composer"
        source = Source.open("composer", path)
        assert source.sizes == sizes
        for name, value in model.named_parameters():
            assert torch.equal(source.read(name), value)
    assert not Path("was-run").exists()

    del state["callbacks"]
    torch.save({"state": state}, "ep0-ba2-rank0.pt")
    with pytest.raises(RequestError, match=r"latest-rank0.pt states no sizes: training.mamba_comp"):
        Source.open("composer", tmp_path)
    Path("ep0-ba2-rank0.pt").write_bytes(b"nothing")
    with pytest.raises(RequestError, match=r"latest-rank0.pt cannot be read as Composer's"):
        Source.open("composer", tmp_path)
    Path("parts").mkdir()
    Path("parts/__0_0.distcp").touch()
    with pytest.raises(RequestError, match="parts is a checkpoint in parts"):
        Source.open("composer", tmp_path / "parts")
