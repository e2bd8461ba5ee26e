"""Merging what tensor-parallel ranks saved: the whole weights bit for bit, or one clear error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.training.support.ranks import CORE, SIZES, rank_file, save
from tests.training.support.runs import run
from training.convert import formats
from training.convert.__main__ import convert
from training.convert.folders import detect
from training.convert.source import Source
from training.errors import RequestError
from training.models import Mamba2Config

EIGHT = replace(SIZES, n_groups=8, bias=True, tie_embeddings=False, expand=2, d_conv=3)
CONTENT = {"dtype": torch.bfloat16, "vocab_size": 48, "rmsnorm_across_groups": False}
"""Flags as the system's program stores them."""


def merged(folder: Path, target: Path, *words: str, to: str = "ours") -> Path:
    convert(["--from", "neuron-tp", str(folder), "--to", to, str(target), *words])
    return target


def refused(folder: Path, *words: str) -> str:
    with pytest.raises(RequestError) as error:
        merged(folder, folder.parent / "never", *words)
    assert not (folder.parent / "never").exists()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("sizes", [SIZES, EIGHT])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_whole_comes_back_to_the_bit(
    sizes: Mamba2Config, ranks: int, fused: bool, tmp_path: Path
) -> None:
    flags = {**CONTENT, "tp": ranks}
    held = save(tmp_path / "exp_step_8", sizes, ranks, flags, fused)
    folder = merged(tmp_path / "exp_step_8", tmp_path / "ours", f"--n-groups={sizes.n_groups}")
    found = load_file(folder / "model.safetensors")
    assert found.keys() == held.keys()
    for name, value in held.items():
        assert torch.equal(found[name], value), name
    wanted = replace(sizes, chunk_size=256, initializer_range=0.1)
    assert Source.open("ours", folder).sizes == wanted


def test_groups_are_one_a_rank_where_nothing_says_another(tmp_path: Path) -> None:
    save(tmp_path / "exp_step_8", SIZES, 4)
    source = Source.open("neuron-tp", tmp_path / "exp_step_8")
    assert source.sizes == replace(SIZES, chunk_size=256, initializer_range=0.1)
    assert detect(tmp_path / "exp_step_8" / "model") == "neuron-tp"


@pytest.mark.parametrize(
    ("ranks", "flags", "words", "across"),
    [
        (4, {"rmsnorm_across_groups": True}, (), False),  # each rank crossed its one group
        (1, {"rmsnorm_across_groups": True}, ("--n-groups=4",), True),
        (2, {"rmsnorm_across_groups": False}, ("--n-groups=4",), False),
        (2, {}, ("--n-groups=4", "--norm-across-groups=True"), True),
    ],
)
def test_what_the_norm_takes_its_mean_over(
    ranks: int, flags: dict[str, Any], words: tuple[str, ...], across: bool, tmp_path: Path
) -> None:
    save(tmp_path / "exp_step_8", SIZES, ranks, {"tp": ranks, **flags})
    folder = merged(tmp_path / "exp_step_8", tmp_path / "out", *words)
    sizes = Source.open("ours", folder).sizes
    assert isinstance(sizes, Mamba2Config) and sizes.norm_across_groups is across


def test_a_config_beside_the_files_says_the_sizes(tmp_path: Path) -> None:
    sizes = replace(SIZES, expand=3, norm_eps=1e-6)  # no model known to the system has these
    folder = tmp_path / "exp_step_8"
    save(folder, sizes, 2)
    assert "d_inner that is 3 times d_model, not 2; fix: give the files of all" in refused(folder)
    (folder / "config.json").write_text(json.dumps(formats.write_neuron(sizes)))
    assert Source.open("neuron-tp", folder).sizes == sizes
    assert "n_groups 3 is not a multiple of the 2 ranks" in refused(folder, "--n-groups=3")
    shown = refused_whole(folder, "--n-groups=2")
    assert "conv1d.weight has shape (160, 1, 4), wanted (128, 1, 4)" in shown


def refused_whole(folder: Path, *words: str) -> str:
    """Return the error for tensors that do not match the sizes, with a line for each."""
    with pytest.raises(RequestError) as error:
        merged(folder, folder.parent / "never", *words)
    return str(error.value)


def change(path: Path, name: str, value: Callable[[Tensor], Tensor]) -> None:
    held = torch.load(path, weights_only=True)
    held[name] = value(held[name])
    torch.save(held, path)


def pipeline(folder: Path) -> None:
    (folder / "model" / "dp_rank_00_tp_rank_00_pp_rank_01.pt").write_bytes(b"")


def no_heads(folder: Path) -> None:
    for rank in range(4):
        change(rank_file(folder, rank), f"{CORE}A_log", lambda value: value[:0])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda f: rank_file(f, 2).unlink(),
            "model: of 4 ranks, missing: dp_rank_00_tp_rank_02_pp_rank_00.pt",
        ),
        (lambda f: rank_file(f, 3).unlink(), "missing: dp_rank_00_tp_rank_03_pp_rank_00.pt"),
        (
            lambda f: shutil.copy(rank_file(f, 0), rank_file(f, 4)),
            "has files of 5 ranks, but user_content.pt says that it was saved by 4",
        ),
        (
            lambda f: change(rank_file(f, 1), "backbone.norm_f.weight", lambda v: v + 1),
            "tp_rank_01_pp_rank_00.pt: backbone.norm_f.weight is not the same as in dp_rank_00_tp_r"
            "ank_00_pp_rank_00.pt, and every rank has it whole; are the files of different steps",
        ),
        (
            lambda f: change(rank_file(f, 1), f"{CORE}A_log", lambda v: v.bfloat16()),
            f"tp_rank_01_pp_rank_00.pt: {CORE}A_log is not as in dp_rank_00_tp_rank_00_pp_rank_00",
        ),
        (
            lambda f: rank_file(f, 3).write_bytes(b"junk"),
            "dp_rank_00_tp_rank_03_pp_rank_00.pt cannot be read",
        ),
        (pipeline, "has files of several pp_ranks; pipelines are not merged"),
        (
            lambda f: rank_file(f, 0).with_suffix(".pt.tensors").mkdir(),
            "saved by torch_xla's own serialization, which is not read",
        ),
        (lambda f: (f / "checkpoint").write_text("1"), "was not saved completely: it has no file"),
        (lambda f: (f / "user_content.pt").write_bytes(b"junk"), "user_content.pt cannot be read"),
        (
            lambda f: torch.save({"cli_args": {"model": Path("x")}}, f / "user_content.pt"),
            "user_content.pt cannot be read: it holds pathlib",
        ),
        (no_heads, f"model: {CORE}A_log has shape (0,)"),
    ],
)
def test_files_that_do_not_go_together(
    spoil: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "exp_step_8"
    save(folder, SIZES, 4, {**CONTENT, "tp": 4})
    spoil(folder)
    assert message in refused(folder)


def test_what_only_the_user_knows_is_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "exp_step_8"
    save(folder, SIZES, 2)
    shown = refused(folder, "--n-groups=4")
    assert (
        "the mean of each of its 4 groups or of all channels; fix: give --norm-across-groups"
        in shown
    )
    torch.save({"cli_args": {"rmsnorm_across_groups": True}}, folder / "user_content.pt")
    shown = refused(folder, "--n-groups=4")
    assert "each of 2 ranks took the mean of its own 2 groups, which no whole model does" in shown
    assert "must be a whole number of at least 1, not '0'" in refused(folder, "--n-groups=0")
    assert "must be True or False, not 'some'" in refused(folder, "--norm-across-groups=some")
    assert "n_groups: 64 do not divide the 64 channels of B and C" in refused(
        folder, "--n-groups=64"
    )


def test_a_folder_of_checkpoints_names_them(tmp_path: Path) -> None:
    for step in (8, 16):
        save(tmp_path / "run" / f"exp_step_{step}", SIZES, 2)
    assert "holds checkpoints of ranks; fix: give one: exp_step_16, exp_step_8" in refused(
        tmp_path / "run"
    )


@pytest.mark.processes
def test_from_the_command_line(tmp_path: Path) -> None:
    save(tmp_path / "exp_step_8", SIZES, 4, {**CONTENT, "tp": 4})
    words = ("--from", "neuron-tp", str(tmp_path / "exp_step_8"), "--to", "neuron")
    program = ("-m", "training.convert")
    done = run(0, *words, str(tmp_path / "out"), program=program)
    assert done.returncode == 0, done.stderr
    assert "wrote" in done.stdout
    assert f"{CORE}in_proj_xBC.weight" in load_file(tmp_path / "out" / "model.safetensors")
    rank_file(tmp_path / "exp_step_8", 1).unlink()
    done = run(0, *words, str(tmp_path / "again"), program=program)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert (
        done.stderr.startswith("error: ")
        and "of 4 ranks, missing: dp_rank_00_tp_rank_01" in done.stderr
    )
