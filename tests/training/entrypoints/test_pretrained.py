"""Mamba2ForCausalLM: the same as transformers' class, for every layout, without its library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.support.ranks import SIZES, save
from tests.training.support.runs import ROOT
from training import models
from training.convert.source import Source
from training.convert.target import write_model
from training.convert.weights import Held
from training.errors import RequestError
from training.pretrained import Mamba2ForCausalLM


def ids() -> Tensor:
    return torch.randint(40, (2, 19), generator=torch.Generator().manual_seed(1))  # (b, l)


def test_what_transformers_gives(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    heads: Any = {"num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8}
    theirs: Any = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**sizes, **heads))
    with torch.no_grad():
        for parameter in theirs.eval().parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    theirs.save_pretrained(tmp_path / "hf")
    ours = Mamba2ForCausalLM.from_pretrained(str(tmp_path / "hf"))
    labels = ids()
    labels[0, :7] = -100
    wanted, found = theirs(ids(), labels=labels), ours(ids(), labels=labels)
    torch.testing.assert_close(found.logits, wanted.logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.loss, wanted.loss)
    assert ours(ids()).loss is None
    wanted.loss.backward()
    found.loss.backward()
    gradients = dict(ours.model.named_parameters())
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(gradients[name].grad, parameter.grad, rtol=1e-3, atol=1e-5)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": 41}
    assert torch.equal(ours.generate(ids(), 6), theirs.generate(ids(), **options))
    ours.save_pretrained(tmp_path / "fused", split_proj=False)
    read: Any = transformers.Mamba2ForCausalLM.from_pretrained
    torch.testing.assert_close(
        read(tmp_path / "fused")(ids()).logits, wanted.logits, rtol=0, atol=1e-4
    )


def test_every_layout_is_the_same_model(tmp_path: Path) -> None:
    place = tmp_path / "exp_step_8"
    save(place, SIZES, 2, {"rmsnorm_across_groups": False})
    (place / "tokenizer.json").write_text("{}")
    model = Mamba2ForCausalLM.from_pretrained(place)
    model.save_pretrained(tmp_path / "split")
    model.save_pretrained(tmp_path / "fused", split_proj=False)
    wanted = model(ids()).logits
    for name in ("split", "fused"):
        again = Mamba2ForCausalLM.from_pretrained(tmp_path / name)
        assert torch.equal(again(ids()).logits, wanted)
        assert (tmp_path / name / "tokenizer.json").exists()
    with pytest.raises(
        RequestError, match="split already exists; fix: give a folder that does not"
    ):
        model.save_pretrained(tmp_path / "split")


def test_changed_weights_are_saved_in_their_dtype(tmp_path: Path) -> None:
    save(tmp_path / "exp_step_8", SIZES, 4)
    model = Mamba2ForCausalLM.from_pretrained(tmp_path / "exp_step_8", dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.get_parameter("backbone.norm_f.weight").fill_(2)
    model.save_pretrained(tmp_path / "out")
    source = Source.open("neuron", tmp_path / "out")
    assert source.read("backbone.norm_f.weight").tolist() == [2] * 32
    assert source.dtype("backbone.embeddings.weight") == torch.bfloat16


def test_drawing_follows_the_seed(tmp_path: Path) -> None:
    save(tmp_path / "exp_step_8", SIZES, 4)
    model = Mamba2ForCausalLM.from_pretrained(tmp_path / "exp_step_8")
    first = model.generate(ids(), 20, temperature=5.0, seed=1)
    assert first.shape == (2, 39) and torch.equal(first[:, :19], ids())
    assert torch.equal(first, model.generate(ids(), 20, temperature=5.0, seed=1))
    assert not torch.equal(first, model.generate(ids(), 20, temperature=5.0, seed=2))


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (3,)])
def test_prompts_without_a_token_are_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    save(tmp_path / "exp_step_8", SIZES, 4)
    model = Mamba2ForCausalLM.from_pretrained(tmp_path / "exp_step_8")
    with pytest.raises(RequestError, match=r"input_ids: must be of shape \(prompts, tokens\)"):
        model.generate(torch.ones(shape, dtype=torch.int64))


def test_other_models_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="nowhere is not a folder"):
        Mamba2ForCausalLM.from_pretrained(tmp_path / "nowhere")
    sizes = models.MambaConfig(d_model=16, n_layer=1, vocab_size=12)
    held = {n: torch.ones(one.shape) for n, one in models.build(sizes).named_parameters()}
    write_model(Source("ours", tmp_path, sizes, Held(held)), "hf", tmp_path / "mamba", None, None)
    with pytest.raises(RequestError, match="mamba is a model of mamba, not of mamba2"):
        Mamba2ForCausalLM.from_pretrained(tmp_path / "mamba")


WITHOUT = """
import sys
sys.modules["transformers"] = None
from training.pretrained import Mamba2ForCausalLM
model = Mamba2ForCausalLM.from_pretrained(sys.argv[1])
import torch
ids = torch.arange(19)[None]
print(model(ids, labels=ids).loss.item())
"""


@pytest.mark.processes
def test_it_works_without_transformers(tmp_path: Path) -> None:
    save(tmp_path / "exp_step_8", SIZES, 2, {"rmsnorm_across_groups": True})
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(tmp_path / "exp_step_8")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0
