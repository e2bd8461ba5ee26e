"""The messages for a failed build, a parameter set by hand, and a small machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sqshforge import engine, lock, recipe
from sqshforge.build import build
from sqshforge.engine.daemon import Daemon
from sqshforge.errors import WorkError
from sqshforge.host import resources
from sqshforge.host.programs import Programs
from sqshforge.lock import Lock, LockedImage
from sqshforge.lock.model import LockedPython
from tests.support import docker_api
from tests.support.command_line import sqshforge
from tests.support.web_servers import small_recipe

PATCH = "triton-2.2.0/cache-private.patch"


def refusal(root: Path, tmp_path: Path) -> str:
    """What the real patch program prints when our patch does not fit the file."""
    place = tmp_path / "python/triton/runtime"
    place.mkdir(parents=True)
    (place / "cache.py").write_text("import os\n" * 200)
    argv = ["patch", "--directory", str(tmp_path), "--strip", "1", "--forward"]
    done = subprocess.run(
        [*argv, "--input", str(root / "patches" / PATCH)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    return f"buildah failed with exit code 1:\n{done.stdout}"


@pytest.mark.processes
def test_a_patch_that_does_not_apply_is_reported_by_hunk_file_and_commit(
    root: Path, tmp_path: Path
) -> None:
    locked = lock.read("cuda-mamba", root / "recipes")
    commit = "a" * 40
    sources = tuple(
        one.model_copy(update={"commit": commit}) if one.name == "triton" else one
        for one in locked.sources
    )
    locked = locked.model_copy(update={"sources": sources})
    error = build.explained(WorkError(refusal(root, tmp_path)), locked)
    assert f"the patch {PATCH} does not apply to triton at commit {commit}" in error.what
    assert "python/triton/runtime/cache.py: hunk 1 (line 1), hunk 2 (line " in error.what
    assert error.where == f"patches/{PATCH}"
    assert error.exit_code == 1


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        (
            "    E: Unable to locate package libgomp2\n    subprocess exited with status 100",
            "recipes/cpu-mamba.yaml: the base's archives have no libgomp2",
        ),
        (
            "E: Package 'python-is-gone' has no installation candidate",
            "recipes/cpu-mamba.yaml: the base's archives have no python-is-gone",
        ),
        (
            "    /bin/sh: 1: python3.12: not found\n    subprocess exited with status 127",
            "recipes/cpu-mamba.yaml: the image has no python3.12",
        ),
        ("/bin/bash: line 1: python3.9: command not found", "the image has no python3.9"),
    ],
)
def test_a_debian_package_or_a_python_that_the_base_lacks_is_reported_with_what_to_change(
    root: Path, said: str, fix: str
) -> None:
    locked = lock.load(recipe.find("cpu-mamba", root / "recipes"), root / "recipes")
    error = build.explained(WorkError(said, where="buildah"), locked)
    assert fix in error.fix
    assert (error.what, error.where) == (said, "buildah")


@pytest.mark.parametrize(
    ("settings", "kept"),
    [({"region": "eu-west-1"}, True), ({"account": "123456789012"}, True), ({"tag": "x"}, False)],
)
def test_another_region_keeps_the_digest_and_another_tag_does_not(
    root: Path, settings: dict[str, str], kept: bool
) -> None:
    what = recipe.find("smp-llama", root / "recipes")
    locked = lock.load(what, root / "recipes")
    digest = "sha256:" + "1" * 64
    pinned = locked.model_copy(
        update={"base": locked.base.model_copy(update={"digest": digest}), "unlocked": ()}
    )
    now = lock.set_by_hand(pinned, what, recipe.find("smp-llama", root / "recipes", settings))
    assert (now.base.digest == digest) == kept
    assert (now.unlocked == ()) == kept


def test_only_the_image_whose_tag_was_set_by_hand_is_not_locked(tmp_path: Path) -> None:
    facts = {
        "base": {"image": "127.0.0.1:1/x:{tag}", "compiler": "127.0.0.1:1/x:{devel}"},
        "parameters": {"tag": "1", "devel": "2"},
    }
    what = small_recipe(tmp_path, ["app==1.0"], **facts)
    base, compiler = (
        LockedImage(image=f"127.0.0.1:1/x:{tag}", digest=f"sha256:{tag * 64}") for tag in "12"
    )
    silent = "compiler image 127.0.0.1:1/x:2: no registry answered"
    python = LockedPython.model_construct(version="3.10")
    locked = Lock.model_construct(base=base, compiler=compiler, python=python)

    def by_hand(locked: Lock, **settings: str) -> Lock:
        return lock.set_by_hand(locked, what, recipe.find("small", tmp_path, settings))

    now = by_hand(locked, devel="9")
    assert (now.base, now.compiler) == (base, LockedImage(image="127.0.0.1:1/x:9", digest=None))
    assert now.unlocked == ("compiler image 127.0.0.1:1/x:9: its tag was set by hand",)
    now = by_hand(locked.model_copy(update={"unlocked": (silent,)}), tag="9")
    assert (now.base, now.compiler) == (LockedImage(image="127.0.0.1:1/x:9", digest=None), compiler)
    assert now.unlocked == ("base image 127.0.0.1:1/x:9: its tag was set by hand", silent)


def test_another_python_takes_the_locked_packages_and_says_so(root: Path) -> None:
    recipes = root / "recipes"
    what = recipe.find("smp-llama", recipes)
    other = recipe.find("smp-llama", recipes, {"python": "3.11"})
    locked = lock.load(what, recipes)
    now = lock.set_by_hand(locked, what, other)
    assert now.python.version == "3.11"
    assert now.python.packages == locked.python.packages
    entry = "Python packages: they were resolved for Python 3.10, not 3.11"
    assert now.unlocked == (*locked.unlocked, entry)


@pytest.mark.processes
def test_another_tag_python_and_torch_are_rendered_where_they_count(
    root: Path, tmp_path: Path
) -> None:
    other = {"tag": "2.4.1-gpu-py311-cu121", "python": "3.11", "torch": "2.4.1"}
    settings = [word for name, value in other.items() for word in ("--set", f"{name}={value}")]
    done = sqshforge("render", "smp-llama", "-o", tmp_path / "context", *settings)
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1].endswith(
        "TARGET=smp-llama 'SET=tag=2.4.1-gpu-py311-cu121 python=3.11 torch=2.4.1'"
    )
    text = (tmp_path / "context" / "Dockerfile").read_text()
    assert "smdistributed-modelparallel:2.4.1-gpu-py311-cu121\n" in text
    assert "python3.11 /run/wheels/pip-" in text
    assert 'PYTORCH_VERSION="2.4.1"' in text
    assert "3.10" not in text
    hadolint = Path(sys.executable).parent / "hadolint"
    checked = Programs().attempt([hadolint, tmp_path / "context" / "Dockerfile"])
    assert (checked.code, checked.out) == (0, "")
    shown = yaml.safe_load((tmp_path / "context" / "meta" / "recipe.yaml").read_text())
    assert shown["python"]["version"] == "3.11"
    assert shown["smoke"]["train"]["dataset"] == "text:/opt/conda/lib/python3.11/**/*.py"
    assert {**shown["parameters"], **other} == shown["parameters"]


@pytest.mark.processes
def test_a_python_that_is_none_is_refused(tmp_path: Path) -> None:
    done = sqshforge("render", "smp-llama", "-o", tmp_path, "--set", "python=py311")
    assert done.code == 2
    assert "python.version (line 18): is 'py311'; must match" in done.err


@pytest.mark.processes
def test_a_parameter_that_a_recipe_does_not_have_is_refused() -> None:
    done = sqshforge("build", "smp-llama", "--set", "zone=a")
    assert done.code == 2
    assert "no parameter zone; parameters: account, python, region, tag, torch" in done.err
    done = sqshforge("build", "smp-llama", "--set", "region")
    assert (done.code, "'region' is not NAME=VALUE" in done.err) == (2, True)


@pytest.mark.processes
def test_compile_jobs_are_asked_for_or_follow_from_the_machine(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For buildah they follow from this job's limits, for docker from the daemon's machine."""
    what = recipe.find("cuda-mamba", root / "recipes")
    buildah = engine.choose("buildah", Programs())
    assert build.jobs(recipe.find("cpu-mamba", root / "recipes"), buildah) == {}
    monkeypatch.setenv("MAX_JOBS", "7")
    assert build.jobs(what, buildah) == {"MAX_JOBS": "7"}
    monkeypatch.delenv("MAX_JOBS")
    architectures = min(4, len(what.cuda.architectures)) if what.cuda else 0
    monkeypatch.setattr(resources, "processors", lambda: 64)
    monkeypatch.setattr(resources, "memory", lambda: 3 * architectures * build.JOB)
    assert build.jobs(what, buildah) == {"MAX_JOBS": "3"}
    facts = {"NCPU": 5, "MemTotal": 99 * architectures * build.JOB, "DockerRootDir": "/none"}
    with docker_api.answering({"/info": json.dumps(facts).encode()}):
        docker = engine.choose("docker", Programs())
        assert build.jobs(what, docker) == {"MAX_JOBS": "5"}
        assert docker.storage() == Path("/none")
        monkeypatch.setattr(Daemon, "is_here", False)
        assert docker.storage() is None
