"""What a launcher does before and after its nodes run: checks, requests to stop, the end."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from sqshforge.host.programs import Programs
from tests.support import containers
from tests.support.launcher_shell import NOTHING, Shell

pytestmark = pytest.mark.processes

NOBODY = 65534


@pytest.fixture
def shell(tmp_path: Path, root: Path) -> Shell:
    shell = Shell(tmp_path, root / "launch" / "mamba_fsdp.sbatch")
    shell.program("sqshforge")
    return shell


def refused(shell: Shell, *shown: str, **env: str) -> None:
    """Check for exit code 2 and an error with each of these words, before anything is started."""
    code, said = shell.run(**env)
    assert code == 2, said
    for words in shown:
        assert words.format(image=shell.image, folder=shell.folder) in said, said
    assert not shell.called.exists() and not list(shell.folder.glob("checkpoints/*/.job-*"))


# Each fault is reported once, with its nodes, and is final.


def test_an_image_that_is_cut_short(shell: Shell) -> None:
    shell.image.write_bytes(NOTHING[:40] + (1000).to_bytes(8, "little") + bytes(52))
    refused(
        shell,
        "error: {image} is cut short: 100 of 1000 bytes (on node-1 node-2)\n",
        "fix: copy or pack it again\n",
    )


def test_an_image_that_pyxis_would_unpack_is_cut_short(shell: Shell) -> None:
    """Its files cannot be listed, though their sizes are needed to check the free space."""
    shell.image.unlink()
    (shell.folder / "file").write_bytes(os.urandom(200_000))
    Programs().capture(["mksquashfs", shell.folder / "file", shell.image, "-quiet"])
    length = shell.image.stat().st_size
    os.truncate(shell.image, length // 2)
    shell.tool("unsquashfs")
    code, said = shell.run(RUNTIME="pyxis")
    assert code == 2, said
    assert f"error: {shell.image} is cut short: {length // 2} of" in said
    assert "fix: copy or pack it again\n" in said
    assert "FATAL" not in said and "unsquashfs" not in said


def of_platform(shell: Shell, name: str) -> None:
    """Let the image say that it is for a platform; the machine is x86 by default."""
    said = f'echo \'{{"platform": "{name}", "commit": "x"}}\''
    shell.program("unsquashfs", f"#!/bin/bash\n[[ $1 == -cat && -f $2 ]] && {said}\n")
    shell.program("uname", "#!/bin/bash\necho ${MACHINE:-x86_64}\n")


def test_an_image_of_another_machine(shell: Shell) -> None:
    of_platform(shell, "linux/arm64")
    refused(
        shell,
        "error: {image} is for aarch64, and the node is x86_64 (on node-1 node-2)\n",
        "fix: make sqsh TARGET=cuda-mamba; or nodes that are aarch64\n",
    )
    of_platform(shell, "linux/amd64")
    code, said = shell.run()
    assert code == 0, said


def test_on_arm_other_images_are_taken(shell: Shell) -> None:
    """Images for Arm have their own names; the fix for a missing one includes the platform."""
    of_platform(shell, "linux/arm64")
    refused(
        shell,
        "error: there is no {folder}/build/cpu-mamba.arm64.sqsh (on node-1 node-2)\n",
        "fix: make sqsh TARGET=cuda13-mamba PLATFORM=linux/arm64, or IMAGE=FILE.sqsh\n",
        MACHINE="aarch64",
    )
    shell.image.rename(shell.image.with_name("cpu-mamba.arm64.sqsh"))
    code, said = shell.run(MACHINE="aarch64")
    assert code == 0, said
    assert f"{shell.folder}/build/cpu-mamba.arm64.sqsh" in said


def test_what_is_no_image(shell: Shell) -> None:
    shell.image.write_bytes(b"<html>" + bytes(100))
    refused(shell, "error: {image} is no squash file (on")
    shell.image.unlink()
    shell.image.mkdir()
    refused(shell, "error: {image} is no file (on")


@pytest.mark.root
def test_an_image_that_the_user_may_not_read(root: Path) -> None:
    """The error names the closed folder or file, rather than something that is not wrong."""
    become = [
        str(shutil.which("setpriv")),
        f"--reuid={NOBODY}",
        f"--regid={NOBODY}",
        "--clear-groups",
    ]
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to other users
        os.chown(name, NOBODY, NOBODY)
        shell = Shell(Path(name), root / "launch" / "mamba_fsdp.sbatch")
        shell.program("sqshforge")
        for mode, folder_mode, shown in (
            (0o600, 0o755, f"error: {shell.image} cannot be read by nobody (on node-1 node-2)"),
            (0o644, 0o700, f"is in a folder that is closed to nobody: {shell.image.parent} (on"),
        ):
            shell.image.chmod(mode)
            shell.image.parent.chmod(folder_mode)
            code, said = shell.run(IMAGE=str(shell.image), become=become)
            assert code == 2 and shown in said, said
            assert not shell.called.exists()


def test_what_else_a_node_says_is_no_fault(shell: Shell) -> None:
    """A TaskProlog or a BASH_ENV may print something in each step."""
    shell.program("sqshforge")
    code, said = shell.run(CHECK_MEANWHILE="echo Welcome to the cluster")
    assert code == 0 and said.endswith("mamba_fsdp: done\n")


def test_a_mount_that_is_not_there(shell: Shell) -> None:
    refused(
        shell,
        "error: there is no /nonexistent, which is to be mounted (on node-1 node-2)\n",
        "fix: make it, or MOUNTS=SRC:DST,SRC:DST\n",
        MOUNTS=f"{shell.folder}:/x,/nonexistent:/data",
    )


@pytest.mark.root
def test_gpus_whose_driver_nothing_brings_in(shell: Shell) -> None:
    """Training would fall back to CPUs, or fail; a trial may run on CPUs."""
    become = containers.with_driver(shell.folder / "dev")
    own = {"RUNTIME": "sqshforge", "TRIAL": "", "DATASET": str(shell.folder)}
    code, said = shell.run(**own, become=become)
    assert code == 2 and not shell.called.exists(), said
    assert "error: nothing brings this node's NVIDIA driver into a container (on node-1" in said
    assert "fix: install enroot, or nvidia-container-cli" in said
    shutil.rmtree(shell.folder / "dev")
    code, said = shell.run(**{**own, "TRIAL": "1"}, become=become)
    assert code == 0, said
    shutil.rmtree(shell.folder / "dev")
    shell.program("nvidia-container-cli")
    code, said = shell.run(**own, become=become)
    assert code == 0, said


@pytest.mark.root
def test_gpus_that_slurm_has_closed(shell: Shell) -> None:
    """ConstrainDevices closes them to jobs that asked for none; a trial may run without them."""
    become = containers.with_driver(shell.folder / "dev", "nvidia0", "nvidia1")
    shell.program("nvidia-container-cli")
    own = {"DATASET": str(shell.folder)}
    code, said = shell.run(**own, TRIAL="", become=become)
    assert code == 2 and not shell.called.exists(), said
    what = "the node's GPUs are closed to this job, which asks Slurm for none: /dev/nvidia1: Oper"
    assert f"error: {what}ation not permitted (on node-1 node-2)\n" in said
    assert "fix: sbatch --gpus-per-node=2 ...\n" in said
    shutil.rmtree(shell.folder / "dev")
    code, said = shell.run(**own, become=become)
    assert code == 0, said


def test_one_node_that_is_not_as_the_others(shell: Shell) -> None:
    """All faults of all nodes are reported together."""
    shell.program(
        "enroot",
        '#!/bin/bash\n[[ $SLURMD_NODENAME == node-1 ]] || { echo "mkdir: /run/enroot: denied" >&2;'
        " exit 1; }\n",
    )
    refused(
        shell,
        "error: enroot: mkdir: /run/enroot: denied (on node-2)\n",
        "fix: let the ENROOT_*_PATH of enroot.conf be folders of the user's own\n",
        "error: enroot needs squashfuse (on node-1)\n",
        "error: there is no /nonexistent, which is to be mounted (on node-1 node-2)\n",
        RUNTIME="enroot",
        MOUNTS="/nonexistent:/data",
    )


def test_a_node_that_is_bad_is_left_out_if_asked(shell: Shell) -> None:
    """Only if the other nodes are fine: a fault on all of them is a wrong request."""
    shell.program("squashfuse")
    shell.program("enroot", "#!/bin/bash\n[[ $SLURMD_NODENAME == node-1 ]]\n")
    asked = {"RUNTIME": "enroot", "EXCLUDE": "1"}
    code, said = shell.run(**asked)
    assert code == 87 and "(on node-2)" in said and "exit code 87: requeued" in said
    assert not shell.called.exists()
    shown = Path(f"{shell.called}.scontrol")
    assert shown.read_text() == "requeue incomplete 7\nupdate JobId=7 ExcNodeList=node-2\n"
    shown.unlink()
    refused(shell, "(on node-1 node-2)", MOUNTS="/nonexistent:/data", **asked)
    assert not shown.exists()


def test_enroot_that_is_not_installed(shell: Shell) -> None:
    refused(shell, "error: enroot is not installed (on node-1 node-2)", RUNTIME="enroot")


def test_a_folder_for_containers_that_somebody_else_made(shell: Shell) -> None:
    """A root file system would be started from it."""
    shell.enroot()
    (shell.folder / f"enroot-{os.getuid()}").symlink_to(shell.folder)
    shown = f"/enroot-{os.getuid()}, for running containers, belongs to somebody else"
    env = {"XDG_RUNTIME_DIR": "/none", "TMPDIR": str(shell.folder)}
    refused(shell, shown, "fix: TMPDIR=FOLDER", RUNTIME="enroot", **env)


def test_pyxis_finds_no_container_of_a_start_that_was_killed(shell: Shell) -> None:
    """Containers of other jobs or of users are left there."""
    removed = shell.folder / "removed"
    shell.program(
        "enroot",
        "#!/bin/bash\n"
        "[[ $1 != list ]] || printf '%s\\n' pyxis_7.0 pyxis_7_1.0 pyxis_77.0 pyxis_mine mine\n"
        f'[[ $1 != remove ]] || echo "${{@:2}}" >> {removed}\n',
    )
    shell.srun(RUNTIME="pyxis", SLURM_RESTART_COUNT="1")
    assert set(removed.read_text().splitlines()) == {"--force pyxis_7.0", "--force pyxis_7_1.0"}


def test_pyxis_that_unpacks(shell: Shell) -> None:
    """The launcher says so, and how to have it mounted; it also reports too little space."""
    shell.program(
        "unsquashfs",
        "#!/bin/bash\necho '-rw-r--r-- root/root 6234000000 2026-01-01 00:00 root/x'\n",
    )
    code, said = shell.run(RUNTIME="pyxis", HOME=str(shell.folder))
    assert code == 0, said
    assert "pyxis unpacks the image on every node, 6234 MB; use_squashfuse=1" in said
    shell.called.unlink()
    shell.program("df", "#!/bin/bash\necho Avail\necho 5000000\n")
    shown = f"error: no room to unpack: 5 MB are free in {shell.folder} (on node-1 node-2)\n"
    refused(shell, shown, RUNTIME="pyxis", HOME=str(shell.folder))
    stack = shell.folder / "plugstack.conf"
    stack.write_text("required /usr/lib/slurm/spank_pyxis.so use_squashfuse=1\n")
    code, said = shell.run(RUNTIME="pyxis", PLUGSTACK=str(stack))
    assert code == 0 and "pyxis unpacks" not in said


# A container that does not start does not count as a failed run.


@pytest.mark.parametrize("code", ["1", "137"])
def test_containers_that_do_not_start(shell: Shell, code: str) -> None:
    got, said = shell.run(SRUN_CODE=code, NOT_STARTED="1")
    assert got == 3 and "the container has started on no node: sqshforge says why" in said
    assert not Path(f"{shell.called}.scontrol").exists()


def test_a_root_that_was_lost_is_reported(shell: Shell) -> None:
    code, said = shell.run(SRUN_CODE="135")
    assert code == 135 and "SIGBUS: the files of the container were lost" in said
    assert Path(f"{shell.called}.scontrol").read_text() == "requeue incomplete 7\n"


def test_nodes_that_cannot_be_looked_at(shell: Shell) -> None:
    """A node may have been lost in the meantime: the job is tried again."""
    code, said = shell.run(CHECK_CODE="7")
    assert code == 7 and "the nodes could not be looked at" in said
    assert "exit code 7: requeued" in said and not shell.called.exists()
