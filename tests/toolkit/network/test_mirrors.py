"""Mirrors: where they are set, which one is used, and every fault reported with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from sqshforge.errors import RequestError
from sqshforge.network import mirrors
from tests.support.command_line import sqshforge

EXAMPLE = """\
images:
  hub.example.test/: registry.example.test/docker/
indexes:
  https://neuron.example.test: https://pypi.example.test/neuron
sources:
  https://github.com/: https://git.example.test/github/
  https://github.com/NVIDIA/: file:///srv/nvidia/
"""
NCCL = "https://github.com/NVIDIA/nccl"


def written(folder: Path, text: str | bytes, name: str = "mirrors.yaml") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def fault(folder: Path, environment: dict[str, str] | None = None) -> RequestError:
    """Return the one clear error that reading ends with."""
    with pytest.raises(RequestError) as caught:
        mirrors.read_mirrors(folder, environment or {})
    assert caught.value.exit_code == 2
    assert len(caught.value.what.splitlines()) == 1
    return caught.value


def test_without_mirrors_every_address_is_what_it_was(tmp_path: Path) -> None:
    found = mirrors.read_mirrors(tmp_path, {})
    assert found.image("debian:bookworm-slim") == "debian:bookworm-slim"
    assert found.index("https://neuron.example.test") == ("https://neuron.example.test")
    assert found.source(NCCL) == NCCL


@pytest.mark.parametrize("text", ["", "# none yet\n", "sources: {}\n", "sources:\n"])
def test_an_empty_file_is_none_at_all(text: str, tmp_path: Path) -> None:
    written(tmp_path, text)
    assert mirrors.read_mirrors(tmp_path, {}).source(NCCL) == NCCL


def test_the_file_of_the_checkout_counts(tmp_path: Path) -> None:
    written(tmp_path, EXAMPLE)
    found = mirrors.read_mirrors(tmp_path, {})
    assert (
        found.image("hub.example.test/nvidia/cuda:12")
        == "registry.example.test/docker/nvidia/cuda:12"
    )
    assert found.index("https://neuron.example.test/") == ("https://pypi.example.test/neuron/")
    assert found.source("https://github.com/a/b") == "https://git.example.test/github/a/b"


def test_the_longest_beginning_counts_and_only_beginnings_do(tmp_path: Path) -> None:
    written(tmp_path, EXAMPLE)
    found = mirrors.read_mirrors(tmp_path, {})
    assert found.source(NCCL) == "file:///srv/nvidia/nccl"
    assert found.source(f"https://other.test/?{NCCL}") == f"https://other.test/?{NCCL}"


def test_each_kind_has_its_own_mirrors(tmp_path: Path) -> None:
    written(tmp_path, EXAMPLE)
    found = mirrors.read_mirrors(tmp_path, {})
    assert found.image(NCCL) == found.index(NCCL) == NCCL


def test_a_file_that_is_named_counts_in_place_of_the_checkouts(tmp_path: Path) -> None:
    written(tmp_path, EXAMPLE)
    other = written(tmp_path, "sources: {'https://github.com/': 'file:///other/'}\n", "other.yaml")
    found = mirrors.read_mirrors(tmp_path, {"SQSHFORGE_MIRRORS": str(other)})
    assert found.source(NCCL) == "file:///other/NVIDIA/nccl"


def test_the_environment_wins_and_leaves_the_rest_of_the_file(tmp_path: Path) -> None:
    written(tmp_path, EXAMPLE)
    pairs = f"https://github.com/NVIDIA/=https://nv.test/?a=b&c= {NCCL}-tests=file:///tests"
    found = mirrors.read_mirrors(tmp_path, {"SQSHFORGE_MIRRORS_SOURCES": pairs})
    assert found.source(NCCL) == "https://nv.test/?a=b&c=nccl"
    assert found.source(f"{NCCL}-tests") == "file:///tests"
    assert found.source("https://github.com/a/b") == "https://git.example.test/github/a/b"
    assert found.image("hub.example.test/x") == "registry.example.test/docker/x"


@pytest.mark.parametrize("kind", ["images", "indexes", "sources"])
def test_the_environment_is_enough(kind: str, tmp_path: Path) -> None:
    variable = f"SQSHFORGE_MIRRORS_{kind.upper()}"
    found = mirrors.read_mirrors(tmp_path, {variable: "https://a.test/=https://b.test/"})
    assert getattr(found, kind) == {"https://a.test/": "https://b.test/"}
    assert mirrors.read_mirrors(tmp_path, {variable: ""}) == mirrors.Mirrors()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("images: {}\nsources: {\n", "line 3"),
        (b"\xff\xfe", "can't decode byte 0xff"),
        ("\0", "special characters are not allowed"),
        ("- a\n", "it is no mapping of images, indexes and sources"),
        ("just words\n", "it is no mapping of images, indexes and sources"),
        ("source: {}\n", "source: Extra inputs are not permitted"),
        ("sources: [a]\n", "sources: Input should be a valid dictionary"),
        ("sources: {a: b}\nsources: {c: d}\n", "sources (line 2) stands twice"),
        ("images:\n  a: b\n  a: c\n", "images.a (line 3) stands twice"),
        ("a: 2024-02-30\n", "day is out of range for month"),
        ("sources: {a: 1}\n", "sources.a: Input should be a valid string"),
        ("sources: {a:}\n", "sources.a: Input should be a valid string"),
    ],
)
def test_a_broken_file_is_reported_with_its_place(
    text: str | bytes, says: str, tmp_path: Path
) -> None:
    path = written(tmp_path, text)
    for environment in ({}, {"SQSHFORGE_MIRRORS_SOURCES": "b=c"}):
        error = fault(tmp_path, environment)
        assert "the mirrors cannot be read: " in error.what
        assert says in f"{error.what} {error.where}"
        assert error.where.startswith(str(path))
        assert "docs/images/offline.md" in error.fix


def test_a_file_that_is_named_and_not_there_is_reported_with_the_variable(tmp_path: Path) -> None:
    written(tmp_path, EXAMPLE)
    error = fault(tmp_path, {"SQSHFORGE_MIRRORS": f"{tmp_path}/not"})
    assert "the mirrors file does not exist" in error.what
    assert error.where == f"SQSHFORGE_MIRRORS={tmp_path}/not"


def test_a_file_that_may_not_be_read_is_reported(tmp_path: Path) -> None:
    (tmp_path / "mirrors.yaml").mkdir()
    assert fault(tmp_path).where == str(tmp_path / "mirrors.yaml")


@pytest.mark.parametrize("pairs", ["https://a.test/", "=b", "a=", "a=b c", "a=b =c"])
def test_malformed_pairs_are_reported_with_their_variable(pairs: str, tmp_path: Path) -> None:
    error = fault(tmp_path, {"SQSHFORGE_MIRRORS_IMAGES": pairs})
    assert error.what == f"SQSHFORGE_MIRRORS_IMAGES is {pairs!r}"
    assert "OLD=NEW" in error.fix


@pytest.mark.processes
def test_the_command_line_ends_with_code_2(tmp_path: Path) -> None:
    done = sqshforge("lock", "cpu-mamba", "--check", env={"SQSHFORGE_MIRRORS": str(tmp_path / "x")})
    assert done.code == 2
    assert done.err.startswith("error: the mirrors file does not exist\n")


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://user:s%40cret@a.test:1/x?y=1", "https://a.test:1/x?y=1"),
        ("https://a.test/x@1", "https://a.test/x@1"),
        ("ssh://git@a.test/x", "ssh://a.test/x"),
        ("file:///srv/x", "file:///srv/x"),
    ],
)
def test_a_password_is_not_shown(address: str, shown: str) -> None:
    assert mirrors.bare(address) == shown
