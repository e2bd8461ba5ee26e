"""setup.sh: which packages, with whose rights, on which system; and what an interruption leaves.

Programs and package managers are stand-ins that record their calls; the virtual environments are
real ones, of a project that needs nothing from elsewhere.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import checkouts, containers, processes
from tests.support.ordinary_user import User
from tests.support.ordinary_user import user_fixture as user_fixture
from tests.support.setup_machine import ALL, PYPROJECT, Machine
from tests.support.setup_machine import machine as machine

pytestmark = pytest.mark.processes


def test_without_root_and_sudo_the_packages_are_named(machine: Machine) -> None:
    machine.has_apt([])
    done = machine.run(user=True)
    assert done.returncode == 3, done.stderr
    assert "neither root nor a user with sudo" in done.stderr
    assert "as root: apt-get install buildah squashfs-tools" in done.stderr
    assert not (machine.checkout / ".venv").exists()


def test_without_root_and_sudo_it_goes_on_where_the_packages_are(machine: Machine) -> None:
    machine.has_apt([])
    machine.has(*ALL)
    done = machine.run(user=True)
    assert done.returncode == 0, done.stderr
    assert machine.is_set_up and done.stderr == ""
    assert not (machine.place / "calls").exists()
    assert machine.run(user=True).stdout == ""  # and the next call does nothing


def test_the_environment_for_editing_takes_no_packages(machine: Machine) -> None:
    """It also needs no right to install any; a later set-up for the tests builds on it."""
    machine.has_apt([])
    done = machine.run(user=True, goal="dev")
    assert done.returncode == 0, done.stderr
    assert (machine.checkout / ".venv/made-for-test").exists()
    assert done.stderr == "" and not (machine.place / "calls").exists()
    assert machine.run(user=True, goal="dev").stdout == ""
    later = machine.run(user=True, goal="test")
    assert later.returncode == 3 and "packages are missing" in later.stderr


def test_what_only_ordinary_users_need_is_noted_and_not_asked_for(machine: Machine) -> None:
    machine.has_apt([])
    machine.has("buildah", "mksquashfs", "mmdebstrap", "newuidmap")
    done = machine.run(user=True)
    assert done.returncode == 0 and machine.is_set_up, done.stderr
    assert done.stderr.splitlines() == [
        "note: squashfuse is missing, which is needed for running a squash file as an ordinary "
        "user",
        "note: fuse-overlayfs is missing, which is needed for running one on Linux before 6.6",
    ]
    assert machine.run(user=True).stderr == ""  # reported only once


def test_sudo_is_used_for_packages_alone(machine: Machine) -> None:
    machine.has_apt([*ALL, "squashfs-tools", "uidmap"])
    machine.has_sudo()
    done = machine.run(user=True)
    assert done.returncode == 0, done.stderr
    used = [call for call in machine.calls() if call.startswith("sudo")]
    assert len(used) == 2 and all("apt-get -qq" in call for call in used), used
    assert "installing: buildah squashfs-tools mmdebstrap uidmap" in done.stdout
    assert machine.is_set_up
    owners = {path.lstat().st_uid for path in (machine.checkout / ".venv").rglob("*")}
    assert owners == {65534}


def test_a_package_that_the_index_lacks_stops_only_what_cannot_do_without(machine: Machine) -> None:
    machine.has_apt(["buildah", "squashfs-tools", "mmdebstrap", "uidmap", "fuse-overlayfs"])
    done = machine.run()
    assert done.returncode == 0 and machine.is_set_up, done.stderr
    assert "note: squashfuse is missing" in done.stderr
    before = len(machine.calls())
    assert machine.run().returncode == 0
    assert len(machine.calls()) == before  # it is not asked for again and again
    machine.has_apt(["buildah"])
    (machine.tools / "mksquashfs").unlink()
    done = machine.run()
    assert done.returncode == 3
    assert "apt-get could not install them: mksquashfs" in done.stderr


def test_a_new_buildah_s_netavark_is_installed_with_it(machine: Machine) -> None:
    machine.has_apt([*ALL, "squashfs-tools", "uidmap", "netavark"])
    apt = machine.tools / "apt-get"
    said = "printf '#!/bin/sh\\necho buildah version 1.39.3\\n'"
    apt.write_text(apt.read_text().replace("buildah) printf '#!/bin/sh\\n'", f"buildah) {said}"))
    place = machine.place / "podman"
    place.mkdir()
    install = f"netavark) touch {place}/netavark; chmod 755 {place}/netavark;"
    apt.write_text(apt.read_text().replace("netavark)", install))
    mount = f"mount -t tmpfs tmpfs /usr/local/lib && ln -s {place} /usr/local/lib/podman"
    done = machine.run(before=mount)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "installing" in line] == [
        "installing: buildah squashfs-tools mmdebstrap uidmap squashfuse fuse-overlayfs",
        "installing: netavark",
    ]


def test_another_apt_get_is_waited_for_and_an_interrupted_dpkg_goes_on(machine: Machine) -> None:
    machine.has_apt([*ALL, "squashfs-tools", "uidmap"])
    (machine.place / "locked").touch()
    updates = "/var/lib/dpkg/updates"
    done = machine.run(before=f"mount -t tmpfs tmpfs {updates} && touch {updates}/0001")
    assert done.returncode == 0 and machine.is_set_up, done.stderr
    assert "waiting for another apt-get" in done.stdout
    calls = machine.calls()
    assert calls[0] == "dpkg --configure -a"
    assert sum(" update" in call for call in calls) == 2


@pytest.mark.parametrize(
    ("system", "packages"),
    [
        ("fedora", "buildah squashfs-tools shadow-utils squashfuse fuse-overlayfs"),
        (
            "rocky",
            "epel-release && sudo dnf install buildah squashfs-tools shadow-utils squashfuse "
            "fuse-overlayfs",
        ),
        ("amzn", "docker squashfs-tools shadow-utils"),
    ],
)
def test_without_apt_get_the_packages_of_dnf_are_named_in_a_line(
    machine: Machine, system: str, packages: str
) -> None:
    machine.has("dnf")
    done = machine.run(user=True, system=system)
    assert done.returncode == 3
    error, fix = done.stderr.splitlines()
    assert error == "error: this machine has no apt-get, and is without: buildah, mksquashfs"
    assert fix == f"  fix:   sudo dnf install {packages}  (see docs/start/machines.md)"


def test_without_apt_get_it_goes_on_where_the_tools_are(machine: Machine) -> None:
    machine.has("dnf", "mksquashfs", "newuidmap")  # Amazon Linux 2023, with all that it offers
    machine.has_program("docker", "#!/bin/sh\necho Docker version 25.0.8, build 0bab007\n")
    done = machine.run(user=True, system="amzn")
    assert done.returncode == 0 and machine.is_set_up, done.stderr
    shown = [line.split()[1] for line in done.stderr.splitlines()]
    assert shown == ["buildah", "mmdebstrap", "squashfuse", "fuse-overlayfs"]


# A docker of which only the client answers.
DOCKER = """#!/bin/sh
case $1 in
--version) echo Docker version 25.0.8, build 0bab007 ;;
*) echo '{said}' >&2; exit 1 ;;
esac
"""
NO_DAEMON = (
    "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. "
    "Is the docker daemon running?"
)
NOT_ALLOWED = (
    "permission denied while trying to connect to the Docker daemon socket at "
    "unix:///var/run/docker.sock"
)


@pytest.mark.parametrize(
    ("said", "there", "fix"),
    [
        (NO_DAEMON, ["mksquashfs"], "sudo systemctl enable --now docker"),
        (NOT_ALLOWED, ["mksquashfs"], "sudo usermod -aG docker nobody, then log in again"),
        (
            NO_DAEMON,
            [],
            "sudo dnf install squashfs-tools && sudo systemctl enable --now docker",
        ),
    ],
)
def test_a_docker_that_does_not_answer_is_not_installed_again(
    machine: Machine, said: str, there: list[str], fix: str
) -> None:
    machine.has("dnf", "newuidmap", *there)
    machine.has_program("docker", DOCKER.format(said=said))
    done = machine.run(user=True, system="amzn")
    assert done.returncode == 3
    lacking = "docker's daemon" if there else "docker's daemon, mksquashfs"
    assert done.stderr.splitlines() == [
        f"error: this machine has no apt-get, and is without: {lacking}",
        f"  fix:   {fix}  (see docs/start/machines.md)",
    ]


def test_where_buildah_is_packaged_it_is_named_beside_a_docker_that_does_not_answer(
    machine: Machine,
) -> None:
    machine.has("dnf", "mksquashfs", "newuidmap")
    machine.has_program("docker", DOCKER.format(said=NO_DAEMON))
    done = machine.run(user=True, system="fedora")
    assert done.returncode == 3 and "is without: buildah" in done.stderr
    assert "sudo dnf install buildah" in done.stderr


def test_podman_under_docker_s_name_is_no_engine(machine: Machine) -> None:
    machine.has("dnf", "mksquashfs", "newuidmap")
    machine.has_program("docker", "#!/bin/sh\necho podman version 5.4.2\n")
    done = machine.run(user=True, system="rocky")
    assert done.returncode == 3 and "is without: buildah" in done.stderr


def test_a_newer_python_beside_an_old_one_is_taken(machine: Machine) -> None:
    machine.has(*ALL, "dnf")
    (machine.tools / "python3").rename(machine.tools / "python3.11")
    (machine.tools / "python3").write_text("#!/bin/sh\nexit 1\n")
    (machine.tools / "python3").chmod(0o755)
    assert machine.run(user=True, system="amzn").returncode == 0
    assert machine.is_set_up


def killed(machine: Machine, reached: Path, strike: int) -> None:
    """Kill a set-up, with everything that it started, once it has reached a point."""
    (machine.checkout / "hold").touch()
    mark = {"SQSHFORGE_TEST_SETUP": str(machine.place)}
    argv = machine.argv(user=True)
    argv = [word if word != "-i" else f"SQSHFORGE_TEST_SETUP={machine.place}" for word in argv]
    with subprocess.Popen(
        argv, cwd=machine.checkout, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            assert containers.until(reached.exists)
            if strike == 9:
                processes.kill([process.pid])  # what it started continues
            else:
                below = processes.descendants(process.pid)
                processes.kill([process.pid, *below], strike)  # Ctrl-C reaches all of them
            process.wait(timeout=300)
        finally:
            (machine.checkout / "hold").unlink()
            if strike != 9:
                processes.kill(processes.having(mark))
    assert not machine.is_set_up


@pytest.mark.parametrize(
    ("point", "strike"), [(".venv/bin/python", 9), (".venv/bin/pip", 2), ("begun", 9), ("begun", 2)]
)
def test_what_was_interrupted_is_made_anew(machine: Machine, point: str, strike: int) -> None:
    machine.has_apt([])
    machine.has(*ALL)
    killed(machine, machine.checkout / point, strike)
    half = machine.checkout / ".venv/half-made"
    half.touch()
    done = machine.run(user=True)
    assert done.returncode == 0 and machine.is_set_up, done.stdout + done.stderr
    assert not half.exists() or "waiting" in done.stdout  # the killed one's pip had completed it


def test_an_environment_that_is_only_old_is_brought_up_to_date(machine: Machine) -> None:
    machine.has_apt([])
    machine.has(*ALL)
    assert machine.run(user=True).returncode == 0
    (machine.checkout / ".venv/kept").touch()
    (machine.checkout / "pyproject.toml").write_text(PYPROJECT + "# changed\n")
    assert machine.run(user=True).stdout == "making .venv\n"
    assert (machine.checkout / ".venv/kept").exists() and machine.is_set_up


def test_root_s_environment_serves_a_user_until_it_must_change(machine: Machine) -> None:
    machine.has_apt([])
    machine.has(*ALL)
    assert machine.run().returncode == 0
    done = machine.run(user=True)
    assert (done.returncode, done.stderr) == (0, "")
    (machine.checkout / "pyproject.toml").write_text(PYPROJECT + "# changed\n")
    done = machine.run(user=True)
    assert done.returncode == 3
    error, fix = done.stderr.splitlines()
    assert error == f"error: {machine.checkout}/.venv belongs to root, not to nobody"
    assert fix == f"  fix:   sudo chown -R nobody '{machine.checkout}'"
    subprocess.run(shlex.split(fix.partition("sudo ")[2]), check=True)  # the fix must work
    assert machine.run(user=True).returncode == 0 and machine.is_set_up


def test_a_user_s_environment_serves_root_who_may_change_it(machine: Machine) -> None:
    machine.has_apt([])
    machine.has(*ALL)
    assert machine.run(user=True).returncode == 0
    (machine.checkout / "pyproject.toml").write_text(PYPROJECT + "# changed\n")
    assert machine.run().returncode == 0 and machine.is_set_up


def test_a_checkout_of_another_user_is_reported(machine: Machine) -> None:
    machine.has_apt([])
    machine.has(*ALL)
    os.chown(machine.checkout, 0, 0)
    done = machine.run(user=True)
    assert done.returncode == 3
    assert f"error: {machine.checkout} belongs to root, and nobody cannot write" in done.stderr
    assert (
        f"use a checkout of your own, or: sudo chown -R nobody '{machine.checkout}'" in done.stderr
    )


# As over NFS, where a file opened only for reading cannot be locked exclusively.
NFS_FLOCK = """#!/bin/sh
case $(grep flags: /proc/self/fdinfo/9) in
*2) exec {flock} "$@" ;;
esac
echo "flock: 9: Bad file descriptor" >&2
exit 65
"""


def started(machine: Machine) -> subprocess.Popen[str]:
    return subprocess.Popen(
        machine.argv(user=True),
        cwd=machine.checkout,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def test_two_set_ups_over_nfs_wait_for_each_other(machine: Machine) -> None:
    machine.has_apt([])
    machine.has(*ALL)
    machine.has_program("flock", NFS_FLOCK.format(flock=shutil.which("flock")))
    (machine.checkout / "hold").touch()
    with started(machine) as first:
        try:
            assert containers.until((machine.checkout / "begun").exists)
            with started(machine) as second:
                assert second.stdout is not None
                said = second.stdout.readline()
                (machine.checkout / "hold").unlink()
                assert said == "waiting for another set-up of this checkout\n"
                assert second.stdout.read() == "" and second.wait(timeout=300) == 0
        finally:
            (machine.checkout / "hold").unlink(missing_ok=True)
        assert first.stdout is not None and first.stdout.read() == "making .venv\n"
    assert machine.is_set_up
    assert (machine.checkout / "pyproject.toml").read_text() == PYPROJECT


def test_a_file_system_without_locks_is_noted(machine: Machine) -> None:
    machine.has_apt([])
    machine.has(*ALL)
    machine.has_program("flock", "#!/bin/sh\necho 'flock: 9: No locks' >&2\nexit 71\n")
    done = machine.run(user=True)
    assert done.returncode == 0 and machine.is_set_up, done.stderr
    assert done.stderr == (
        "note: this file system has no locks: set up this checkout from one place at a time\n"
    )


def test_files_of_another_user_in_a_checkout_that_is_writable(machine: Machine) -> None:
    machine.has_apt([])
    machine.has(*ALL)
    for name in ("setup.sh", "pyproject.toml"):
        os.chown(machine.checkout / name, 0, 0)
    done = machine.run(user=True)
    assert (done.returncode, done.stderr) == (0, "") and machine.is_set_up


def test_the_real_set_up_of_an_ordinary_user_without_sudo(user: User) -> None:
    """The system packages exist: it needs only Python's, and then has the command."""
    clone = user.take(checkouts.bare(user.home / "clone"))
    script = "./setup.sh quickstart && .venv/bin/sqshforge targets && ./setup.sh quickstart"
    done = subprocess.run(
        user.argv("sh", "-c", script),
        cwd=clone,
        env=user.environment({"PYTHONPATH": ""}),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[0] == "making .venv"
    assert re.search(r"^cpu-mamba +Mamba pre-training on CPU", done.stdout, re.MULTILINE)
    (by,) = clone.glob(".venv/lib/*/site-packages/jinja2-*.dist-info/INSTALLER")
    assert by.read_text() == "uv"  # which takes half of pip's time
