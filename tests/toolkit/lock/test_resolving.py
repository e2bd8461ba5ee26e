"""Resolving a lock: what is asked anew, what stays as it was, what cannot be had."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from sqshforge import lock, recipe
from sqshforge.errors import MissingError, RequestError, WorkError
from sqshforge.host.programs import Programs, Result
from sqshforge.lock import Lock
from sqshforge.network import access
from sqshforge.network.mirrors import Mirrors
from tests.support import checkouts
from tests.support.web_servers import Index, Web, asking, small_recipe, wheel
from tests.support.web_servers import direct_fixture as direct_fixture
from tests.support.web_servers import new_index_fixture as new_index_fixture
from tests.support.web_servers import web_fixture as web_fixture

NewIndex = Callable[..., Index]
GIT = "https://git.example.test/tool"
ARCHIVE = "https://files.example.test/data.tar.gz"


class Small(Programs):
    """The real programs, but the test sets the manifest that the registry returns."""

    def __init__(self, manifest: str) -> None:
        self.manifest = manifest
        self.digest = f"sha256:{sha256(manifest.encode()).hexdigest()}"

    def which(self, program: str) -> Path | None:
        return Path("/usr/bin/skopeo") if program == "skopeo" else super().which(program)

    def attempt(
        self,
        argv: Sequence[str | Path],
        *,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float | None = None,
    ) -> Result:
        if str(argv[0]) == "skopeo":
            return Result(tuple(map(str, argv)), 0, self.manifest, "")
        return super().attempt(argv, stdin=stdin, env=env, cwd=cwd, timeout=timeout)


def one_package(root: Path, tmp_path: Path, requirement: str) -> recipe.Recipe:
    text = (root / "recipes" / "cpu-mamba.yaml").read_text()
    head, packages, tail = text.partition("\n  packages:\n")
    rest = tail.partition("\nenv:")[2]
    path = tmp_path / "cpu-mamba.yaml"
    path.write_text(f"{head}{packages}    - {requirement}\nenv:{rest}")
    return recipe.load(path)


@pytest.mark.processes
def test_resolving_asks_the_real_index_and_the_registry(root: Path, tmp_path: Path) -> None:
    programs = Small("a")
    what = one_package(root, tmp_path, "filelock==3.20.0")
    locked = lock.resolve(what, asking(tmp_path, access.pip(programs), programs=programs))
    assert [package.name for package in locked.python.packages] == ["filelock"]
    assert locked.python.packages[0].hashes
    assert locked.python.installer.name == "pip"
    assert locked.base.digest == programs.digest
    assert locked.unlocked == ()


@pytest.mark.processes
def test_a_version_that_is_not_there_is_a_clear_error(root: Path, tmp_path: Path) -> None:
    programs = Programs()
    what = one_package(root, tmp_path, "filelock==999.0.0")
    with pytest.raises(WorkError, match=r"filelock==999\.0\.0") as caught:
        lock.resolve(what, asking(tmp_path, access.pip(programs), programs=programs))
    assert "python.packages" in caught.value.where


@pytest.fixture
def index(new_index: NewIndex) -> Index:
    """An index with a program, its dependency, and the installer of images."""
    return new_index(wheel("app", needs=["tool"]), wheel("tool"), wheel("pip", "25.3"))


def resolved(
    folder: Path,
    index: Index,
    before: Lock | None = None,
    programs: Programs | None = None,
    **parts: Any,
) -> Lock:
    """Return the lock of a small recipe, with the folder's content in place of hosts."""
    mirrors = Mirrors(
        sources={
            "https://git.example.test": folder.as_uri(),
            "https://files.example.test": folder.as_uri(),
        }
    )
    return lock.resolve(
        small_recipe(folder, ["app==1.0"], **parts),
        asking(folder, index.pip, mirrors, before, programs),
    )


def versions(locked: Lock) -> dict[str, str]:
    return {one.name: one.version for one in locked.python.packages}


@pytest.mark.processes
def test_a_version_of_the_earlier_lock_stays_though_a_newer_one_is_there(
    index: Index, tmp_path: Path
) -> None:
    before = resolved(tmp_path, index)
    index.add(wheel("tool", "1.1"))
    assert versions(resolved(tmp_path, index, before)) == {"app": "1.0", "tool": "1.0"}
    assert lock.changes(before, resolved(tmp_path, index, before)) == []
    assert versions(resolved(tmp_path, index)) == {"app": "1.0", "tool": "1.1"}


@pytest.mark.processes
def test_a_cache_that_uv_cannot_write_is_no_fault_of_the_packages(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache" / "uv"))
    with pytest.raises(MissingError, match="uv cannot look for packages") as caught:
        resolved(tmp_path, index)
    assert "cache/uv" in caught.value.what
    assert "UV_CACHE_DIR" in caught.value.fix


@pytest.mark.processes
def test_no_python_is_downloaded_to_lock_for_another(
    index: Index, web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_PYTHON_INSTALL_MIRROR", web.url)
    assert resolved(tmp_path, index).python.version == "3.10"
    assert web.asked == []


@pytest.mark.processes
def test_a_version_that_does_not_fit_any_more_gives_way(index: Index, tmp_path: Path) -> None:
    before = resolved(tmp_path, index)
    index.has = [one for one in index.has if one.project != "tool"]
    index.add(wheel("tool", "1.1"))
    after = resolved(tmp_path, index, before)
    assert versions(after) == {"app": "1.0", "tool": "1.1"}
    assert lock.changes(before, after) == ["tool: 1.0 -> 1.1"]


@pytest.mark.processes
def test_what_changed_is_reported_in_a_few_words(index: Index, tmp_path: Path) -> None:
    before = resolved(tmp_path, index)
    index.add(wheel("more"))
    what = small_recipe(tmp_path, ["more==1.0", "tool==1.0"])
    after = lock.resolve(what, asking(tmp_path, index.pip, before=before))
    assert lock.changes(None, after) == ["there was no lock"]
    assert lock.changes(after, after) == []
    assert lock.changes(before, after) == [
        "inputs changed",
        "app: 1.0 -> none",
        "more: none -> 1.0",
    ]
    other = after.model_copy(update={"unlocked": ("something",)})
    assert lock.changes(after, other) == ["unlocked changed"]


def repository(folder: Path) -> str:
    """Make a repository with a branch and a tag at one commit."""

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.test"]
        return Programs().capture(["git", "-C", folder, *who, *words]).strip()

    folder.mkdir()
    git("init", "--quiet", "--initial-branch", "main")
    git("commit", "--quiet", "--allow-empty", "--message", "one")
    git("tag", "v1")
    return git("rev-parse", "HEAD")


@pytest.mark.processes
def test_a_source_keeps_its_commit_while_its_host_is_silent_and_its_pin_the_same(
    index: Index, tmp_path: Path
) -> None:
    commit = repository(tmp_path / "tool")
    pin = {"git": GIT, "ref": "v1"}
    before = resolved(tmp_path, index, sources={"tool": pin})
    assert [one.commit for one in before.sources] == [commit]
    shutil.rmtree(tmp_path / "tool")
    kept = resolved(tmp_path, index, before, sources={"tool": pin})
    assert lock.changes(before, kept) == []
    dropped = resolved(tmp_path, index, before, sources={"tool": {**pin, "ref": "main"}})
    assert [one.commit for one in dropped.sources] == [None]
    assert f"source tool, {GIT} at main: its host did not answer" in dropped.unlocked


@pytest.mark.processes
def test_an_image_keeps_its_digest_while_its_registry_is_silent_and_its_tag_the_same(
    index: Index, tmp_path: Path
) -> None:
    base = {"image": "127.0.0.1:1/base:1", "compiler": "127.0.0.1:1/base:devel"}
    before = resolved(tmp_path, index, None, Small("a"), base=base)
    assert before.unlocked == ()
    kept = resolved(tmp_path, index, before, base=base)
    assert lock.changes(before, kept) == []
    dropped = resolved(tmp_path, index, before, base={**base, "image": "127.0.0.1:1/base:2"})
    assert dropped.base.digest is None
    assert dropped.compiler == before.compiler
    assert dropped.unlocked == ("base image 127.0.0.1:1/base:2: no registry answered",)


@pytest.mark.processes
def test_a_lock_is_the_same_whatever_mirrors_a_machine_has(index: Index, tmp_path: Path) -> None:
    def locked(mirrors: Mirrors) -> Lock:
        return lock.resolve(
            small_recipe(tmp_path, ["app==1.0"]), asking(tmp_path, index.pip, mirrors)
        )

    assert locked(Mirrors(images={"127.0.0.1:1": "127.0.0.1:2"})) == locked(Mirrors())


def patched(folder: Path, index: Index, text: str | None) -> Lock:
    """Return the lock of a recipe with one patch of this text."""
    if text is not None:
        (folder / "patches" / "tool-1").mkdir(parents=True)
        (folder / "patches" / "tool-1" / "fix.patch").write_text(text)
    sources = {"tool": {"git": GIT, "ref": "v1", "commit": "a" * 40}}
    return resolved(folder, index, sources=sources, patches={"tool": ["tool-1/fix.patch"]})


PATCH = f"Why\n\nAfter: {'b' * 64}\n\n--- a/src/x.c\n+++ b/src/x.c\n@@ -1 +1 @@\n-a\n+b\n"


@pytest.mark.processes
def test_a_patch_is_locked_with_what_it_makes(index: Index, tmp_path: Path) -> None:
    (one,) = patched(tmp_path, index, PATCH).patches
    assert (one.file, one.of, one.path) == ("tool-1/fix.patch", "tool", "src/x.c")
    assert (one.after, len(one.sha256)) == ("b" * 64, 64)


@pytest.mark.processes
def test_a_patch_that_is_not_there_is_reported_with_those_that_are(
    index: Index, tmp_path: Path
) -> None:
    (tmp_path / "patches" / "tool-1").mkdir(parents=True)
    (tmp_path / "patches" / "tool-1" / "other.patch").write_text(PATCH)
    with pytest.raises(RequestError, match=r"patch tool-1/fix\.patch does not exist") as caught:
        patched(tmp_path, index, None)
    assert caught.value.where == "patches of tool"
    assert caught.value.fix == "patches are: tool-1/other.patch"


@pytest.mark.processes
@pytest.mark.parametrize(
    "text",
    [
        "",
        PATCH.replace("After", "Then"),
        PATCH.replace("bbb", "b"),
        PATCH + "--- a/y.c\n+++ b/y.c\n@@ -1 +1 @@\n-a\n+b\n",
    ],
)
def test_a_patch_that_does_not_say_what_it_makes_is_reported(
    text: str, index: Index, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="After: ") as caught:
        patched(tmp_path, index, text)
    assert caught.value.where == str(tmp_path / "patches" / "tool-1" / "fix.patch")


@pytest.mark.processes
def test_check_tells_drift_by_its_exit_code_and_writes_nothing(
    index: Index, tmp_path: Path
) -> None:
    checkout = checkouts.copy(tmp_path / "checkout")
    small_recipe(checkout / "recipes", ["app==1.0"])
    path = lock.path_of("small", checkout / "recipes")
    settings = {"PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": index.url}
    settings |= {"PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}

    def run(*words: str) -> Result:
        argv = [sys.executable, "-m", "sqshforge", "lock", "small", *words]
        return Programs().attempt(argv, cwd=checkout, env=settings)

    missing = run("--check")
    assert (missing.code, path.exists()) == (1, False)
    assert "small: there was no lock" in missing.err
    assert "error: locks have drifted: small" in missing.err
    made = run()
    assert (made.code, made.out.splitlines()[0]) == (0, f"{path}: written")
    assert "resolving small ..." in made.err.splitlines()  # minutes, for the heavy targets
    index.add(wheel("tool", "1.1"))
    same = run("--check")
    assert (same.code, same.out.splitlines()[0]) == (0, f"{path}: up to date")
    written = path.read_text()
    small_recipe(checkout / "recipes", ["app==1.0", "tool==1.1"])
    drifted = run("--check")
    assert (drifted.code, drifted.out.splitlines()[0]) == (1, f"{path}: drifted")
    assert "small: tool: 1.0 -> 1.1" in drifted.err
    assert "-m sqshforge lock small" in drifted.err
    assert path.read_text() == written
    assert run().code == 0
    assert json.loads(path.read_text())["python"]["packages"][1]["version"] == "1.1"
