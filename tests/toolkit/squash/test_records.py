"""FILE.sqsh.json is untrusted data: whatever it contains, a command has one clear answer."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sqshforge.errors import SqshforgeError
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter
from sqshforge.inspect import inspect as inspection
from sqshforge.inspect import signature
from sqshforge.inspect import verify as verdict
from sqshforge.squash import request, stage
from tests.support import squash_files
from tests.support.archives import Image, file, layer, write
from tests.support.command_line import SCRIPT, sqshforge

SECONDS = 60  # for one command on a slow machine: these records used to make it hang
IMAGE = Image([layer(file("a", b"content" * 1000))])


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("records")
    done = sqshforge("pack", write(IMAGE, "oci", place / "oci"), "-o", place / "a.sqsh")
    assert done.code == 0, done.err
    return place / "a.sqsh"


def changed(**facts: Any) -> Callable[[dict[str, Any]], object]:
    return lambda record: record.update(facts)


def image(**facts: Any) -> Callable[[dict[str, Any]], object]:
    return lambda record: record["image"].update(facts)


DEEP: list[Any] = []
for _ in range(400):
    DEEP = [DEEP]
RECORDS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a key that is a list": changed(key=["sha256:0"]),
    "a key that is a number": changed(key=7),
    "a key that is long": changed(key="sha256:" + "0" * 5000),
    "a key that leads up": changed(key="sha256:../../x"),
    "a size that is text": changed(size="7"),
    "a size that is an object": changed(size={}),
    "a digest that is a list": changed(digest=[]),
    "a digest that is an object": changed(digest={"a": 1}),
    "settings that are a list": changed(settings=[1]),
    "settings nested deep": changed(settings={"a": DEEP}),
    "a base that is an object": changed(base={}),
    "an image that is text": changed(image="x"),
    "layers that are numbers": image(layers=[1, 2]),
    "layers that are a number": image(layers=7),
    "layers that are a text": image(layers="sha256:0"),
    "layers that are objects": image(layers=[{}]),
    "an entrypoint of numbers": image(entrypoint=[1]),
    "an entrypoint that is a text": image(entrypoint="/bin/sh"),
    "an entrypoint with a NUL": image(entrypoint=["a\0b"]),
    "a command that is an object": image(cmd={"a": 1}),
    "env that is null": image(env=None),
    "half a character": image(env=["A=\ud800"]),
    "a working folder that is a list": image(workdir=[]),
    "labels that are no pairs": image(labels=[["a"], ["b", "c", "d"]]),
    "labels of numbers": image(labels=[[1, 2]]),
    "volumes of numbers": image(volumes=[1]),
    "a time that is text": image(created="now"),
    "a time without end": image(created=10**400),
    "a reference that is a number": image(reference=5),
}


def commands(path: Path, disk: Path) -> None:
    """Run every command that reads the record: no traceback, an end, and one of our exit codes."""
    for words in (
        ("inspect", path),
        ("inspect", path, "--json"),
        ("verify", path),
        ("stage", path, disk),
        ("pack", f"oci:{path.parent}/oci", "-o", path),
    ):
        done = Programs().attempt([SCRIPT, *words], timeout=SECONDS)
        assert "Traceback" not in done.err, done.err
        assert done.code in (0, 1, 2), (words, done.code, done.err)


@pytest.fixture
def copied(packed: Path, tmp_path: Path) -> Path:
    shutil.copytree(packed.parent, tmp_path / "place", copy_function=shutil.copy)
    return tmp_path / "place" / "a.sqsh"


@pytest.mark.processes
@pytest.mark.parametrize("name", RECORDS)
def test_values_of_other_types(name: str, copied: Path, tmp_path: Path) -> None:
    record = request.record_path(copied)
    facts = json.loads(record.read_text())
    RECORDS[name](facts)
    record.write_text(json.dumps(facts))
    commands(copied, tmp_path / "disk")


@pytest.mark.processes
@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 100_000, b'{"key": "k", "size": NaN}', b"\xff"],
    ids=["lists", "objects", "a number", "no number", "no UTF-8"],
)
def test_what_is_no_record(content: bytes, copied: Path, tmp_path: Path) -> None:
    request.record_path(copied).write_bytes(content)
    commands(copied, tmp_path / "disk")


@pytest.mark.processes
@pytest.mark.parametrize("beside", ["json", "sig", "smoke.json"])
def test_a_fifo_beside_a_file(beside: str, copied: Path, tmp_path: Path) -> None:
    place = copied.with_name(f"{copied.name}.{beside}")
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    commands(copied, tmp_path / "disk")


@pytest.mark.processes
def test_a_fifo_or_a_text_in_place_of_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.sqsh")
    (tmp_path / "text.md").write_text("# No squash file\n")
    for path in (tmp_path / "fifo.sqsh", tmp_path / "text.md"):
        shown = set()
        for words in (
            ("inspect", path),
            ("verify", path),
            ("diff", path, path),
            ("stage", path, tmp_path),
            ("run", path, "--", "true"),
            ("smoke-test", path),
        ):
            done = Programs().attempt([SCRIPT, *words], timeout=SECONDS)
            assert done.code == 2, (words, done.err)
            shown.add(done.err[done.err.index("error:") :])
        assert len(shown) == 1
        assert "the file is not a squash file" in shown.pop()


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=5), below),
    max_leaves=5,
)
WHOLE = {
    "format": 8,
    "key": f"sha256:{'0' * 64}",
    "image": {
        **{"reference": "oci:x", "digest": "sha256:0", "created": 5, "base_created": None},
        **{"size": 7, "layers": ["sha256:1"], "env": ["A=b"], "entrypoint": ["/bin/sh"]},
        **{"cmd": ["-c"], "workdir": "/", "volumes": ["/data"], "labels": [["a", "b"]]},
    },
    "settings": {"level": 3, "block": "1M", "xattrs": False, "tool": "mksquashfs 4.5"},
    "base": None,
    "size": 0,
    "mtime_ns": 1,
    "ctime_ns": 1,
    "digest": "sha256-16MiB:0",
}


@st.composite
def records(draw: st.DrawFn) -> bytes:
    """Draw a record of ours with a few other values, or with other bytes."""
    facts = json.loads(json.dumps(WHOLE))
    for _ in range(draw(st.integers(1, 3))):
        part = draw(st.sampled_from([facts, facts["image"], facts["settings"]]))
        if not isinstance(part, dict):
            break
        name = draw(st.sampled_from(sorted(part)) | st.text(max_size=5)) if part else "a"
        if draw(st.booleans()):
            part[name] = draw(ANY)
        else:
            part.pop(name, None)
        if not all(isinstance(facts.get(one), dict) for one in ("image", "settings")):
            break
    data = bytearray(json.dumps(facts).encode())
    if draw(st.booleans()):
        at = draw(st.integers(0, len(data) - 1))
        data[at : at + draw(st.integers(0, 5))] = draw(st.binary(max_size=5))
    return bytes(data)


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(data=records())
def test_any_record_has_one_clear_answer(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "a.sqsh"
        path.write_bytes(squash_files.chain(b"a", 2, [b"b"]))
        # With valid sizes, the rest of the record matters.
        size = str(path.stat().st_size).encode()
        request.record_path(path).write_bytes(data.replace(b'"size": 0', b'"size": ' + size))
        quiet = Reporter(quiet=True)
        for ask in (
            lambda: inspection.inspect(path).lines(),
            lambda: inspection.inspect(path).json(),
            lambda: verdict.verify(path, None, 1, Programs(), quiet).table(),
            lambda: stage.Identity.of(path),
            lambda: stage.stage(path, Path(place) / "disk", 1 << 30, quiet),
            lambda: signature.statement(path, "sha256:0").text(),
        ):
            try:
                ask()
            except SqshforgeError as error:
                assert all(line.isprintable() for line in error.lines())
