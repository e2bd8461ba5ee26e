"""Rendering: the Dockerfile equals the golden one, is clean under hadolint, and quotes safely."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from sqshforge import lock, recipe
from sqshforge.build import dockerfile
from sqshforge.build.context import Context
from sqshforge.errors import RequestError
from sqshforge.host.programs import Programs
from sqshforge.lock.model import LockedIndex
from sqshforge.run import zipapp
from tests.support.engines import CLIENT
from tests.support.engines import docker_fixture as docker_fixture
from tests.support.engines import docker_host_fixture as docker_host_fixture

TARGETS = [
    "composer-mamba",
    "cpu-mamba",
    "cuda-mamba",
    "cuda-mamba-ubuntu",
    "cuda13-mamba",
    "llama-fsdp",
    "neuron-mamba2",
    "neuron29-mamba2",
    "smp-llama",
]
# Includes those for Arm, as named by `Recipe.name`.
NAMES = [*TARGETS, "cpu-mamba.arm64", "cuda13-mamba.arm64"]


def loaded(root: Path, name: str) -> tuple[recipe.Recipe, lock.Lock]:
    target, _, architecture = name.partition(".")
    platform = f"linux/{architecture or 'amd64'}"
    what = recipe.find(target, root / "recipes", platform=platform)
    return what, lock.load(what, root / "recipes")


@pytest.mark.parametrize("name", NAMES)
def test_dockerfile_is_the_golden_one(root: Path, name: str) -> None:
    golden = root / "tests" / "golden" / f"{name}.Dockerfile"
    what, locked = loaded(root, name)
    assert dockerfile.dockerfile(what, locked, root / "images") == golden.read_text(), (
        f"the Dockerfile changed; look at the difference, then: sqshforge render {what.target} "
        f"--platform {what.platform.name} -o DIR && cp DIR/Dockerfile {golden}"
    )


def test_every_target_has_a_golden_dockerfile(root: Path) -> None:
    recipes = root / "recipes"
    assert recipe.targets(recipes) == TARGETS
    every = {
        recipe.find(target, recipes, platform=platform).name
        for target in TARGETS
        for platform in recipe.platforms_of(target, recipes)
    }
    assert every == set(NAMES)


@pytest.mark.processes
@pytest.mark.parametrize("name", NAMES)
def test_hadolint_finds_nothing(root: Path, name: str) -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = Programs().attempt([hadolint, root / "tests" / "golden" / f"{name}.Dockerfile"])
    assert (done.code, done.out) == (0, "")


@pytest.mark.parametrize("name", NAMES)
def test_it_opens_with_its_stage_graph(root: Path, name: str) -> None:
    text = dockerfile.dockerfile(*loaded(root, name), root / "images")
    opening = text[: text.index("\nARG ")]
    assert "# Stages:" in opening
    stages = [line.split()[-1] for line in text.splitlines() if line.startswith("FROM")]
    assert all(stage in opening for stage in stages)


def test_the_base_is_named_by_digest_where_the_lock_has_one(root: Path) -> None:
    what, locked = loaded(root, "cpu-mamba")
    digest = "sha256:" + "0" * 64
    pinned = locked.model_copy(update={"base": lock.LockedImage(image="debian:x", digest=digest)})
    assert f"ARG BASE=debian:x@{digest}\n" in dockerfile.dockerfile(what, pinned, root / "images")


def test_values_are_quoted_so_that_nothing_in_them_is_expanded() -> None:
    assert dockerfile.dockerfile_quote('a "b" $HOME \\') == '"a \\"b\\" \\$HOME \\\\"'


def test_a_template_that_is_not_there_or_broken_is_reported(root: Path, tmp_path: Path) -> None:
    what, locked = loaded(root, "cpu-mamba")
    with pytest.raises(RequestError, match="does not exist"):
        dockerfile.dockerfile(what, locked, tmp_path)
    (tmp_path / "cpu-mamba.Dockerfile.j2").write_text("FROM x\n{{ recipe.nothing }}\n")
    with pytest.raises(RequestError, match="nothing"):
        dockerfile.dockerfile(what, locked, tmp_path)
    (tmp_path / "cpu-mamba.Dockerfile.j2").write_text("FROM x\n{% if %}\n")
    with pytest.raises(RequestError) as caught:
        dockerfile.dockerfile(what, locked, tmp_path)
    assert caught.value.where.endswith("line 2")


def extending(
    root: Path, tmp_path: Path, parent: str, keys: str
) -> tuple[recipe.Recipe, lock.Lock]:
    """Return a recipe that adds keys to a target's, and a lock with what they pin."""
    folder = tmp_path / "recipes"
    shutil.copytree(root / "recipes", folder)
    text = f"target: mine\nextends: {parent}\nplatforms: null\nper_platform: null\n"
    (folder / "mine.yaml").write_text(text + keys)
    what = recipe.find("mine", folder)
    bound = [
        LockedIndex(name=name, url=one.url, packages=())
        for name, one in what.python.indexes.items()
    ]
    locked = loaded(root, parent)[1]
    python = locked.python.model_copy(update={"bound": tuple(bound)})
    return what, locked.model_copy(update={"target": "mine", "python": python})


@pytest.mark.parametrize(
    ("parent", "keys", "named"),
    [
        ("cpu-mamba", "apt_build: [gcc]\n", "apt_build"),
        ("cpu-mamba", "python: {builders: [cmake==3.31.6]}\n", "python.builders"),
        ("cpu-mamba", "triton: {version: 3.0.0, from: wheel}\n", "triton"),
        ("cpu-mamba", "sources: {x: {git: https://a/x, ref: v1}}\n", "sources.x"),
        ("cpu-mamba", "archives: {x: {url: https://a/x.deb}}\n", "archives.x"),
        (
            "cpu-mamba",
            "apt_sources: {x: {url: https://a/x, suite: jammy, key: y, packages: [foo]}}\n"
            "archives: {y: {url: https://a/y.pub}}\n",
            "apt_sources.x, archives.y",
        ),
    ],
)
def test_what_the_template_would_leave_out_is_reported(
    root: Path, tmp_path: Path, parent: str, keys: str, named: str
) -> None:
    what, locked = extending(root, tmp_path, parent, keys)
    with pytest.raises(RequestError) as caught:
        dockerfile.dockerfile(what, locked, root / "images")
    assert caught.value.what.endswith(f"what the recipe has: {named}")
    assert f"{parent}.Dockerfile.j2" in caught.value.where
    assert "docs/images/targets.md" in caught.value.fix


@pytest.mark.parametrize("parent", TARGETS)
def test_debian_packages_that_an_extending_recipe_names_are_installed(
    root: Path, tmp_path: Path, parent: str
) -> None:
    what, locked = extending(root, tmp_path, parent, "apt: [htop]\n")
    assert "        htop \\\n" in dockerfile.dockerfile(what, locked, root / "images")


@pytest.mark.parametrize("parent", ["cpu-mamba", "cuda-mamba", "cuda13-mamba"])
def test_packages_of_an_index_that_an_extending_recipe_names_are_installed(
    root: Path, tmp_path: Path, parent: str
) -> None:
    keys = "python: {indexes: {own: {url: https://a/simple, packages: [rich==14.2.0]}}}\n"
    text = dockerfile.dockerfile(*extending(root, tmp_path, parent, keys), root / "images")
    assert "--requirement /run/requirements/own.txt" in text


def test_the_context_carries_training_launchers_and_meta(root: Path) -> None:
    context = dockerfile.context(*loaded(root, "cpu-mamba"), root, {"commit": "abc"})
    for name in (
        "payload/training/__init__.py",
        "payload/launch/mamba_fsdp.sbatch",
        "inside/sbom.py",
    ):
        assert name in context.files
    assert context.files["payload/launch/sqshforge-run.pyz"] == zipapp.runtime()
    for name in ("recipe.yaml", "lock.json"):
        assert f"meta/{name}" in context.files
    provenance = json.loads(context.loose["payload/meta/provenance.json"])
    assert provenance["commit"] == "abc"
    assert {"training/__init__.py", "launch/mamba_fsdp.sbatch"} <= provenance["inputs"].keys()
    assert not [name for name in context.files if "__pycache__" in name]


def test_its_digest_follows_the_content_and_nothing_else(root: Path, tmp_path: Path) -> None:
    context = dockerfile.context(*loaded(root, "cpu-mamba"), root, {})
    changed = Context(files={**context.files, "payload/training/new.py": b""})
    again = dockerfile.context(*loaded(root, "cpu-mamba"), root, {"commit": "of another build"})
    assert context.digest() == again.digest()
    assert context.digest() != changed.digest()


def test_written_twice_it_is_the_same_to_the_time_and_nothing_old_stays(tmp_path: Path) -> None:
    folder = tmp_path / "context"
    Context(files={"a/b": b"1", "old": b"x"}).write(folder)
    wheel = tmp_path / "x.whl"
    wheel.write_bytes(b"wheel")
    Context(files={"a/b": b"1"}, large={"wheels/x.whl": wheel}).write(folder)
    assert not (folder / "old").exists()
    assert (folder / "wheels" / "x.whl").read_bytes() == b"wheel"
    state = (folder / "a" / "b").stat()
    Context(files={"a/b": b"1"}).write(folder)
    assert (folder / "a" / "b").stat().st_mtime_ns == state.st_mtime_ns
    assert state.st_mode & 0o777 == 0o644


@pytest.mark.parametrize("target", TARGETS)
def test_the_driver_is_brought_in_where_it_is_wanted(root: Path, target: str) -> None:
    """Check what enroot's hook 98-nvidia.sh and nvidia-container-toolkit read.

    If NVIDIA_VISIBLE_DEVICES is missing or `void`, they do nothing; by default they bring
    nvidia-smi but no libcuda.
    """
    what, locked = loaded(root, target)
    last = dockerfile.dockerfile(what, locked, root / "images").rpartition("\nFROM ")[2]
    found = dict(re.findall(r"\b(NVIDIA_\w+)=(\S+)", last))
    if what.accelerator == "cuda":
        assert found["NVIDIA_VISIBLE_DEVICES"] == "all"
        assert {"compute", "utility"} <= set(found["NVIDIA_DRIVER_CAPABILITIES"].split(","))
    else:
        assert found == {}


@pytest.mark.parametrize("target", TARGETS)
def test_the_licenses_of_all_sources_are_in_the_image(root: Path, target: str) -> None:
    """No label gives the whole image one license, as OCI's key for it would."""
    what, locked = loaded(root, target)
    text = dockerfile.dockerfile(what, locked, root / "images")
    assert "image.licenses" not in text
    assert ("COPY --from=licenses /licenses/ /usr/share/doc/" in text) == bool(what.sources)
    _, _, stage = text.partition(" AS licenses\n")
    for name, source in what.sources.items():
        assert f"/run/sources/{name}.tar" in stage.partition("\nFROM ")[0]
        assert source.license, f"{name} has no license in the recipe"
    assert "payload/LICENSE" in dockerfile.context(what, locked, root, {}).files


@pytest.mark.parametrize("target", TARGETS)
def test_the_network_is_off_wherever_something_is_compiled(root: Path, target: str) -> None:
    text = dockerfile.dockerfile(*loaded(root, target), root / "images")
    for stage in re.findall(r"^FROM compiler AS .*?(?=^FROM )", text, re.MULTILINE | re.DOTALL):
        before, off, after = stage.partition("GIT_ALLOW_PROTOCOL=file")
        compiling = r"\bmake |setup\.py bdist|\./configure|\./autogen"
        assert off and not re.search(compiling, before), stage
        assert re.search(compiling, after), stage


@pytest.mark.parametrize("target", TARGETS)
def test_every_file_that_a_step_is_given_has_its_sum(root: Path, target: str) -> None:
    """Otherwise buildah would not see that the step changed. For wheels, pip has the checksums."""
    text = dockerfile.dockerfile(*loaded(root, target), root / "images")
    for step in re.findall(r"^RUN .*?(?=^[A-Z#])", text, re.MULTILINE | re.DOTALL):
        given = set(re.findall(r"/run/(?!secrets|wheels|built|apt)\w+/[\w./-]+\w", step))
        summed = set(re.findall(r"sha256sum <(\S+)\)", step))
        assert given <= summed, step


@pytest.mark.processes
def test_an_edit_that_keeps_the_length_reaches_the_image(docker: str, tmp_path: Path) -> None:
    """BuildKit sends a file again only if its size or its time has changed."""
    for content in (b"lr = 1\n", b"lr = 2\n"):
        files = {"Dockerfile": b"FROM scratch\nCOPY training/ /training/\n", "training/x": content}
        Context(files=files).write(tmp_path / "context")
        argv: list[str | Path] = [CLIENT, "build", "--network", "host", "--tag", "edited"]
        Programs().capture([*argv, tmp_path / "context"], env={"DOCKER_BUILDKIT": "1"})
        Programs().capture([CLIENT, "create", "--name", "edited", "edited", "x"])
        Programs().capture([CLIENT, "cp", "edited:/training/x", tmp_path / "x"])
        Programs().capture([CLIENT, "rm", "edited"])
        assert (tmp_path / "x").read_bytes() == content


@pytest.mark.processes
def test_by_command_line(root: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "sqshforge", "render", "cpu-mamba", "-o"]
    done = Programs().attempt([*argv, tmp_path / "out"])
    assert done.code == 0
    golden = (root / "tests" / "golden" / "cpu-mamba.Dockerfile").read_text()
    assert (tmp_path / "out" / "Dockerfile").read_text() == golden
    assert done.out.splitlines()[-1].startswith("next: make image")
    again = Programs().attempt([*argv, tmp_path / "out"])
    assert again.code == 2
    assert "not empty" in again.err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
