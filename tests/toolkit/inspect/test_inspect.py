"""`sqshforge inspect`: what a squash file says about itself, whoever packed it."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from sqshforge.host.programs import Programs
from tests.support.archives import (
    Image,
    Member,
    file,
    folder,
    layer,
    link,
    sha256,
    symlink,
    write,
)
from tests.support.command_line import SCRIPT, sqshforge

pytestmark = pytest.mark.processes

CHANCE = random.Random(1)
MODULE = CHANCE.randbytes(3_000_000)  # incompressible content
SITE = "usr/lib/python3/site-packages"
STATUS = b"""\
Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9
Description: two
 Version: 1 of its lines

Package: gone
Status: deinstall ok config-files
Version: 1.0

Package: held
Status: hold ok not-installed

Package: half
Status: install reinstreq half-installed
Version: 2.0

Package: zlib1g
Status: install ok installed
Architecture: amd64
Version: 1:1.2.13

Package: zlib1g
Status: install ok installed
Architecture: i386
Version: 1:1.2.12
"""
PROVENANCE = {"target": "cpu-mamba", "builder": "docker", "unlocked": ["a host's own apt"]}
MEMBERS: list[Member] = [
    folder(SITE),
    *(folder(f"{SITE}/{name}") for name in ("torch", "torch-2.13.0.dist-info", "old.egg-info")),
    file(f"{SITE}/torch/big.so", MODULE),
    file(f"{SITE}/torch/again.so", MODULE),
    link(f"{SITE}/torch/other.so", f"{SITE}/torch/big.so"),
    file(f"{SITE}/torch-2.13.0.dist-info/METADATA", b"Name: torch\n"),
    file(
        f"{SITE}/torch-2.13.0.dist-info/RECORD",
        b"torch/big.so,sha256=x,3000000\r\n../../../bin/torchrun,,\r\ntorch/no.py,,\r\n",
    ),
    file("usr/bin/torchrun", CHANCE.randbytes(50_000)),
    file(f"{SITE}/six-1.16.0.egg-info", b"Name: six\n"),
    file(f"{SITE}/six.py", CHANCE.randbytes(20_000)),
    folder("var/lib/dpkg"),
    file("var/lib/dpkg/status", STATUS),
    file("sqshforge/launch/mamba_fsdp.sbatch", b"#!/bin/sh\n"),
    file("sqshforge/meta/provenance.json", json.dumps(PROVENANCE).encode()),
    file(b"odd-\xff\n".decode(errors="surrogateescape"), CHANCE.randbytes(10_000)),
    symlink("lib", "usr/lib"),
]


def configured(value: dict[str, Any]) -> dict[str, Any]:
    value["config"] = {
        "Env": ["PATH=/bin", "GREETING=a = b"],
        "Entrypoint": ["/bin/say", "two words"],
        "Cmd": ["--loud"],
    }
    return value


IMAGE = Image([layer(*MEMBERS)], config=configured)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("inspect")
    output = place / "a.sqsh"
    done = sqshforge("pack", write(IMAGE, "oci", place / "oci"), "-o", output)
    assert done.code == 0, done.err
    return output


def test_what_people_see(packed: Path) -> None:
    done = sqshforge("inspect", packed, env={"COLUMNS": "200"})
    assert done.code == 0, done.err
    for shown in (
        f"oci:{packed.parent}/oci",
        sha256(IMAGE.config_bytes()),
        sha256(IMAGE.layers[0]),
        "/bin/say 'two words'",
        "GREETING=a = b",
        "mamba_fsdp",
        "cpu-mamba, by docker",
        "a host's own apt",
        "zstd, blocks of 1048576 B",
        f"/{SITE}/torch/",
        r"/odd-\xff\n",
    ):
        assert shown in done.out
    assert done.out.splitlines()[-1].endswith(f"sqshforge verify {packed}")
    assert "\xff" not in done.out


def test_where_the_hot_files_lie(packed: Path, tmp_path: Path) -> None:
    listed, output, picture = tmp_path / "hot.txt", tmp_path / "b.sqsh", tmp_path / "b.svg"
    listed.write_text(f"# read by a start\n{SITE}/torch/other.so\n")
    source = f"oci:{packed.parent}/oci"
    done = sqshforge("pack", source, "-o", output, "--hot", listed, "--no-cache")
    assert done.code == 0, done.err
    shown = sqshforge("inspect", output, "--plot", picture)
    assert " MB from byte " in shown.out
    hot = json.loads(sqshforge("inspect", output, "--json").out)["hot"]
    assert 2_000_000 < hot["length"] < 3_200_000 and hot["offset"] < 200
    assert "read by a start" in picture.read_text()
    copied = tmp_path / "alone" / "c.sqsh"  # without its record
    copied.parent.mkdir()
    copied.write_bytes(output.read_bytes())
    assert json.loads(sqshforge("inspect", copied, "--json").out)["hot"] == hot
    verified = sqshforge("verify", output)
    assert verified.code == 0, verified.out


def test_a_file_without_a_list_says_so(packed: Path) -> None:
    assert json.loads(sqshforge("inspect", packed, "--json").out)["hot"] is None
    assert "packed without a list" in sqshforge("inspect", packed).out


def test_what_programs_get(packed: Path) -> None:
    facts = json.loads(sqshforge("inspect", packed, "--json").out)
    assert facts["size"] == packed.stat().st_size
    assert facts["record"] == json.loads(Path(f"{packed}.json").read_text())
    assert facts["provenance"] == PROVENANCE
    assert facts["environment"] == {"PATH": "/bin", "GREETING": "a = b"}
    assert facts["launchers"] == ["mamba_fsdp"]
    assert facts["start"] == ["/bin/say 'two words' \"$@\"", "/bin/say 'two words' --loud"]
    assert facts["debian"] == {
        "libc6": "2.36-9",
        "zlib1g:amd64": "1:1.2.13",
        "zlib1g:i386": "1:1.2.12",
    }
    assert facts["largest"][0]["path"] in (f"{SITE}/torch/again.so", f"{SITE}/torch/big.so")
    assert any(one["path"] == "odd-\udcff\n" for one in facts["largest"])


def test_bytes_count_once(packed: Path) -> None:
    """A file with two names counts once; one with another's content takes no space."""
    facts = json.loads(sqshforge("inspect", packed, "--json").out)
    folders = {one["path"]: one for one in facts["folders"]}
    assert 3_050_000 < folders["usr"]["stored"] < 3_100_000
    assert 6_050_000 < folders["usr"]["unpacked"] < 6_100_000
    assert sum(one["stored"] for one in folders.values()) < facts["size"]
    parts = sum(one["stored"] for one in facts["parts"])
    assert parts == sum(one["stored"] for one in folders.values())
    python = {one["name"]: one for one in facts["python"]}
    assert python["torch"]["version"] == "2.13.0"
    assert python["torch"]["folder"] == SITE
    assert python["torch"]["unpacked"] == pytest.approx(3_050_000, rel=0.001)
    assert python["six"]["unpacked"] == pytest.approx(20_000, rel=0.001)
    assert "old" not in python


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_picture(packed: Path, tmp_path: Path, ending: str, start: bytes) -> None:
    picture = tmp_path / f"where.{ending}"
    done = sqshforge("inspect", packed, "--plot", picture)
    assert done.code == 0, done.err
    assert f"{picture}: drawn" in done.out
    assert picture.read_bytes().startswith(start)
    if ending == "svg":
        assert "torch 2.13.0" in picture.read_text()


def test_no_picture_of_another_kind(packed: Path, tmp_path: Path) -> None:
    done = sqshforge("inspect", packed, "--plot", tmp_path / "where.bmp")
    assert done.code == 2
    assert ".png, .svg, .pdf" in done.err
    assert list(tmp_path.iterdir()) == []


def test_no_picture_where_no_folder_is(packed: Path, tmp_path: Path) -> None:
    done = sqshforge("inspect", packed, "--plot", tmp_path / "none/where.png")
    assert done.code == 2
    assert f"{tmp_path}/none" in done.err
    assert "Traceback" not in done.err


def test_a_picture_without_matplotlib(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError\n")
    done = sqshforge(
        "inspect", packed, "--plot", tmp_path / "where.png", env={"PYTHONPATH": str(tmp_path)}
    )
    assert done.code == 3
    assert "pip install 'sqshforge[plot]'" in done.err


def test_a_file_that_others_packed(tmp_path: Path) -> None:
    """Enroot packs such files: lzo, its own /etc/rc, and nothing beside the file."""
    tree, output = tmp_path / "tree", tmp_path / "theirs.sqsh"
    (tree / "etc").mkdir(parents=True)
    (tree / "etc/environment").write_text("A=1\nno variable\nB=2\n")
    (tree / "etc/rc").write_text(
        'cd "/work" || exit 1\nif [ -s /etc/rc.local ]; then\n    . /etc/rc.local\nfi\n\n'
        "if [ $# -gt 0 ]; then\n    exec /bin/say $@\nelse\n    exec /bin/say 'hello'\nfi\n"
    )
    Programs().capture(["mksquashfs", tree, output, "-comp", "lzo", "-noD", "-quiet"])
    done = sqshforge("inspect", output)
    assert done.code == 0, done.err
    assert "none: there is no theirs.sqsh.json of ours" in done.out
    assert "/bin/say 'hello'  (without)" in done.out
    facts = json.loads(sqshforge("inspect", output, "--json").out)
    assert facts["environment"] == {"A": "1", "B": "2"}
    assert facts["record"] is facts["provenance"] is None
    assert facts["launchers"] == facts["python"] == []


@pytest.mark.parametrize(
    "content", [b"[]", b"{", b"\xff", b'{"key": 1, "size": 2, "image": {"env": 5}, "settings": 5}']
)
def test_a_record_that_is_none(packed: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.sqsh").hardlink_to(packed)
    (tmp_path / "a.sqsh.json").write_bytes(content)
    done = sqshforge("inspect", tmp_path / "a.sqsh")
    assert done.code == 0, done.err
    assert "GREETING=a = b" in done.out


def test_no_squash_file(tmp_path: Path) -> None:
    done = sqshforge("inspect", tmp_path / "none.sqsh")
    assert (done.code, done.out) == (2, "")
    assert "no such squash file" in done.err
    done = sqshforge("inspect", sys.executable)
    assert (done.code, done.out) == (2, "")
    assert "not a squash file" in done.err


HOSTILE: dict[str, bytes] = {
    f"{SITE}/a-1.0.dist-info/RECORD": b"torch/a.py,,\n" + b"x" * 200_000 + b"\n\0,,\n",
    f"{SITE}/b-1.0.dist-info/RECORD": b'"' * 300_001,
    f"{SITE}/c-1.0.dist-info/top_level.txt": b"\0\xff " * 1000,
    "etc/environment": b"A=1\0B=2\n\xff=\xff\n",
    "etc/rc": b"\n" * 1_000_000,
    "var/lib/dpkg/status": b"\0\n" * 100_000 + b"Package: x\nVersion: \x1b[31m\n" + b"\n" * 100_000,
    "sqshforge/meta/provenance.json": b'{"unlocked": 5, "target": [[1]], "builder": {}}',
}


@pytest.mark.parametrize("provenance", [b"[" * 100_000, b'{"a":' * 900 + b"1" + b"}" * 900, b""])
def test_files_in_it_that_are_not_what_they_should_be(provenance: bytes, tmp_path: Path) -> None:
    tree, output = tmp_path / "tree", tmp_path / "x.sqsh"
    for path, content in HOSTILE.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(content)
    for name in "abc":
        (tree / f"{SITE}/{name}-1.0.dist-info/METADATA").touch()
    if provenance:
        (tree / "sqshforge/meta/provenance.json").write_bytes(provenance)
    Programs().capture(["mksquashfs", tree, output, "-quiet"])
    for words in (("inspect", output), ("inspect", output, "--json"), ("diff", output, output)):
        done = Programs().attempt([SCRIPT, *words], timeout=60)
        assert done.code == 0, done.err
        assert all(line.isprintable() for line in done.out.split("\n"))
