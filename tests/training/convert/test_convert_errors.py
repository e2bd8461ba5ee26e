"""Conversion refused: one clear error with all faults in it, and nothing written."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.training.support.runs import ROOT
from training import models
from training.cli import run_command
from training.convert import target
from training.convert.__main__ import convert
from training.errors import RequestError, TrainingError

SIZES = models.MambaConfig(d_model=16, n_layer=1, vocab_size=12)


def weights_of(sizes: models.Sizes, folder: Path) -> Path:
    """Write a folder of weights in our format."""
    folder.mkdir()
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in models.build(sizes).named_parameters()}
    torch.manual_seed(0)
    save_file({n: torch.randn(s) for n, s in shapes.items()}, str(folder / "model.safetensors"))
    settings = {"family": sizes.family, "sizes": vars(sizes)}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    return weights_of(SIZES, tmp_path / "ours")


def refused(*words: Any, kind: type[TrainingError] = RequestError) -> str:
    with pytest.raises(TrainingError) as error:
        convert([str(word) for word in words])
    assert type(error.value) is kind
    return str(error.value)


def change(folder: Path, function: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    held = {name: value.clone() for name, value in load_file(str(path)).items()}
    function(held)
    save_file(held, str(path))


def test_all_tensors_that_do_not_fit_are_reported_at_once(ours: Path, tmp_path: Path) -> None:
    mixer = "backbone.layers.0.mixer."

    def spoil(held: dict[str, torch.Tensor]) -> None:
        del held[f"{mixer}D"], held["backbone.norm_f.weight"]
        held["score.weight"] = torch.ones(2, 16)
        held[f"{mixer}A_log"] = torch.ones(32, 8)
        held["lm_head.weight"] = torch.ones(13, 16)

    change(ours, spoil)
    assert refused("--from", "ours", ours, "--to", "hf", tmp_path / "out").splitlines() == [
        f"{ours}: its tensors do not match its sizes:",
        f"  - {mixer}D is missing, wanted (32,)",
        "  - backbone.norm_f.weight is missing, wanted (16,)",
        "  - score.weight is not expected",
        f"  - {mixer}A_log has shape (32, 8), wanted (32, 16)",
        "  - lm_head.weight has shape (13, 16), wanted (12, 16)",
    ]
    assert not (tmp_path / "out").exists()


def test_a_tied_tensor_must_be_the_same(ours: Path, tmp_path: Path) -> None:
    words = ("--from", "ours", ours, "--to", "hf", tmp_path / "out")
    change(ours, lambda held: held.update({"lm_head.weight": torch.ones(12, 16)}))
    assert "lm_head.weight differs from backbone.embeddings.weight" in refused(*words)
    embedding = "backbone.embeddings.weight"
    change(ours, lambda held: held.update({"lm_head.weight": held[embedding].clone()}))
    convert([str(word) for word in words])
    assert "lm_head.weight" not in load_file(str(tmp_path / "out" / "model.safetensors"))


def test_weights_of_another_dtype(ours: Path, tmp_path: Path) -> None:
    change(
        ours, lambda held: held.update({"backbone.norm_f.weight": torch.ones(16).to(torch.int8)})
    )
    shown = refused("--from", "ours", ours, "--to", "hf", tmp_path / "out")
    assert "backbone.norm_f.weight is I8; weights are F64, F32, F16, BF16" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--from onnx SRC --to hf DST", "argument --from: invalid choice: 'onnx' (choose from"),
        ("--from ours SRC DST", "the following arguments are required: --to"),
        ("--from ours SRC --to hf DST --dtype int8", "argument --dtype: invalid choice: 'int8'"),
        ("--from ours SRC --to hf DST --dtyp float16", "unrecognized arguments: --dtyp float16"),
        ("--from hf SRC --to ours DST", "is of format ours, not hf"),
        ("--from ours NONE --to hf DST", "nowhere is not a folder"),
        ("--from ours SRC --to hf SRC", "ours already exists; fix: give a folder that does not"),
        ("--from ours SRC --to hf NONE/x", "cannot be made: "),
        ("--from ours LONG --to hf DST", "cannot be read: File name too long"),
        ("--from ours SRC --to hf LONG", "cannot be made: File name too long"),
        (
            "--from ours SRC --to hf DST --max-shard-size 5XB",
            "must be a size such as 5GB or 512MiB",
        ),
        (
            "--from ours SRC --to hf DST --max-shard-size 0.5",
            "must be a size such as 5GB or 512MiB",
        ),
        (f"--from ours SRC --to hf DST --max-shard-size {10**400}", "must be a size such as 5GB"),
        (
            "--from ours SRC --to state-spaces DST --max-shard-size 1GB",
            "always has one file; fix: leave it out",
        ),
    ],
)
def test_the_command_line(words: str, message: str, ours: Path, tmp_path: Path) -> None:
    places = {"SRC": str(ours), "DST": str(tmp_path / "out"), "NONE": str(tmp_path / "nowhere")}
    places["LONG"] = str(tmp_path / ("x" * 300))
    for word, place in places.items():
        words = words.replace(word, place)
    shown = refused(*words.split())
    assert message in shown and "\n" not in shown
    assert not (tmp_path / "out").exists()


def test_exit_codes_and_no_traceback(ours: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["--from", "ours", str(ours), "--to", "hf", str(tmp_path / "out")]
    assert run_command(convert, words) == 0
    said = capsys.readouterr()
    assert "wrote" in said.out and "python -m training.generate" in said.out and not said.err
    assert run_command(convert, words) == 2
    assert capsys.readouterr().err.startswith("error: ")


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json does not exist"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON: "),
        (lambda f: (f / "config.json").write_text("[]"), "does not hold a JSON object"),
        (lambda f: (f / "config.json").write_text('{"a": 1}'), "has an unknown format"),
        (lambda f: (f / "config.json").write_text('{"family": "rwkv"}'), "family 'rwkv' is not"),
        (lambda f: (f / "config.json").write_text('{"family": ["mamba"]}'), "['mamba'] is not"),
        (lambda f: (f / "config.json").write_text('{"family": "mamba"}'), "has no sizes"),
        (lambda f: (f / "model.safetensors").unlink(), "has no weights: neither model.safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes(b"junk"), "safetensors cannot be read: "),
        (
            lambda f: (f / "model.safetensors").write_bytes(
                (f / "model.safetensors").read_bytes()[:-1]
            ),
            "safetensors cannot be read: ",
        ),
    ],
)
def test_a_broken_folder(
    spoil: Callable[[Path], Any], message: str, ours: Path, tmp_path: Path
) -> None:
    spoil(ours)
    shown = refused("--from", "ours", ours, "--to", "hf", tmp_path / "out")
    assert message in shown and "\n" not in shown
    assert files(tmp_path) == ["ours"]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}, "names x-1.safetensors"),
        ({"weight_map": {"a": "../ours/model.safetensors"}}, "which is not in its folder"),
        ({"metadata": {}}, "has no weight_map"),
    ],
)
def test_an_index_of_files_that_are_not_there(
    index: Any, message: str, ours: Path, tmp_path: Path
) -> None:
    (ours / "model.safetensors").unlink()
    (ours / "model.safetensors.index.json").write_text(json.dumps(index))
    assert message in refused("--from", "ours", ours, "--to", "hf", tmp_path / "out")


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (b"junk", "pytorch_model.bin cannot be read: "),
        ([torch.ones(2)], "holds a list, not tensors by name"),
        ({"model": {"a": torch.ones(2)}}, "model is dict; weights are"),
        ({"a": torch.ones(2).to(torch.int8)}, "a is torch.int8; weights are"),
    ],
)
def test_a_broken_file_of_torch(held: Any, message: str, ours: Path, tmp_path: Path) -> None:
    (ours / "model.safetensors").unlink()
    path = ours / "pytorch_model.bin"
    if isinstance(held, bytes):
        path.write_bytes(held)
    else:
        torch.save(held, path)
    assert message in refused("--from", "ours", ours, "--to", "hf", tmp_path / "out")


def test_sizes_of_ours_are_checked_by_type(ours: Path, tmp_path: Path) -> None:
    values = {**vars(SIZES), "d_model": "16", "tie_embeddings": 1, "heads": 3}
    del values["n_layer"]
    (ours / "config.json").write_text(json.dumps({"family": "mamba", "sizes": values}))
    where = ours / "config.json"
    assert refused("--from", "ours", ours, "--to", "hf", tmp_path / "out").splitlines() == [
        "4 faults",
        f"  - {where}: heads is not a size of this family",
        f"  - {where}: d_model must be a whole number, not '16'",
        f"  - {where}: n_layer is missing",
        f"  - {where}: tie_embeddings must be true or false, not 1",
    ]


def test_a_full_disk_is_seen_before(ours: Path, tmp_path: Path, monkeypatch: Any) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(target.shutil, "disk_usage", lambda path: usage._replace(free=999))
    words = ("--from", "ours", ours, "--to", "hf", tmp_path / "out")
    assert "bytes, but only 999 are free there" in refused(*words, kind=TrainingError)
    assert files(tmp_path) == ["ours"]


@pytest.mark.processes
@pytest.mark.parametrize("form", ["hf", "state-spaces"])
def test_a_disk_that_fills_up_meanwhile(form: str, ours: Path, tmp_path: Path) -> None:
    """A limit on the file size simulates the disk: writing fails half way."""
    done = subprocess.run(
        [
            # No bytecode: the limit would truncate that too, and later imports of it would fail.
            *(sys.executable, "-B", "-m", "training.convert"),
            *("--from", "ours", str(ours), "--to", form, str(tmp_path / "out")),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)),
    )
    assert done.returncode == 1, done.stderr
    assert f"{tmp_path / 'out'} cannot be written (" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert files(tmp_path) == ["ours"]


@pytest.mark.processes
def test_lines_that_cannot_be_written(ours: Path, tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "training.convert"),
                *("--from", "ours", str(ours), "--to", "hf", str(tmp_path / "out")),
            ],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    said = "error: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)
    assert files(tmp_path) == ["ours"]


def test_a_run_without_a_complete_checkpoint(tmp_path: Path) -> None:
    step = tmp_path / "run" / "checkpoints" / "step_3_ckp"
    step.mkdir(parents=True)
    words = ("--to", "hf", tmp_path / "out")
    shown = refused("--from", "ours", tmp_path / "run", *words).splitlines()
    assert shown[0] == f"{tmp_path / 'run'} has no complete checkpoint"
    assert "step_3_ckp is broken (it has no manifest.json)" in shown[1]
    (step / "manifest.json").write_text("{}")
    assert "is broken: its manifest.json cannot be" in refused("--from", "ours", step, *words)
    record = {**dict.fromkeys(("step", "tokens_seen", "world_size"), 1), "torch": "", "data": {}}
    (step / "manifest.json").write_text(json.dumps({**record, "files": {}, "model": ["mamba"]}))
    assert "model must be a table, not ['mamba']" in refused("--from", "ours", step, *words)
