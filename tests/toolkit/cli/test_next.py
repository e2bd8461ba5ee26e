"""The command that each command suggests at its end: it runs unchanged, where it was shown."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from sqshforge import project, recipe
from sqshforge.build.build import Built
from sqshforge.build.inputs import Bundle
from sqshforge.cli import main, workflow
from sqshforge.doctor import cluster
from sqshforge.engine import Image
from sqshforge.host import suggest
from sqshforge.host.programs import Programs
from sqshforge.image.enroot import ImageConfig
from sqshforge.project import not_ours
from sqshforge.squash import request
from tests.conftest import ROOT
from tests.support import tiny_root
from tests.support.command_line import SCRIPT, parsed
from tests.support.run_folders import history, noted, write

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("no_docker")]
LABELS = (("io.sqshforge.target", "cpu-mamba"),)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small file with a record that it was made for cpu-mamba."""
    folder = tmp_path_factory.mktemp("next")
    return tiny_root.sqsh(folder / "tiny", ImageConfig(reference="t", labels=LABELS))


@pytest.fixture
def key(tmp_path: Path) -> Path:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    return key


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    yield write(tmp_path / "runs" / "one two", history(5))


def said(*words: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """Return the next command that a command suggests."""
    done = Programs().attempt([SCRIPT, *words], cwd=cwd, env=env)
    assert done.code == 0, done.out + done.err
    shown = re.findall(r"^next: (.*)$", done.out, re.MULTILINE)
    assert len(shown) == 1 and done.out.splitlines()[-1] == f"next: {shown[0]}", done.out
    return str(shown[0])


def require_runs(line: str, cwd: Path) -> None:
    """Check that the program of a command line exists and accepts its words."""
    words = shlex.split(line)
    while re.fullmatch(r"[A-Z]+=.*", words[0]):
        words.pop(0)
    program = shutil.which(words[0]) or cwd / words[0]
    assert os.access(program, os.X_OK), line
    if words[0] == "make":
        given = dict(word.split("=", 1) for word in words if "=" in word)
        assert given.get("TARGET", "cpu-mamba") in recipe.targets(ROOT / "recipes"), line
        subprocess.run([*words, "--dry-run"], cwd=cwd, check=True, capture_output=True)
    elif "sqshforge" in Path(words[0]).name or words[1:3] == ["-m", "sqshforge"]:
        assert Path(program).samefile(SCRIPT), line
        parsed(main.cli, words[1:])
    else:
        assert words[0] in ("tail", "less") or "python" in words[0], line


@pytest.mark.parametrize("cwd", [ROOT, Path("/")])
def test_of_every_command_on_a_recipe(cwd: Path, tmp_path: Path) -> None:
    for words in (
        ["show", "cpu-mamba"],
        ["render", "cpu-mamba", "-o", str(tmp_path / "out")],
        ["doctor"],
    ):
        line = said(*words, cwd=cwd)
        assert line.startswith("make " if cwd == ROOT else f"make -C {ROOT.relative_to(cwd)} ")
        require_runs(line, cwd)


def test_of_every_command_on_a_file(
    tiny: Path, tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "root"
    (source / "etc").mkdir(parents=True)
    (source / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    packed = tmp_path / "a b.sqsh"
    env = {"SQSHFORGE_CACHE": str(tmp_path / "cache")}
    commands: list[list[str | Path]] = [
        ["pack", f"rootfs:{source}", "-o", packed],
        ["inspect", packed],
        ["diff", packed, tiny],
        ["verify", packed],
        ["sign", packed, "--key", key],
        ["cache", "ls"],
        ["cache", "prune"],
    ]
    for words in commands:
        line = said(*words, cwd=tmp_path, env=env)
        require_runs(line, tmp_path)
        if words[0] in ("pack", "inspect", "sign"):
            assert "'a b.sqsh'" in line  # relative to the current folder, and quoted
        if words[0] in ("diff", "sign", "cache"):  # these are cheap enough to run
            done = subprocess.run(
                line, shell=True, cwd=tmp_path, env={**os.environ, **env}, capture_output=True
            )
            assert done.returncode == 0, (line, done.stderr)


@pytest.mark.parametrize("name", ["out", "out.sqsh", "sub/out"])
def test_a_file_is_not_taken_for_a_target(name: str, tmp_path: Path) -> None:
    (tmp_path / "tree/etc").mkdir(parents=True)
    (tmp_path / "tree/etc/os-release").write_text("ID=test\n")
    (tmp_path / "sub").mkdir()
    shown = "./out" if name == "out" else name
    for words in (["pack", "rootfs:tree", "-o", name, "--no-cache"], ["verify", name]):
        assert said(*words, cwd=tmp_path).endswith(f"smoke-test {shown}")


def test_the_first_job_of_a_cluster_by_an_image_whose_path_has_a_space(tmp_path: Path) -> None:
    image = tmp_path / "my images/a.sqsh"
    launcher = tmp_path / "launch/mamba_fsdp.sbatch"
    line = cluster._first_job(image, launcher, 2)
    assignments = f"TRIAL=1 IMAGE='{image}' "
    assert line == f"{assignments}sbatch --nodes=2 {launcher}"
    line = cluster._first_job(image, launcher, 2, "gpu")
    assert "sbatch --nodes=2 --partition=gpu " in line
    done = subprocess.run(
        ["sh", "-c", f"{assignments} env"], capture_output=True, text=True, check=True
    )
    assert f"IMAGE={image}" in done.stdout.splitlines()


def record(image: Path, target: str) -> None:
    """Write a record beside a file that says it was packed from a target's image."""
    config = asdict(ImageConfig(reference="t", labels=(("io.sqshforge.target", target),)))
    facts = {"key": "k", "size": 1, "image": config, "settings": {}}
    request.record_path(image).write_text(json.dumps(facts))


@pytest.mark.parametrize(
    ("target", "name"), [("neuron29-mamba2", "mamba2_neuron"), ("smp-llama", "llama_smp")]
)
def test_the_first_job_of_a_cluster_is_one_that_the_image_has(
    target: str, name: str, tmp_path: Path
) -> None:
    image = tmp_path / "image.sqsh"
    record(image, target)
    assert workflow.launcher_of(image) == ROOT / "launch" / f"{name}.sbatch"


def test_a_build_with_other_parameters_is_packed_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = Image(id="i", labels={}, size=1)
    built = Built(name="n", image=image, source="buildah://n", seconds=0.0, up_to_date=True)
    monkeypatch.setattr(workflow.Steps, "build", lambda *_: built)
    monkeypatch.setattr(
        workflow.Steps, "vendor", lambda *_: (tmp_path, Bundle(supplies=(), images={}))
    )
    given = ["--set", "X=Y", "--set", "A=b", "--engine", "buildah"]
    for command, following in (
        ("build", ["sqsh", "TARGET=cpu-mamba"]),
        ("vendor", ["image", "TARGET=cpu-mamba", "OFFLINE=1"]),
    ):
        for words, settings in (([], []), (given, ["SET=X=Y A=b", "ENGINE=buildah"])):
            monkeypatch.chdir(ROOT)
            done = CliRunner(env={"ENGINE": ""}).invoke(main.cli, [command, "cpu-mamba", *words])
            assert done.exit_code == 0, done.output
            line = done.output.splitlines()[-1].removeprefix("next: ")
            assert shlex.split(line) == ["make", *following, *settings]


@pytest.mark.parametrize("value", ["A=b c", "A=b;d", "A=$b"])
def test_a_setting_that_make_cannot_take_is_given_to_sqshforge(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = Image(id="i", labels={}, size=1)
    built = Built(name="n", image=image, source="buildah://n", seconds=0.0, up_to_date=True)
    bundle = Bundle(supplies=(), images={})
    monkeypatch.setattr(workflow.Steps, "build", lambda *_: built)
    monkeypatch.setattr(workflow.Steps, "vendor", lambda *_: (tmp_path, bundle))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    monkeypatch.chdir(ROOT)
    given = ["--set", "X=Y", "--set", value]
    words = [*given, "--platform", "linux/amd64", "--engine", "buildah"]
    for command, before, following in (("build", [], "pack"), ("vendor", ["OFFLINE=1"], "build")):
        done = CliRunner(env={"ENGINE": ""}).invoke(main.cli, [command, "cpu-mamba", *words])
        assert done.exit_code == 0, done.output
        line = done.output.splitlines()[-1].removeprefix("next: ")
        *start, program, subcommand = shlex.split(line)[: len(before) + 2]
        assert (start, Path(program).name, subcommand) == (before, "sqshforge", following)
        assert shlex.split(line)[len(before) + 2 :] == ["cpu-mamba", *words]
        require_runs(line, ROOT)


def test_the_fixes_of_errors_quote_their_paths(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "one two"
    folder.mkdir()
    compressed, bare = folder / "a.tar", folder / "bare.sqsh"
    compressed.write_bytes(gzip.compress(b"x" * 2000))
    bare.write_bytes(tiny.read_bytes())
    commands: dict[str, list[str | Path]] = {
        f"gunzip < '{compressed}' > '{compressed}.tar'": [
            "pack",
            f"docker-archive:{compressed}",
            "-o",
            tmp_path / "o.sqsh",
        ],
        f"sqshforge status --root '{folder}' lists": ["status", folder],
        f"sqshforge trace '{bare}' -- COMMAND": ["trace", bare],
    }
    for fix, words in commands.items():
        done = Programs().attempt([SCRIPT, *words], cwd=tmp_path)
        assert done.code != 0 and fix in done.err, done.err
    owned = str(not_ours(folder, folder).fix)
    assert f"sudo chown -R {project.user_name()} '{folder}'  (or" in owned


def test_of_status(runs: Path) -> None:
    commands: list[list[str | Path]] = [["status", "--root", runs.parent], ["status", runs]]
    for words in commands:
        line = said(*words, cwd=runs.parent)
        assert "'one two'" in line
        require_runs(line, runs.parent)


def test_of_a_run_that_failed_with_its_output_here(runs: Path) -> None:
    noted(runs, 2)
    assert "--json" in said("status", runs, cwd=runs.parent)
    (runs.parent / "slurm-4242.out").write_text("why\n")
    line = said("status", runs, cwd=runs.parent)
    assert line == "tail -n 100 slurm-4242.out"
    require_runs(line, runs.parent)


def test_stage_prints_the_path_alone(tiny: Path, tmp_path: Path) -> None:
    done = Programs().attempt([SCRIPT, "stage", tiny, tmp_path / "disk"])
    assert done.code == 0 and len(done.out.splitlines()) == 1
    assert Path(done.out.strip()).is_file()  # launchers use this path


def test_the_program_is_called_as_it_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    place = str(SCRIPT.relative_to(ROOT))
    path = os.environ["PATH"]
    without = os.pathsep.join(one for one in path.split(":") if Path(one) != SCRIPT.parent)
    assert said("cache", "ls", env={"PATH": without}).split()[0] == place
    assert said("cache", "ls", env={"PATH": f"{SCRIPT.parent}:{path}"}).split()[0] == "sqshforge"
    monkeypatch.setattr(sys, "argv", ["/x/sqshforge/__main__.py"])
    expected = f"{Path(sys.executable).relative_to(ROOT)} -m sqshforge cache ls"
    assert suggest.sqshforge("cache", "ls") == expected


SINFO = "#!/bin/sh\nprintf '%s'\nexit %d\n"


@pytest.mark.parametrize(
    ("answer", "code", "expected"),
    [
        (r"debug* 1\nother 9\n", 0, "--nodes=1"),
        (r"debug* 3\ndebug* 4\n", 0, "--nodes=2"),
        ("", 1, None),
    ],
)
def test_a_job_is_next_where_a_cluster_answers(
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    code: int,
    expected: str | None,
) -> None:
    """The job is of the target's own image and launcher."""
    for name in ("sinfo", "sbatch"):
        (tmp_path / name).write_text(SINFO % (answer, code))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tiny.parent)
    image = tmp_path / "image.sqsh"
    shutil.copy(tiny, image)
    record(image, "cpu-mamba")
    line = workflow.launch_command(image, Programs())
    if expected is None:
        assert line.endswith(f"run {image} -- bash")
    else:
        assert line == f"TRIAL=1 IMAGE={image} sbatch {expected} {ROOT}/launch/mamba_fsdp.sbatch"


@pytest.mark.parametrize("words", ["verify FILE", "diff FILE FILE", "inspect FILE"])
def test_from_a_folder_that_was_removed(words: str, tmp_path: Path) -> None:
    file = tiny_root.sqsh(tmp_path / "tiny")
    (tmp_path / "gone").mkdir()
    line = f"rmdir {tmp_path / 'gone'} && exec {SCRIPT} {words.replace('FILE', str(file))}"
    done = Programs().attempt(["sh", "-c", line], cwd=tmp_path / "gone")
    assert done.code == 0, done.err
    assert str(file) in done.out.splitlines()[-1]
