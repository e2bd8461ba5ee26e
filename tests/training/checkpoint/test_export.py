"""The trained model's folder: what the run has not written itself is never replaced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.training.support.runs import TINY, run, write_text
from training.checkpoint import export
from training.config.config import Config
from training.convert import source, target
from training.errors import RequestError
from training.llama_smp import configure

SIZES = (
    *("--model_type=llama_v2", "--hidden_width=64", "--num_layers=2", "--num_heads=4"),
    *("--vocab_size=64", "--use_synthetic_data=1", "--save_final_model=1"),
)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Record the folders that models would be written to, instead of writing them."""
    folders: list[Path] = []

    def write_model(opened: Any, form: str, folder: Path, *given: Any) -> Any:
        folder.mkdir()
        folders.append(folder)
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_text(f"{name} of the run, start {len(folders)}")
        return SimpleNamespace(size=1)

    found = SimpleNamespace(folder=Path("step_4_ckp"))
    monkeypatch.setattr(source.Source, "open", lambda *given: found)
    monkeypatch.setattr(target, "write_model", write_model)
    return folders


def asked(tmp_path: Path, *flags: str, model: str = "model") -> Config:
    save = tmp_path / "save"
    save.mkdir(exist_ok=True)
    return configure(
        (*SIZES, f"--checkpoint_dir={save}", f"--model_dir={tmp_path / model}", *flags)
    )


def export_model(config: Config) -> None:
    export.check(config)
    export.write(config, lambda line: None)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_what_the_run_has_written_is_replaced(tmp_path: Path, written: list[Path]) -> None:
    config = asked(tmp_path)
    for start in (1, 2, 3):
        export_model(config)
        assert contents(tmp_path / "model") == {
            "config.json": f"config.json of the run, start {start}",
            "model.safetensors": f"model.safetensors of the run, start {start}",
        }
    assert {path.name for path in tmp_path.iterdir()} == {"save", "model"}


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_a_file_that_was_added_or_changed_stays(
    tmp_path: Path, written: list[Path], name: str
) -> None:
    config = asked(tmp_path)
    export_model(config)
    export.check(config)
    (tmp_path / "model" / name).write_text("a user's own")
    before = contents(tmp_path / "model")
    for step in (export.check, lambda config: export.write(config, lambda line: None)):
        with pytest.raises(RequestError) as error:
            step(config)
        assert f"{tmp_path}/model has {name}, which this run has not written" in str(error.value)
        assert "fix: give another folder, or move it away" in str(error.value)
    assert contents(tmp_path / "model") == before


def test_another_runs_model_stays(tmp_path: Path, written: list[Path]) -> None:
    export_model(asked(tmp_path))
    other = asked(tmp_path, f"--checkpoint_dir={tmp_path}/other")
    with pytest.raises(RequestError, match="which this run has not written"):
        export.check(other)
    (tmp_path / "model").rename(tmp_path / "more.new")
    with pytest.raises(RequestError, match=r"more\.new has config.json, which this run has not"):
        export.check(asked(tmp_path, model="more"))


def test_a_start_that_was_killed_between_hinders_none(
    tmp_path: Path, written: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = asked(tmp_path)
    export_model(config)

    def killed(*given: Any) -> None:
        raise KeyboardInterrupt

    for place, name in ((export.shutil, "rmtree"), (Path, "rename")):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(place, name, killed)
            export_model(config)
        assert (tmp_path / "model.new").is_dir()
        export_model(config)
        assert not (tmp_path / "model.new").exists()


def test_what_starts_left_that_were_killed_while_they_wrote_is_removed(
    tmp_path: Path, written: list[Path]
) -> None:
    names = {"model.new.17.tmp", "model.new.4711.tmp", "model.tmp", "model.new.notes.tmp"}
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half of it")
    export_model(asked(tmp_path))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"save", "model", "model.tmp", "model.new.notes.tmp"}


@pytest.mark.parametrize("final", ["base", "base/tuned", ".", "link", "save"])
def test_it_is_apart_from_the_base_model_and_the_run(tmp_path: Path, final: str) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(base)

    def tuned(final: str) -> Config:
        config = asked(tmp_path, model=final)
        return replace(config, model=replace(config.model, init_weights=str(base)))

    export.check(tuned("elsewhere"))
    with pytest.raises(RequestError, match=r"overlap, .*; fix: give a folder of its own"):
        export.check(tuned(final))


@pytest.mark.parametrize("folder", ["/proc/model", "/proc/deeper/model"])
def test_a_place_that_cannot_be_written_is_refused_before_training(
    tmp_path: Path, folder: str
) -> None:
    config = asked(tmp_path, f"--model_dir={folder}")
    with pytest.raises(RequestError, match=rf"^final_model_dir: {folder} cannot be written: .*fix"):
        export.check(config)


@pytest.mark.processes
def test_a_pass_that_only_compiles_writes_no_model(tmp_path: Path) -> None:
    """Even if an earlier start has left a checkpoint."""
    flags = (
        *(*TINY, "--model_name=llama-tiny", f"--save_ckpt_path={tmp_path}/run"),
        f"--dataset_path={write_text(tmp_path / 'text')}",
    )
    final = f"--final_model_dir={tmp_path}/model"
    for before in ((), ("--num_steps=2",)):
        if before:
            assert run(0, *flags, *before).returncode == 0
        done = run(0, *flags, final, "--num_steps=20", "--compile_only=True")
        assert done.returncode == 0, done.stderr
        assert "nothing is saved" in done.stdout and not (tmp_path / "model").exists()
