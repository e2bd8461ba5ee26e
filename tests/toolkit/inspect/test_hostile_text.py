"""What an image says about itself is shown as text on the terminal: on one line, and shortened."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.archives import Image, file, folder, layer, write
from tests.support.command_line import sqshforge

pytestmark = pytest.mark.processes

EVIL = "\x1b[31m\nerror: nothing is right\r\x9b2J\u202e"
MARKUP = "[/]"  # rich would end a style here that was never started
LONGEST_LINE = 2500
SITE = "usr/lib/python3/site-packages"


def configured(value: dict[str, Any]) -> dict[str, Any]:
    value["config"] = {
        "Env": [f"LONG={'x' * 100_000}", f"EVIL{EVIL}=1"],
        "Entrypoint": ["/bin/say", EVIL],
        "Labels": {f"org.title{EVIL}": EVIL},
    }
    return value


IMAGE = Image(
    [
        layer(
            folder(SITE),
            folder(f"{SITE}/bad{MARKUP}-1.0.dist-info"),
            file(f"{SITE}/bad{MARKUP}-1.0.dist-info/METADATA", os.urandom(5000)),
            file(f"etc/{EVIL.replace('/', '_')}", os.urandom(50_000)),
            file(f"{EVIL.replace('/', '_')}", os.urandom(50_000)),
        )
    ],
    config=configured,
)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("evil")
    done = sqshforge("pack", write(IMAGE, "oci", place / "oci"), "-o", place / "a.sqsh")
    assert done.code == 0, done.err
    assert "EVIL" in done.err and "left out" in done.err
    harmless(done.out + done.err)
    return place / "a.sqsh"


def harmless(printed: str) -> None:
    for line in printed.split("\n"):
        assert line.isprintable(), ascii(line)[:200]
        assert not line.startswith("error: nothing")
        assert len(line) < LONGEST_LINE


def test_inspect_diff_verify(packed: Path, tmp_path: Path) -> None:
    other = tmp_path / "b.sqsh"
    image = write(Image([layer(file("a"))]), "oci", tmp_path / "oci")
    assert sqshforge("pack", image, "-o", other).code == 0
    for words in (("inspect", packed), ("diff", other, packed), ("verify", packed)):
        done = sqshforge(*words)
        assert done.code == 0, done.err
        harmless(done.out + done.err)
    assert f"bad{MARKUP}" in sqshforge("inspect", packed).out
    assert r"\x1b[31m\nerror: nothing is right\r\x9b2J\u202e" in sqshforge("inspect", packed).out


def test_what_programs_read_is_exact(packed: Path) -> None:
    facts = json.loads(sqshforge("inspect", packed, "--json").out)
    assert len(facts["environment"]["LONG"]) == 100_000
    assert any(one["path"] == EVIL for one in facts["largest"])
    assert facts["record"]["image"]["labels"] == [[f"org.title{EVIL}", EVIL]]


def test_a_record_and_a_provenance_say_anything(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "a.sqsh").hardlink_to(packed)
    facts = json.loads(Path(f"{packed}.json").read_text())
    facts["key"] = EVIL + "k" * 200_000
    facts["image"]["reference"] = EVIL + "r" * 200_000
    (tmp_path / "a.sqsh.json").write_text(json.dumps(facts))
    for words in (("inspect", tmp_path / "a.sqsh"), ("verify", tmp_path / "a.sqsh")):
        done = sqshforge(*words)
        harmless(done.out + done.err)
        assert "Traceback" not in done.err
    facts["digest"] = f"../{EVIL}" + "d" * 200_000
    (tmp_path / "a.sqsh.json").write_text(json.dumps(facts))
    done = sqshforge("stage", tmp_path / "a.sqsh", tmp_path / "disk")
    assert done.code == 1
    assert "error: the file does not match the record beside it\n" in done.err
    assert not list(tmp_path.glob("disk/*/*"))
    harmless(done.err)


def test_tags_and_names_in_errors(tmp_path: Path) -> None:
    """One archive has very many tags, and one has a tag that fakes another error."""

    def tagged(index: Any) -> Any:
        one = index["manifests"][0]
        tags = [EVIL, *(f"tag-{number}" * 4 for number in range(10_000))]
        index["manifests"] = [
            {**one, "annotations": {"org.opencontainers.image.ref.name": tag}} for tag in tags
        ]
        return index

    image = write(Image([layer(file("a"))], index=tagged), "oci", tmp_path / "oci")
    for tag in (":none", f":none{EVIL}"):
        done = sqshforge("pack", f"{image}{tag}", "-o", tmp_path / "a.sqsh")
        assert done.code == 2
        harmless(done.err)
        assert len(done.err) < 3 * LONGEST_LINE
