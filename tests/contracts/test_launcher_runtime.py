"""A launcher on nodes without a container runtime uses the one that the image carries."""

from __future__ import annotations

from pathlib import Path

import pytest

from sqshforge.host.programs import Programs
from tests.support.launcher_shell import Shell

pytestmark = pytest.mark.processes


@pytest.fixture
def shell(tmp_path: Path, root: Path) -> Shell:
    return Shell(tmp_path, root / "launch" / "mamba_fsdp.sbatch")


@pytest.fixture
def bare(shell: Shell) -> Shell:
    """No runtime is installed, but the image carries one."""
    tree = shell.folder / "tree" / "sqshforge" / "launch"
    tree.mkdir(parents=True)
    (tree / "sqshforge-run.pyz").write_text("a runtime\n")
    shell.image.unlink()
    Programs().capture(["mksquashfs", shell.folder / "tree", shell.image, "-quiet"])
    shell.tool("unsquashfs")
    shell.tool("python3")
    return shell


def copies(shell: Shell) -> list[str]:
    return [path.name for path in shell.folder.glob("checkpoints/*/.job-*")]


@pytest.mark.parametrize("runtime", ["", "sqshforge"])
def test_the_runtime_of_the_image(bare: Shell, runtime: str) -> None:
    """It gets the same arguments as an installed sqshforge."""
    words = bare.srun(RUNTIME=runtime)
    run = bare.folder / "checkpoints" / "mamba_fsdp-trial"
    copy = f"{run}/.job-7.0/sqshforge-run.pyz"
    assert words[5:10] == ["python3", "-I", "-S", copy, "--runtime=builtin"]
    assert (bare.state / "sqshforge-run.pyz").read_text() == "a runtime\n"
    assert copies(bare) == []
    bare.program("sqshforge")
    installed = bare.srun(RUNTIME=runtime)
    assert installed[:5] == words[:5] and installed[7:] == words[9:]


def test_what_is_installed_comes_first(bare: Shell) -> None:
    bare.program("sqshforge")
    assert f"{bare.programs}/sqshforge" in bare.srun()
    bare.enroot()
    assert any(word.endswith("/start_enroot") for word in bare.srun())


def test_nothing_of_it_stays(bare: Shell) -> None:
    """Neither from a job that fails, nor from an earlier start that was killed."""
    run = bare.folder / "checkpoints" / "mamba_fsdp-trial"
    run.mkdir(parents=True)
    for name in (".job-7.0", ".job-8.0"):
        (run / name).mkdir()
    for code in ("1", "2", "85", "137"):
        assert bare.run(SRUN_CODE=code, SLURM_RESTART_COUNT="1")[0] == int(code)
        assert copies(bare) == [".job-8.0"]  # of another job


@pytest.mark.parametrize("program", ["unsquashfs", "python3"])
@pytest.mark.parametrize("runtime", ["", "sqshforge"])
def test_what_the_runtime_of_the_image_needs(bare: Shell, program: str, runtime: str) -> None:
    (bare.programs / program).unlink()
    code, said = bare.run(RUNTIME=runtime)
    assert code == 3 and not bare.called.exists()
    assert f"error: there is no {bare.folder}/.venv/bin/sqshforge, and the image's copy" in said
    assert f"needs {program}\n" in said
    assert "fix: install squashfs-tools and python3 on the nodes" in said


def test_an_image_that_carries_none(bare: Shell) -> None:
    bare.image.unlink()
    Programs().capture(["mksquashfs", bare.programs, bare.image, "-quiet"])
    code, said = bare.run()
    assert code == 3 and not bare.called.exists() and copies(bare) == []
    assert "no matches for /sqshforge" in said  # unsquashfs's own words
    assert f"error: no copy of the runtime can be read from {bare.image}" in said


@pytest.mark.parametrize("variable", ["STAGE", "SIGNERS"])
def test_what_takes_an_installed_sqshforge(bare: Shell, variable: str) -> None:
    code, said = bare.run(**{variable: "/x"})
    assert code == 3 and not bare.called.exists()
    assert "error: SIGNERS and STAGE need sqshforge, which is neither on the PATH nor" in said
    assert f"{bare.folder}/.venv/bin/sqshforge" in said
