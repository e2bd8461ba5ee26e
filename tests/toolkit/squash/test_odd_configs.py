"""Configs that no squash file can hold unchanged, and what `sqshforge pack` says about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sqshforge.host.programs import Programs, Result
from tests.support.archives import Image, file, layer, write
from tests.support.command_line import sqshforge

pytestmark = pytest.mark.processes

LAST = 2**32 - 1  # seconds, the latest that a squash file can hold


def pack(place: Path, created: str = "1970-01-01T00:00:10Z", **config: Any) -> Result:
    def change(value: dict[str, Any]) -> dict[str, Any]:
        return {**value, "config": config, "created": created}

    image = write(Image([layer(file("a"))], config=change), "oci", place / "oci")
    return sqshforge("pack", image, "-o", place / "a.sqsh")


def held(place: Path, path: str) -> str:
    return Programs().capture(["unsquashfs", "-cat", place / "a.sqsh", path])


@pytest.mark.parametrize("letter", [*"\t\n\r\x0b\x1b\x85\u2028"])
def test_a_volume_with_a_control_character_is_refused(letter: str, tmp_path: Path) -> None:
    volume = f"/cr{letter}/x{letter}/host{letter}none{letter}bind,rw"
    done = pack(tmp_path, Volumes={volume: {}})
    assert done.code == 1
    what, where, fix = done.err.splitlines()
    assert "refused" in what and "volume" in what and "control character" in what
    assert str(tmp_path) in where and fix.startswith("  fix:")
    assert not (tmp_path / "a.sqsh").exists()


def test_a_variable_with_a_control_character_is_left_out_and_reported(tmp_path: Path) -> None:
    done = pack(tmp_path, Env=["A=one\rB=x", "C=\x1b[31m", "D=1\nE=2", "F=a\tb"])
    assert done.code == 0, done.err
    for name in "ACD":
        assert f"the variable {name} is left out: it has a control character" in done.err
    assert held(tmp_path, "etc/environment") == "F=a\tb\n"
    assert sqshforge("verify", tmp_path / "a.sqsh").code == 0


@pytest.mark.parametrize(
    "config",
    [
        {"Env": ["A=\0"]},
        {"Entrypoint": ["\0"]},
        {"Cmd": ["\0"]},
        {"WorkingDir": "/\0"},
        {"Volumes": {"/\0": {}}},
        {"Labels": {"\0": "a"}},
    ],
    ids=lambda one: next(iter(one)),
)
def test_a_nul_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    done = pack(tmp_path, **config)
    assert done.code == 1
    assert len(done.err.splitlines()) <= 3 and done.err.startswith("error: the image")


@pytest.mark.parametrize("created", ["2106-02-07T06:28:16Z", "9999-12-31T23:59:59Z"])
def test_an_image_of_a_later_time_than_a_file_can_hold(created: str, tmp_path: Path) -> None:
    """It gets the latest possible time, like a file in a layer."""
    done = pack(tmp_path, created=created)
    assert done.code == 0, done.err
    facts = json.loads(sqshforge("inspect", tmp_path / "a.sqsh", "--json").out)
    assert facts["made"] == facts["record"]["image"]["created"] == LAST
    assert sqshforge("inspect", tmp_path / "a.sqsh").code == 0
    assert sqshforge("verify", tmp_path / "a.sqsh").code == 0
