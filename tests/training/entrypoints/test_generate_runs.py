"""Text from a run's folder: its contents, and the ways to name it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.training.entrypoints.test_generate import HEADS, made, tokenizer
from tests.training.support.checkpoints import write_checkpoint
from training import models
from training.cli import run_command
from training.data.tokenize.__main__ import main as tokenize
from training.generate.__main__ import write_text as write
from training.generate.vocabulary import Tokens

SIZES = models.LlamaConfig(**{**HEADS, "vocab_size": 300}, n_kv_head=2, context=64)
WORDS = ("--prompt=the dog", "--max-new-tokens=9", "--temperature=0")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_checkpoint(made(SIZES), tmp_path / "run", 3)
    return tmp_path / "run"


def text_of(folder: Path, capsys: Any, *more: str) -> str:
    assert run_command(write, [str(folder), *WORDS, *more]) == 0
    text: str = capsys.readouterr().out
    return text


def test_a_tokenizer_in_the_folder_of_a_run(
    run: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_command(write, [str(run), *WORDS]) == 2
    assert f"must be given: {run} has no tokenizer.json" in capsys.readouterr().err
    path = tokenizer(tmp_path, "byte level")
    expected = text_of(run, capsys, f"--tokenizer={path}")
    (run / "config.json").write_text('{"eos_token_id": "of the run\'s settings, which are none"}')
    shutil.copy(path, run)
    step = run / "checkpoints" / "step_3_ckp"
    assert text_of(run, capsys) == text_of(step, capsys) == expected
    monkeypatch.chdir(step)
    assert text_of(Path(), capsys) == expected
    own = run / "checkpoints" / "step_3_ckp" / "tokenizer.json"
    own.write_text("that of a checkpoint comes first")
    assert run_command(write, [str(run), *WORDS]) == 2
    assert f"{own} cannot be read" in capsys.readouterr().err


def test_an_end_that_is_stated_in_the_folder_of_a_run(run: Path, capsys: Any) -> None:
    vocabulary = Tokens(tokenizer(run, "byte level"))
    whole = text_of(run, capsys)
    first = vocabulary.encode(f"the dog{whole}")[len(vocabulary.encode("the dog"))]
    (run / "generation_config.json").write_text(json.dumps({"eos_token_id": first}))
    assert text_of(run, capsys) == "\n" != whole


def test_a_prompt_that_is_no_text(run: Path, tmp_path: Path, capsys: Any) -> None:
    """The shell passes on a byte that is not a character in this form."""
    path = tokenizer(tmp_path, "byte level")
    words = [str(run), "--prompt=caf\udce9", f"--tokenizer={path}"]
    assert run_command(write, words) == 2
    assert capsys.readouterr().err == "error: --prompt: is not UTF-8\n"


def test_the_folder_that_the_checkpoints_of_a_run_lie_in(run: Path, capsys: Any) -> None:
    tokenizer(run, "byte level")
    assert text_of(run / "checkpoints", capsys) == text_of(run, capsys)


def test_a_checkpoint_whose_save_did_not_end(run: Path, capsys: Any) -> None:
    step = run / "checkpoints" / "step_3_ckp"
    (step / "manifest.json").unlink()
    assert run_command(write, [str(step), *WORDS]) == 2
    said = capsys.readouterr().err
    assert said == f"error: checkpoint {step} is broken: it has no manifest.json\n"


def test_ctrl_c_is_no_traceback(capsys: Any) -> None:
    def work(_: Sequence[str]) -> None:
        raise KeyboardInterrupt

    assert run_command(work, []) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert tokenize(work) == 130
    assert capsys.readouterr().err == "stopped; the same command goes on from here\n"
