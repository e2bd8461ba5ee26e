"""Files of converted weights: shards, types, accompanying files, and memory use."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.training.support.checkpoints import write_checkpoint
from tests.training.support.converted import (
    assert_same,
    logits,
    reference,
    run,
    saved,
    tensors,
    theirs,
)
from tests.training.support.runs import ROOT
from training import models
from training.convert.folders import detect
from training.convert.source import Source


@pytest.mark.parametrize("name", ["mamba", "mixtral"])
def test_shards(name: str, tmp_path: Path) -> None:
    model = reference(name)
    first = saved(model, tmp_path / "first", max_shard_size="20KB")
    run("--from", "hf", first, "--to", "ours", tmp_path / "ours", "--max-shard-size=12KB")
    run("--from", "ours", tmp_path / "ours", "--to", "hf", tmp_path / "hf", "--max-shard-size=9KiB")
    assert torch.equal(logits(theirs(tmp_path / "hf")), logits(model))
    for folder, most in ((tmp_path / "ours", 12_000), (tmp_path / "hf", 9 * 1024)):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
        assert sorted(set(index["weight_map"].values())) == files
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(folder).values())
        for file in files:
            with safe_open(str(folder / file), framework="pt") as held:
                assert held.metadata() == {"format": "pt"}
                sizes = [held.get_tensor(n).nbytes for n in held.keys()]  # noqa: SIM118
            assert sum(sizes) <= most or len(sizes) == 1


@pytest.mark.parametrize("sharded", [False, True])
def test_torch_files_of_hugging_face(sharded: bool, tmp_path: Path) -> None:
    model = reference("llama")
    saved(model, tmp_path / "hf")
    state = {n: v.clone() for n, v in model.state_dict().items()}
    # Old releases stored it beside the weights.
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    (tmp_path / "hf" / "model.safetensors").unlink()
    if sharded:
        names = list(state)
        table = {n: f"pytorch_model-0000{i % 2 + 1}-of-00002.bin" for i, n in enumerate(names)}
        for file in set(table.values()):
            torch.save({n: state[n] for n in names if table[n] == file}, tmp_path / "hf" / file)
        index = {"metadata": {}, "weight_map": table}
        (tmp_path / "hf" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    else:
        path = tmp_path / "hf" / "pytorch_model.bin"
        torch.save(state, path, _use_new_zipfile_serialization=False)
    run("--from", "hf", tmp_path / "hf", "--to", "hf", tmp_path / "back")
    assert torch.equal(logits(theirs(tmp_path / "back")), logits(model))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("form", ["hf", "ours", "state-spaces"])
def test_dtype(dtype: str, form: str, tmp_path: Path) -> None:
    model = reference("mamba")
    first = saved(model, tmp_path / "first")
    run("--from", "hf", first, "--to", form, tmp_path / "out", "--dtype", dtype)
    wanted = getattr(torch, dtype)
    found = tensors(tmp_path / "out")
    assert {value.dtype for value in found.values()} == {wanted}
    if form == "hf":
        assert theirs(tmp_path / "out").dtype == wanted  # it follows config.json
    state = model.to(wanted).state_dict()
    for name, value in found.items():
        assert torch.equal(value, state[name.replace("embedding.", "embeddings.")])


def test_who_may_read_a_plain_file_may_read_what_is_written(tmp_path: Path) -> None:
    first = saved(reference("mamba"), tmp_path / "first")
    run("--from", "hf", first, "--to", "ours", tmp_path / "out", "--max-shard-size=9KB")
    (tmp_path / "plain").touch()
    plain = (tmp_path / "plain").stat().st_mode
    assert {path.stat().st_mode for path in (tmp_path / "out").iterdir()} == {plain}


def test_a_folder_of_weights_may_have_one_that_is_called_checkpoints(tmp_path: Path) -> None:
    sizes = models.MambaConfig(d_model=16, n_layer=1, vocab_size=12)
    write_checkpoint(models.build(sizes), tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text('{"config": {}, "world_size": 1}')
    first, before = tmp_path / "run", "ours"
    for form in ("hf", "state-spaces", "ours"):
        assert detect(first) == before
        run("--from", before, first, "--to", form, tmp_path / form)
        first, before = tmp_path / form, form
        (first / "checkpoints" / "step_500_ckp").mkdir(parents=True)
    assert detect(first) == "ours" and Source.open("ours", first).folder == first


def test_what_is_to_be_typed_next_holds_for_a_path_with_spaces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = saved(reference("mamba"), tmp_path / "first")
    run("--from", "hf", first, "--to", "ours", tmp_path / "my model")
    assert f"{tmp_path}/my model" in shlex.split(capsys.readouterr().out.partition("try it: ")[2])


def test_files_of_a_tokenizer_go_along(tmp_path: Path) -> None:
    first = saved(reference("mamba"), tmp_path / "first")
    (first / "tokenizer.json").write_text("{}")
    (first / "notes.txt").write_text("not this")
    run("--from", "hf", first, "--to", "ours", tmp_path / "ours")
    names = sorted(path.name for path in (tmp_path / "ours").iterdir())
    assert names == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["family"] == "mamba"


def test_files_of_a_tokenizer_in_a_run_go_along(tmp_path: Path) -> None:
    sizes = models.MambaConfig(d_model=16, n_layer=1, vocab_size=12)
    step = write_checkpoint(models.build(sizes), tmp_path / "run")
    for name in ("tokenizer.json", "generation_config.json"):
        (tmp_path / "run" / name).write_text('{"of": "the run"}')
    (tmp_path / "run" / "config.json").write_text('{"eos_token_id": 3}')  # the run's settings
    (step / "tokenizer.json").write_text('{"of": "the checkpoint"}')
    for number, given in enumerate((tmp_path / "run", step)):
        out = tmp_path / f"hf-{number}"
        run("--from", "ours", given, "--to", "hf", out)
        found = {path.name: json.loads(path.read_text()) for path in out.glob("*.json")}
        assert found["tokenizer.json"] == {"of": "the checkpoint"}
        assert found["generation_config.json"] == {"of": "the run"}
        assert found["config.json"]["eos_token_id"] is None


MEASURE = """
import sys, threading, time
from pathlib import Path
import torch
from training import models
from training.convert.folders import detect
from training.convert.source import Source
from training.convert.source import Source
from training.convert.target import write_model

def held():  # bytes of memory that no file backs
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024

most, done = 0, False
def watch():
    global most
    while not done:
        most = max(most, held())
        time.sleep(0.001)

models.build(models.MambaConfig(d_model=64, n_layer=1, vocab_size=8))  # imports count for nothing
start = held()
thread = threading.Thread(target=watch)
thread.start()
folder = Path(sys.argv[1])
for begin, end, into, shard in (
    ("ours", "hf", "hf", 10**7),
    ("hf", "state-spaces", "state-spaces", None),
    ("state-spaces", "ours", "again", 10**7),
):
    write_model(Source.open(begin, folder / begin), end, folder / into, torch.float32, shard)
done = True
thread.join()
print(most - start)
"""


@pytest.mark.processes
def test_memory_is_that_of_a_shard_and_a_tensor(tmp_path: Path) -> None:
    sizes = models.MambaConfig(d_model=512, n_layer=24, vocab_size=256)
    folder = tmp_path / "ours"
    folder.mkdir()
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in models.build(sizes).named_parameters()}
    held = {n: torch.ones(s, dtype=torch.bfloat16) for n, s in shapes.items()}
    save_file(held, str(folder / "model.safetensors"))
    settings = {"family": "mamba", "sizes": asdict(sizes)}
    (folder / "config.json").write_text(json.dumps(settings))
    whole = sum(value.numel() for value in held.values()) * 4
    measured = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert measured.returncode == 0, measured.stderr
    # Shards have 10 MB and parameters 4 MB; the allocator keeps some more.
    assert whole > 160e6 and int(measured.stdout) < 70e6
    assert_same(tensors(tmp_path / "again"), tensors(tmp_path / "hf"))
