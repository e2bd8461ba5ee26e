"""The configuration of the Composer system, written by training.create_mamba_config."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.create_mamba_config import main
from training.data.packed import PackedWriter
from training.errors import RequestError
from training.systems.composer import yaml as file
from training.systems.composer.config import HeldOut, Part


def test_create_mamba_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, size in (("a", 60), ("b", 20), ("c", 20), ("fr", 9)):
        with PackedWriter(tmp_path / f"{name}.npy") as packed:
            packed.write(range(size))
    data = ("--text_paths=a.npy,b.npy", "--code_paths=c*.npy")
    changes = ("--lr=1e-3", "--optimizer.beta1=.8", "--model.activation_checkpointing=False")
    assert main([*data, "--eval_paths=fr.npy", *changes, "--save_interval=5ba"]) == 0
    made = file.read(Path("config.yaml"))
    assert made.data.text_paths == (
        Part(path="a.npy", weight=0.6),
        Part(path="b.npy", weight=0.2),
    )
    assert (made.data.n_total_tokens, made.data.code_percentage) == (100, 0.2)
    assert (made.model.d_model, made.model.n_layer, made.model.vocab_size) == (1024, 48, 64000)
    assert (made.scheduler.name, made.optimizer.lr, made.optimizer.beta1) == ("cosine", 1e-3, 0.8)
    assert made.fsdp.activation_checkpointing and not made.model.activation_checkpointing
    assert made.trainer.cp_interval == made.trainer.save_interval == "5ba"
    with pytest.raises(
        RequestError, match=r"^--output: config.yaml already exists; fix: remove it"
    ):
        main(data)
    with pytest.raises(RequestError, match="there is no such flag; did you mean --n_layer"):
        main(["--layers=3"])
    with pytest.raises(RequestError, match=r"2 faults\n  - --text_paths: no file(.|\n)*--code_pa"):
        main(["--output=x.yaml", "--text_paths=d.npy", "--code_paths=e.npy"])


def test_create_mamba_config_knows_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a comma, where no shell expands it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a", "b", "c", "fr"):
        with PackedWriter(tmp_path / f"{name}.npy") as packed:
            packed.write(range(60))
    data = ("--text_paths=~/a.npy,~/b.npy", "--code_paths=~/c*.npy", "--eval_paths=~/fr.npy")
    assert main([*data, "--output=~/made.yaml"]) == 0
    made = file.read(tmp_path / "made.yaml").data
    assert [one.path for one in made.parts] == [
        f"{tmp_path}/{n}" for n in ("a.npy", "b.npy", "c*.npy")
    ]
    assert made.eval_paths == (HeldOut(path=f"{tmp_path}/fr.npy", label="fr"),)
    with pytest.raises(RequestError, match=r"^--code_paths: must be a path, with \./ before a ~"):
        main(["--code_paths=a.npy,~nobody-here/b.npy"])


def test_data_that_is_given_twice_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not write a configuration that training refuses, or that trains on it twice."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        with PackedWriter(tmp_path / f"{name}.npy") as packed:
            packed.write(range(60))
    for data, name, path, other in (
        (["--text_paths=a.npy,a.npy"], "text_paths", "a.npy", "a.npy"),
        (["--text_paths=a.npy,*.npy"], "text_paths", "*.npy", "a.npy"),
        (["--text_paths=b.npy", f"--code_paths=a.npy,{tmp_path}/b.npy"], "code_paths", "", "b.npy"),
    ):
        with pytest.raises(RequestError) as error:
            main(data)
        shown = str(error.value)
        assert shown.startswith(f"--{name}: {path or tmp_path}")
        assert shown.endswith(f".npy, which {other} has too; fix: give each file once")
    assert not Path("config.yaml").exists()


def test_data_that_training_refuses_to_evaluate_on_is_refused_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with PackedWriter(tmp_path / "a.npy") as packed:
        packed.write(range(60))
    for eval_paths, message in (
        ("a.npy", r"^--eval_paths: a\.npy is trained on; fix: hold out other files$"),
        ("*.npy", r"^--eval_paths: a\.npy is trained on"),
        (f"{tmp_path}/a.npy", r"^--eval_paths: .*a\.npy is trained on"),
        ("b.npy", r"^--eval_paths: no file matches 'b\.npy'"),
    ):
        with pytest.raises(RequestError, match=message):
            main(["--code_paths=a.npy", f"--eval_paths={eval_paths}"])
    assert not Path("config.yaml").exists()
