"""cpu-mamba built for real, by buildah and by docker, each with its own storage."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sqshforge import engine as engines_of
from sqshforge.build import build as building
from sqshforge.engine import Engine
from sqshforge.host.programs import Programs
from sqshforge.image import address
from sqshforge.network import access
from tests.support import checkouts, engines
from tests.support.engines import BOTH, CLIENT
from tests.support.engines import docker_host_fixture as docker_host_fixture
from tests.support.engines import storage_fixture as storage_fixture

pytestmark = pytest.mark.processes

PROGRAMS = Programs()
EPOCH = "1700000000"  # 2023-11-14 22:13:20 UTC
UNCHECKED = "01000000"  # the flags of byte code that is never compared with its source (PEP 552)


@dataclass(frozen=True)
class Case:
    """An image that one engine built from a copy of the checkout, with marked machine settings."""

    engine: Engine
    root: Path
    mark: str
    built: building.Built
    executed: list[str]

    def run(self, code: str) -> str:
        """Return what Python code prints in a container of the image."""
        words = ["python3.11", "-c", code]
        if self.engine.name == "docker":
            start = ["run", "--rm", "--network", "host", self.built.name]
            return PROGRAMS.capture([CLIENT, *start, *words])
        return engines.printed(self.built.name, *words)


@pytest.fixture(scope="module", params=BOTH)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    mark = f"mark-{uuid.uuid4().hex}.invalid"
    folder = tmp_path_factory.mktemp(request.param)
    request.getfixturevalue("storage")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "docker":
            patch.setenv("DOCKER_HOST", request.getfixturevalue("docker_host"))
        leave_marks(patch, folder, mark)
        root = checkouts.copy(folder / "checkout")
        if request.param == "buildah":
            patch.setenv("SOURCE_DATE_EPOCH", EPOCH)
            (root / "build/bases").unlink()  # made by other builds on this machine
        engine = engines_of.choose(request.param, PROGRAMS)
        reporter = checkouts.Listening()
        built = checkouts.build(engine, root, reporter)
        yield Case(engine, root, mark, built, reporter.executed())


def leave_marks(patch: pytest.MonkeyPatch, folder: Path, mark: str) -> None:
    """Change settings of this machine so that they work as before, but carry a mark."""
    bundle = access.ca_bundle(access.pip(PROGRAMS))
    marked = folder / "ca.crt"
    marked.write_bytes((bundle.read_bytes() if bundle else b"") + f"# {mark}\n".encode())
    for name in (*access.CA_VARIABLES, "PIP_CERT"):
        patch.setenv(name, str(marked))
    lines = ["[global]"]
    for line in PROGRAMS.capture([sys.executable, "-m", "pip", "config", "list"]).splitlines():
        key, _, value = line.partition("=")
        if key.startswith("global.") and key not in ("global.cert", "global.trusted-host"):
            lines.append(
                f"{key.removeprefix('global.')} = " + " ".join(ast.literal_eval(value).split())
            )
    (folder / "pip.conf").write_text("\n".join([*lines, f"trusted-host = {mark}"]) + "\n")
    patch.setenv("PIP_CONFIG_FILE", str(folder / "pip.conf"))
    hosts = [value for value in (os.environ.get("no_proxy"), mark) if value]
    patch.setenv("no_proxy", ",".join(hosts))


@pytest.mark.timeout(2400)
@pytest.mark.long
@pytest.mark.parametrize("case", ["buildah"], indirect=True)
def test_made_from_nothing_elsewhere_it_is_the_same(case: Case, tmp_path: Path) -> None:
    """Another place and storage give the same layers and the same file."""
    here, elsewhere = tmp_path / "here.sqsh", tmp_path / "elsewhere.sqsh"
    sqshforge(case.root, "pack", checkouts.TARGET, "-o", here, "--profile", "fast")
    root = checkouts.copy(tmp_path / "checkout")
    (root / "build/bases").unlink()
    (tmp_path / "engine").mkdir()
    with engines.storage(tmp_path / "engine"):
        sqshforge(root, "build", checkouts.TARGET)
        sqshforge(root, "pack", checkouts.TARGET, "-o", elsewhere, "--profile", "fast")
    seen = [json.loads(sqshforge(root, "inspect", one, "--json")) for one in (here, elsewhere)]
    layers = [one["record"]["image"]["layers"] for one in seen]
    assert layers[0] == layers[1] and len(layers[0]) > 1
    assert here.read_bytes() == elsewhere.read_bytes()


def sqshforge(root: Path, *words: str | Path) -> str:
    """Return the output of a checkout's command, with buildah and its own cache."""
    environment = {"SQSHFORGE_CACHE": str(root / "cache"), "ENGINE": "buildah"}
    done = subprocess.run(
        [sys.executable, "-m", "sqshforge", *words],
        cwd=root,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python_is_there_by_both_names(case: Case) -> None:
    asked = "import os, shutil; print(*(os.path.realpath(shutil.which(n)) for n in N))"
    found = case.run(f"N = ('python', 'python3'); {asked}").split()
    assert found == ["/usr/bin/python3.11", "/usr/bin/python3.11"]


def test_the_image_carries_what_it_should(case: Case) -> None:
    assert not case.built.up_to_date
    found = case.run(
        "from pathlib import Path\n"
        "for path in sorted(Path('/sqshforge').rglob('*')): print(path.relative_to('/sqshforge'))"
    ).split()
    assert {"training/trainer/trainer.py", "launch/mamba_fsdp.sbatch", "meta/recipe.yaml"} <= set(
        found
    )
    assert {f"meta/{n}.json" for n in ("lock", "provenance", "sbom.spdx")} <= set(found)
    ours = {
        str(path.relative_to(case.root))
        for path in (case.root / "training").rglob("*")
        if path.is_file()
    }
    assert {name for name in found if name.startswith("training/") and "." in name} >= {
        name for name in ours if "." in name
    }


def test_torch_and_the_training_code_are_imported(case: Case) -> None:
    code = "import training.trainer.trainer, torch as t; print(t.__version__, t.ones(3).sum())"
    assert case.run(code) == "2.13.0+cpu tensor(3.)\n"


def test_the_image_says_what_it_is(case: Case) -> None:
    config = address.parse(case.built.source, PROGRAMS).config()
    labels = dict(config.labels)
    assert labels["io.sqshforge.target"] == "cpu-mamba"
    assert labels["org.opencontainers.image.title"] == "sqshforge cpu-mamba"
    assert "PYTHONPATH=/sqshforge" in config.env
    assert config.workdir == "/sqshforge"
    assert case.built.image.size > 5e8
    storage = case.engine.storage()
    assert storage is not None and storage.is_dir()


@pytest.mark.root
def test_nothing_of_this_machine_stays_in_the_image(case: Case) -> None:
    known = "root:x:0:0:"  # proves that the content is searched
    words = ["grep", "-a", "-o", "-h", "-F", "--devices=skip", "-e", known, "-e", case.mark]
    with address.parse(case.built.source, PROGRAMS).open() as content:
        assert isinstance(content, address.Folder)
        for folder in content.stack:
            assert list(folder.glob("run/secrets/*")) == []
        words += ["-r", *map(str, content.stack)]
        looked = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (set(looked.stdout.split()), looked.stderr) == ({known}, "")
    if case.engine.name == "docker":
        shown = PROGRAMS.capture([CLIENT, "image", "inspect", case.built.name])
        shown += PROGRAMS.capture([CLIENT, "history", "--no-trunc", case.built.name])
    else:
        shown = PROGRAMS.capture(["buildah", "inspect", "--type", "image", case.built.name])
    assert "io.sqshforge.target" in shown
    assert case.mark not in shown


def test_the_secrets_are_gone(case: Case) -> None:
    assert {path.name for path in (case.root / "build" / "cpu-mamba").iterdir()} == {"context"}


def test_the_settings_of_this_machine_reached_the_build(case: Case) -> None:
    """Otherwise the test above would prove nothing."""
    assert case.mark in access.pip(PROGRAMS).remote()
    assert access.proxies()["no_proxy"].endswith(case.mark)
    bundle = access.ca_bundle(access.pip(PROGRAMS))
    assert bundle is not None and case.mark in bundle.read_text()


def test_what_did_not_change_is_not_built(case: Case) -> None:
    reporter = checkouts.Listening()
    again = checkouts.build(case.engine, case.root, reporter)
    assert again.up_to_date and reporter.heard == []
    assert again.image.id == case.built.image.id


def test_all_of_our_code_has_its_byte_code(case: Case) -> None:
    """Python does not compare it with the source, so no process of a job compiles it anew."""
    code = (
        "import json, marshal\n"
        "from importlib.util import cache_from_source\n"
        "from pathlib import Path\n"
        "def header_and_name(made):\n"
        "    data = made.read_bytes()\n"
        "    return data[4:8].hex(), marshal.loads(data[16:]).co_filename\n"
        "files = map(str, Path('/sqshforge').rglob('*.py'))\n"
        "print(json.dumps({f: header_and_name(Path(cache_from_source(f))) for f in files}))\n"
    )
    found = json.loads(case.run(code))
    assert "/sqshforge/training/trainer/trainer.py" in found
    assert found == {name: [UNCHECKED, name] for name in found}


def test_packages_have_byte_code_but_for_their_tests(case: Case) -> None:
    """The byte code of tests, which no job imports, would be a third of all."""
    code = (
        "import json\n"
        "from pathlib import Path\n"
        "from sysconfig import get_path\n"
        "made = [str(f.parent) for f in Path(get_path('purelib')).rglob('*.pyc')]\n"
        "print(json.dumps(sorted(set(made))))\n"
    )
    folders = [folder.partition("/dist-packages/")[2] for folder in json.loads(case.run(code))]
    assert {"numpy/__pycache__", "torch/nn/modules/__pycache__"} <= set(folders)
    assert [folder for folder in folders if "/tests/" in folder] == []


def test_an_edit_of_training_runs_only_its_own_steps_again(case: Case) -> None:
    assert any(one.startswith("RUN ") for one in case.executed)
    (case.root / "training" / "edited.py").write_text(f"EDIT = '{uuid.uuid4().hex}'\n")
    reporter = checkouts.Listening()
    again = checkouts.build(case.engine, case.root, reporter)
    assert not again.up_to_date
    bring, copy, compiling = sorted(reporter.executed())  # docker runs stages in parallel
    assert (bring, copy) == ("COPY --from=code /code/ /sqshforge/", "COPY payload/ /code/")
    assert compiling.startswith("RUN PYTHONHASHSEED=0 python3.11 -B -m compileall "), compiling
    expected = (case.root / "training" / "edited.py").read_text()
    assert case.run("print(open('/sqshforge/training/edited.py').read(), end='')") == expected
    assert case.run("from training.edited import EDIT; print(f'EDIT = {EDIT!r}')") == expected


def test_after_an_edit_or_a_commit_all_else_comes_from_the_cache(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It uses the edit loop as users do: `sqshforge pack TARGET` builds and packs."""
    monkeypatch.setenv("SQSHFORGE_CACHE", str(tmp_path / "cache"))
    for name, value in (("AUTHOR", "me"), ("COMMITTER", "me")):
        monkeypatch.setenv(f"GIT_{name}_NAME", value)
        monkeypatch.setenv(f"GIT_{name}_EMAIL", f"{value}@example.org")
    git = ["git", "-C", str(case.root)]
    PROGRAMS.capture([*git, "init", "--quiet"])

    def packed(text: str, *, commit: bool) -> str:
        (case.root / "training" / "edited.py").write_text(text)
        if commit:
            PROGRAMS.capture([*git, "add", "training"])
            PROGRAMS.capture([*git, "commit", "--quiet", "--message", "an edit"])
        argv = [sys.executable, "-m", "sqshforge", "pack", "cpu-mamba"]
        argv += ["--engine", case.engine.name, "-o", str(tmp_path / "a.sqsh")]
        return PROGRAMS.attempt(argv, cwd=case.root).err

    first = packed("", commit=True)
    assert "comes from the cache" not in first
    for text, commit in (("EDIT = 1\n", False), ("EDIT = 2\n", True)):
        said = packed(text, commit=commit)
        assert "all but /sqshforge comes from the cache of bases" in said, said
        shown = PROGRAMS.capture(
            ["unsquashfs", "-cat", tmp_path / "a.sqsh", "sqshforge/training/edited.py"]
        )
        assert shown == text


def test_the_build_record_is_in_the_image(case: Case) -> None:
    shown = json.loads(case.run("print(open('/sqshforge/meta/provenance.json').read())"))
    assert shown["target"] == "cpu-mamba"
    assert "requirements/packages.txt" in shown["inputs"]
