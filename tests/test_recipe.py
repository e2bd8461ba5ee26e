"""Recipes: what is right loads, and every fault of what is wrong is told at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from sqshforge import recipe
from sqshforge.errors import RequestError

GOOD = """\
target: {name}
title: a test
accelerator: cpu
base:
  image: debian:bookworm-slim
python:
  version: "3.11"
  installer: pip==25.3
  packages: [numpy==2.3.4]
disk_gb: 1
"""


def write(folder: Path, text: str, name: str = "test") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(text.format(name=name))
    return path


def faults(path: Path) -> str:
    with pytest.raises(RequestError) as caught:
        recipe.load(path)
    assert str(path) in caught.value.where
    return caught.value.what


def test_every_recipe_of_the_project_loads(root: Path) -> None:
    names = recipe.targets(root / "recipes")
    assert "cpu-mamba" in names
    for name in names:
        assert recipe.find(name, root / "recipes").target == name


def test_schema_file_is_the_one_of_the_code(root: Path) -> None:
    assert (root / "recipes" / "schema.json").read_text() == recipe.schema()


def test_all_faults_come_at_once_with_path_line_and_what_is_allowed(tmp_path: Path) -> None:
    text = GOOD.replace("accelerator: cpu", "accelerator: gpu\ntitel: typo").replace(
        "[numpy==2.3.4]", "[numpy>=2, torch==2, torch==3]"
    )
    what = faults(write(tmp_path, text))
    assert "3 faults" in what
    assert "accelerator (line 3): is 'gpu'; allowed: 'cpu', 'cuda' or 'neuron'" in what
    assert "titel (line 4): unknown key; did you mean title? allowed: accelerator, apt" in what
    assert "python.packages[0] (line 10): is 'numpy>=2'; must match" in what


def test_unknown_keys_deep_inside_are_faults_too(tmp_path: Path) -> None:
    what = faults(write(tmp_path, GOOD.replace('"3.11"', '"3.11"\n  verzion: 3')))
    assert "python.verzion (line 8): unknown key; did you mean version?" in what
    assert "allowed: installer, packages, version" in what


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("python:\n", "python: &a\n  b: [\n"), "not valid YAML"),
        (('version: "3.11"', "version: 3.11"), "python.version (line 7): is 3.11"),
        (("disk_gb: 1", ""), "disk_gb: is missing"),
        (("title: a test", "title: a test\ntitle: again"), "title (line 3): stands twice"),
        (("[numpy==2.3.4]", "[Numpy==1, numpy==2]"), "named twice: numpy"),
        (("target: {name}", "target: other"), "target: is 'other', and the file's name says"),
        (
            ("slim\n", "slim\n  bootstrap: {{suite: sid, snapshot: 20250101T000000Z}}\n"),
            "snapshot and mirror go together",
        ),
    ],
)
def test_each_kind_of_fault(tmp_path: Path, change: tuple[str, str], told: str) -> None:
    error = None
    try:
        recipe.load(write(tmp_path, GOOD.replace(*change)))
    except RequestError as raised:
        error = raised
    assert error is not None
    assert error.exit_code == 2
    assert told in error.what


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just words\n"])
def test_a_file_without_keys_is_told_so(tmp_path: Path, text: str) -> None:
    assert "a recipe is a mapping" in faults(write(tmp_path, text))


def test_a_binary_file_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "test.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "not a text file" in faults(path)


def test_an_unknown_target_gets_the_nearest_name(root: Path) -> None:
    with pytest.raises(RequestError) as caught:
        recipe.find("cpu-mambo", root / "recipes")
    assert caught.value.mend == "did you mean cpu-mamba?"
