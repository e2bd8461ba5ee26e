"""Files read directly from layers are the same as in the kernel's merge of them."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqshforge.host.programs import Programs
from sqshforge.hot import HotList
from sqshforge.image import overlay
from sqshforge.image.layer_folders import LayerFolders
from sqshforge.squash import folder_tar

NAMES = ("a", "b", "c", "d")
SEEDS = 12
STEPS = 120  # in each layer


@contextlib.contextmanager
def changing(layers: list[Path], work: Path, options: str) -> Iterator[Path]:
    """Mount a writable merge of layers, the lowest first; changes create the last layer."""
    merged, scratch = work / "merged", work / "scratch"
    merged.mkdir(exist_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    lower = ":".join(str(one) for one in reversed(layers[:-1]))
    words = f"lowerdir={lower},upperdir={layers[-1]},workdir={scratch},{options}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", words, merged], check=True)
    try:
        yield merged
    finally:
        subprocess.run(["umount", merged], check=True)


def change(root: Path, chosen: random.Random) -> None:
    """Make one change, as a step of a Dockerfile may; most of them create something."""
    path = root.joinpath(*chosen.choices(NAMES, k=chosen.randint(1, 4)))
    other = root.joinpath(*chosen.choices(NAMES, k=chosen.randint(1, 4)))
    kind = chosen.choice(("folder", "write", "write", "write", "remove", "rename", "link", "mode"))
    with contextlib.suppress(OSError):  # it does not exist, or is of another kind
        if kind == "folder":
            path.mkdir(parents=True)
        elif kind == "write":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(chosen.randbytes(chosen.choice((0, 3, 70_000))))
        elif kind == "remove" and chosen.random() < 0.5:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        elif kind == "rename":
            path.rename(other)
        elif kind == "link":
            os.link(path, other)
        else:
            path.chmod(chosen.choice((0o600, 0o755)))


def layers(work: Path, chosen: random.Random, options: str) -> list[Path]:
    """Make random layers, the lowest first: with whiteouts, opaque and renamed folders."""
    found = [work / "0"]
    found[0].mkdir()
    for _ in range(STEPS):
        change(found[0], chosen)
    for index in range(1, 5):
        found.append(work / f"{index}")
        found[-1].mkdir()
        with changing(found, work, options) as root:
            for _ in range(STEPS):
                change(root, chosen)
    return found


@pytest.mark.root
def test_a_file_whose_content_is_in_another_layer_is_read_in_the_merge(tmp_path: Path) -> None:
    """A copy of only a file's metadata may have blocks too, if its attributes need one."""
    merged, layer = tmp_path / "merged", tmp_path / "layer"
    for root, text in ((merged, "whole"), (layer, "empty")):
        (root / "a").mkdir(parents=True)
        (root / "a" / "file").write_text(text)
    with (tmp_path / "a.tar").open("w+b") as out:
        for expected in (b"empty", b"whole"):
            folder_tar.write(
                *(out, merged, HotList(), lambda _: None),
                split=False,
                devices=False,
                layers=[layer],
            )
            out.seek(0)
            assert expected in out.read()
            out.seek(0)
            out.truncate()
            os.setxattr(layer / "a" / "file", "trusted.overlay.metacopy", b"")


@pytest.mark.processes
@pytest.mark.root
@pytest.mark.parametrize("options", ["redirect_dir=off", "redirect_dir=on"])
def test_what_is_read_is_what_is_merged(tmp_path: Path, options: str) -> None:
    alone = everything = 0
    for seed in range(SEEDS):
        work = tmp_path / f"{seed}"
        (work / "mount").mkdir(parents=True)
        found = layers(work, random.Random(seed), options)
        with overlay.mounted(found, work / "mount", Programs()) as stack:
            (stack.top / "a").mkdir()
            (stack.top / "a" / "added").write_text("x")
            root = stack.merge()
            written = []
            for where in ([], stack.layers):
                place = work / "a.tar"
                with place.open("wb") as out:
                    hot = HotList.of(["b/a", "c"])
                    folder_tar.write(
                        out, root, hot, lambda _: None, split=False, devices=True, layers=where
                    )
                written.append(place.read_bytes())
            assert written[0] == written[1], f"seed {seed}"
            folders = LayerFolders(stack.layers)
            for folder, _, files in os.walk(root):
                everything += len(files)
                if folders.alone(os.fsencode(folder)[len(os.fsencode(root)) + 1 :]) is not None:
                    alone += len(files)
    assert everything > 200 and 0.1 * everything < alone < everything
