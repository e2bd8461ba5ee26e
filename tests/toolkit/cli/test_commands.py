"""The command line from outside: exit codes, one clear message, and the next command at the end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sqshforge.cli.squash import pack
from sqshforge.cli.workflow import Steps
from sqshforge.host.programs import Programs
from sqshforge.hot import HotList
from sqshforge.project import Project
from sqshforge.squash import request
from sqshforge.squash.pack import Options
from tests.conftest import ROOT
from tests.support import checkouts, tiny_root
from tests.support.command_line import SCRIPT, sqshforge
from tests.support.ordinary_user import existing
from tests.toolkit.build.test_dockerfile import TARGETS

LISTED = HotList.read(ROOT / "recipes/hot/cpu-mamba.txt").lines
pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("no_docker")]


def test_targets_lists_every_target() -> None:
    done = sqshforge("targets")
    assert done.code == 0
    assert [line.split()[0] for line in done.out.splitlines()] == TARGETS
    assert re.search(r"^cpu-mamba +Mamba pre-training on CPU", done.out, re.MULTILINE)


def test_show_tells_what_is_in_an_image_and_what_is_not_locked() -> None:
    done = sqshforge("show", "cpu-mamba")
    assert done.code == 0
    assert "torch 2.13.0+cpu" in done.out
    compiled = sqshforge("show", "cuda-mamba").out
    assert re.search(r"^ +mamba-ssm \d", compiled, re.MULTILINE), "compiled packages, too"
    vendors = sqshforge("show", "neuron-mamba2").out
    assert re.search(r"^ +torch-neuronx ?", vendors, re.MULTILINE), "and those of a vendor's index"
    assert done.out.splitlines()[-1] == "next: make image TARGET=cpu-mamba"


@pytest.mark.parametrize(
    ("words", "shown", "fix"),
    [
        (["buidl"], "unknown command 'buidl'", "did you mean build?"),
        (["build", "cpu-mambo"], "unknown target 'cpu-mambo'", "did you mean cpu-mamba?"),
        (["lock", "", "--check"], "unknown target ''", "targets are: "),  # an unset variable
        (["outdated", ""], "unknown target ''", "targets are: "),
        (
            ["build", "cpu-mamba", "--engine", "podman"],
            "unknown engine 'podman'",
            "docker, buildah",
        ),
        (["build", "cpu-mamba", "--egnine", "x"], "No such option", "--engine"),
        (["build"], "Missing argument", ""),
        (["pack", "cpu-mamba", "--profile", "small"], "unknown profile 'small'", "fast, shared"),
        (["pack", "ftp://x", "-o", "x.sqsh"], "unknown kind of source", "dockerd://NAME"),
        (["pack", "buildah://x"], "needs an output", "-o FILE.sqsh"),
        (["pack", "buildah://no-such-image", "-o", "/tmp/x.sqsh"], "no image", "buildah images"),
        (["run", "no-such.sqsh", "--", "true"], "cannot be read", "make sqsh"),
        (["run", __file__, "--", "true"], "not a squash file", ".sqsh"),
        (["run", "x.sqsh", "--env", "NAME", "--", "true"], "'NAME' is not NAME=VALUE", "--env"),
        (["run", "x.sqsh", "--mount", "/nowhere:/x", "--", "true"], "does not exist", ""),
        (["smoke-test", "./no-such.sqsh"], "cannot be read", "make sqsh"),
        (
            ["pack", "rootfs:x", "-o", "x.sqsh", "--hot", "x.txt", "--xattrs"],
            "--hot cannot be combined with --xattrs",
            "leave one of the two out",
        ),
        (
            ["pack", "cpu-mamba", "--hot", "x.txt", "--no-hot"],
            "--hot cannot be combined with --no-hot",
            "leave one of the two out",
        ),
        (
            ["smoke-test", "./x.sqsh", "--set", "a=b"],
            "--set a=b is for a target",
            "leave --set out",
        ),
        (["pack", "rootfs:/x", "-o", "x", "--set", "a=b"], "--set a=b is for a target", "target"),
        (["trace", "smp-llama", "--check"], "the list of hot files cannot be read", "writes one"),
        (["render", "cpu-mamba"], "Missing option", "--output"),
        (["stage", "x", "y", "--limit", "lots"], "where: --limit or STAGE_LIMIT", "50G"),
        (["cache", "prune", "--keep", "some"], "where: --keep", "50G"),
        *(
            (["quickstart", "--since", when], "Invalid value for '--since'", "")
            for when in ("inf", "nan", "-inf", "-1")
        ),
        *(
            (
                ["stage", "x", "y", "--all-nodes", *words],
                f"{words[0]} cannot be combined with --all-nodes",
                "leave one of the two out",
            )
            for words in (["--look"], ["--arrived", "x"], ["--digest", "x"])
        ),
    ],
)
def test_a_wrong_request_is_exit_code_2_and_one_clear_message(
    words: list[str], shown: str, fix: str
) -> None:
    done = sqshforge(*words)
    assert done.code == 2, done.err
    assert shown in done.err
    assert fix in done.err
    assert "Traceback" not in done.err
    assert len(done.err.splitlines()) <= 5


@pytest.mark.parametrize(
    ("name", "words"),
    [("SQSHFORGE_CACHE_SIZE", ["cache", "ls"]), ("STAGE_LIMIT", ["stage", "x", "y"])],
)
def test_a_variable_that_is_no_size_is_named(name: str, words: list[str]) -> None:
    done = sqshforge(*words, env={name: "lots"})
    assert done.code == 2, done.err
    assert "'lots' is not a size" in done.err
    assert name in done.err


def test_vendor_is_refused_without_a_network() -> None:
    done = sqshforge("vendor", "cpu-mamba", env={"OFFLINE": "1"})
    assert done.code == 2, done.err
    assert "vendor downloads, but OFFLINE is set" in done.err
    assert "leave OFFLINE out" in done.err


def test_docker_asked_for_without_a_daemon_is_exit_code_3() -> None:
    done = sqshforge("build", "cpu-mamba", "--engine", "docker")
    assert done.code == 3
    assert "no docker daemon answers" in done.err
    assert "ENGINE=buildah" in done.err


def test_no_engine_at_all_is_exit_code_3(tmp_path: Path) -> None:
    # A PATH with the shell's own tools, but without any engine.
    for name in ("sh", "python3"):
        (tmp_path / name).symlink_to(Path(f"/usr/bin/{name}"))
    done = sqshforge("build", "cpu-mamba", env={"PATH": str(tmp_path)})
    assert done.code == 3
    assert "no container engine" in done.err
    assert "apt-get install buildah" in done.err


def test_a_broken_recipe_is_reported_with_all_its_faults(root: Path, tmp_path: Path) -> None:
    copy = tmp_path / "checkout"
    (copy / "recipes").mkdir(parents=True)
    (copy / "images").mkdir()
    for name in ("sqshforge", "training"):
        (copy / name).symlink_to(root / name)
    (copy / "recipes" / "bad.yaml").write_text("target: bad\naccelerator: gpu\n")
    # The package finds its checkout by its own location, so it is copied, not linked.
    (copy / "sqshforge").unlink()
    subprocess.run(["cp", "-r", root / "sqshforge", copy / "sqshforge"], check=True)
    done = Programs().attempt([sys.executable, "-m", "sqshforge", "build", "bad"], cwd=copy)
    assert done.code == 2
    assert "accelerator (line 2): is 'gpu'; allowed: 'cpu', 'cuda' or 'neuron'" in done.err
    assert "title: is missing" in done.err


def test_a_version_that_is_a_number_in_yaml_is_to_be_quoted(root: Path, tmp_path: Path) -> None:
    copy = checkouts.copy(tmp_path / "checkout")
    path = copy / "recipes" / "cpu-mamba.yaml"
    path.write_text(path.read_text().replace('version: "3.11"', "version: 3.10"))
    argv = [sys.executable, "-m", "sqshforge", "show", "cpu-mamba"]
    done = Programs().attempt(argv, cwd=copy)
    assert done.code == 2
    assert 'is 3.10, a number in YAML (3.1); quote it: "3.10"' in done.err


def test_the_make_targets_are_listed_in_a_line_each(root: Path) -> None:
    done = Programs().attempt(["make", "help"], cwd=root)
    assert done.code == 0
    names = [line.split()[1] for line in done.out.splitlines()]
    wanted = ["quickstart", "test", "image", "sqsh", "smoke-test", "lock", "lint", "bench"]
    assert set(wanted) < set(names)
    assert all(len(line.split()) > 3 for line in done.out.splitlines())


def test_the_whole_path_by_command_line(packed_image: Path) -> None:
    """Everything is built already: each step says so, and names the next one."""
    engine = {"ENGINE": "buildah"}
    built = sqshforge("build", "cpu-mamba", env=engine)
    assert built.code == 0, built.err
    assert "up to date" in built.out
    packed = sqshforge("pack", "cpu-mamba", env=engine)
    assert packed.code == 0, packed.err
    assert f"{packed_image}: up to date" in packed.out
    facts = request.read_record(packed_image)
    assert facts is not None and facts["settings"]["hot"] == HotList(LISTED).digest
    assert facts["hot"]["length"] > 0
    ran = sqshforge(
        "run", packed_image, "--", "python3", "-c", "import torch; print(torch.ones(2))"
    )
    assert (ran.code, ran.out) == (0, "tensor([1., 1.])\n")


class AskedError(Exception):
    """Carries the options that a pack was called with."""


@pytest.mark.parametrize(
    ("target", "words", "lines"),
    [
        ("cpu-mamba", [], LISTED),
        ("cpu-mamba", ["--profile=fast"], LISTED),
        ("cpu-mamba", ["--no-hot"], ()),
        ("cpu-mamba", ["--xattrs"], ()),
        ("cpu-mamba", ["--hot=own.txt"], ("etc/passwd",)),
        ("smp-llama", [], ()),
    ],
)
def test_a_target_is_packed_by_its_list(
    target: str,
    words: list[str],
    lines: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It uses the target's list, if it has one, and prints nothing else."""

    def asked(_steps: object, _built: object, _place: Path, options: Options, _: object) -> None:
        raise AskedError(options)

    monkeypatch.setattr(Steps, "build", lambda *_: None)
    monkeypatch.setattr(Steps, "pack", asked)
    monkeypatch.setattr(Project, "require_writable", lambda _: None)
    monkeypatch.chdir(tmp_path)
    Path("own.txt").write_text("etc/passwd\n")
    done = CliRunner().invoke(pack, [target, *words])
    assert isinstance(done.exception, AskedError), done.output
    (options,) = done.exception.args
    assert options.hot.lines == lines


def test_the_list_of_hot_files_still_names_those_of_the_image(packed_image: Path) -> None:
    done = sqshforge("trace", packed_image, "--list", ROOT / "recipes/hot/cpu-mamba.txt", "--check")
    assert done.code == 0, done.out


def test_smoke_test_as_json_and_quickstart_does_nothing_that_is_done(packed_image: Path) -> None:
    done = sqshforge("smoke-test", "cpu-mamba", "--json", env={"ENGINE": "buildah"})
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["ok"]
    checks = {one["name"]: one for one in found["checks"]}
    assert {"versions", "import torch", "launcher mamba_fsdp", "runtime"} <= set(checks)
    assert {"train", "resume"} <= set(checks)
    losses = checks["train"]["figures"]["losses"]
    assert len(losses) >= 60
    assert losses[-1] < 0.6 * losses[0]
    again = sqshforge("quickstart", env={"ENGINE": "buildah"})
    assert again.code == 0, again.err
    assert again.out.count("already done") == 3
    assert "passed: 22 of 22 checks" in again.out
    following = again.out.splitlines()[-1]
    assert following.startswith("next: ") and following.endswith("run build/cpu-mamba.sqsh -- bash")


def test_a_smoke_test_that_fails_says_which_check_and_ends_with_1(
    packed_image: Path, tmp_path: Path
) -> None:
    """The same image with another torch in its lock: the versions do not match."""
    tree = tmp_path / "meta"
    program = Programs()
    program.capture(["unsquashfs", "-q", "-n", "-d", tree, packed_image, "sqshforge"])
    lock = tree / "sqshforge" / "meta" / "lock.json"
    lock.write_text(lock.read_text().replace('"2.13.0+cpu"', '"9.9.9"'))
    recipe = tree / "sqshforge" / "meta" / "recipe.yaml"
    recipe.write_text(recipe.read_text().partition("\n  train:")[0] + "\n")
    argv: list[str | Path] = [
        "run",
        packed_image,
        "--mount",
        f"{tree}/sqshforge/meta:/sqshforge/meta",
        "--",
    ]
    done = sqshforge(*argv, "python3", "-m", "training.smoke", "--json")
    assert done.code == 1
    failed = [one for one in json.loads(done.out)["checks"] if not one["ok"]]
    assert [one["name"] for one in failed] == ["versions"]
    assert "torch 9.9.9 is locked, 2.13.0+cpu is installed" in failed[0]["detail"]


@pytest.mark.root
def test_a_full_disk_is_exit_code_3_in_every_command(tmp_path: Path) -> None:
    Programs().capture(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path])
    try:
        done = sqshforge("render", "cpu-mamba", "--output", tmp_path / "context")
    finally:
        Programs().capture(["umount", "--lazy", tmp_path])
    assert done.code == 3, done.err
    assert "error: No space left on device\n" in done.err


@pytest.mark.root
def test_a_user_without_a_home_is_reported() -> None:
    """Its uid is unknown to the machine, as can happen in a container."""
    with existing() as user:
        words: list[str | Path] = [*user.enter(), "setpriv", "--reuid=54321", "--regid=54321"]
        words += ["--clear-groups", "env", "-u", "HOME", "-u", "XDG_CACHE_HOME"]
        words += ["-u", "SQSHFORGE_CACHE"]
        done = Programs().attempt([*words, SCRIPT, "cache", "ls"], cwd=Path("/"))
        assert done.code == 3 and done.err.splitlines() == [
            "error: HOME is not set",
            "  fix:   export HOME=DIR, or SQSHFORGE_CACHE=DIR",
        ]
        named = [*words, "SQSHFORGE_CACHE=/nonexistent", SCRIPT, "cache", "ls"]
        done = Programs().attempt(named, cwd=Path("/"))
        assert done.code == 0, done.err


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed(closed: str, tmp_path: Path) -> None:
    """A daemon or a cron job may start it like that."""
    file = tiny_root.sqsh(tmp_path / "tiny")
    for words in (f"verify {file}", f"diff {file} {file}", f"inspect {file}"):
        done = Programs().attempt(["sh", "-c", f"{SCRIPT} {words} {closed}"])
        assert (done.code, "Traceback" in done.err) == (0, False), done.err
        assert bool(done.out) == (">&-" not in closed.split())
