"""setup.sh in a checkout that was copied, moved or linked, or that cannot be written to."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.setup_machine import ALL, Machine
from tests.support.setup_machine import machine as machine

pytestmark = pytest.mark.processes


@pytest.fixture(name="made")
def made_fixture(machine: Machine) -> Machine:
    """A machine that is set up."""
    machine.has_apt([])
    machine.has(*ALL)
    done = machine.run(user=True)
    assert done.returncode == 0, done.stderr
    return machine


def belongs(machine: Machine) -> bool:
    """Tell whether an environment's programs start, and use the checkout that they lie in."""
    programs, code = machine.checkout / ".venv/bin", "import backend; print(backend.__file__)"
    subprocess.run([programs / "pip", "--version"], check=True, capture_output=True)
    python: list[str | Path] = [programs / "python", "-c", code]
    found = subprocess.run(python, cwd="/", check=True, capture_output=True, text=True).stdout
    return found == f"{machine.checkout}/backend.py\n"


def require_made_once(machine: Machine) -> None:
    done = machine.run(user=True)
    assert (done.returncode, done.stdout) == (0, "making .venv\n"), done.stderr
    assert machine.is_set_up and belongs(machine)
    again = machine.run(user=True)
    assert (again.returncode, again.stdout) == (0, ""), again.stderr


def test_a_copy_gets_an_environment_of_its_own(made: Machine) -> None:
    copy = replace(made, name="a copy")
    subprocess.run(["cp", "-a", made.checkout, copy.checkout], check=True)
    require_made_once(copy)
    assert belongs(made) and made.run(user=True).stdout == ""


def test_a_renamed_checkout_gets_a_new_environment(made: Machine) -> None:
    renamed = replace(made, name="renamed")
    made.checkout.rename(renamed.checkout)
    require_made_once(renamed)


def test_a_link_to_another_checkout_s_environment_leaves_that_one_alone(made: Machine) -> None:
    copy = replace(made, name="copy")
    subprocess.run(["cp", "-a", made.checkout, copy.checkout], check=True)
    subprocess.run(["rm", "-r", copy.checkout / ".venv"], check=True)
    (copy.checkout / ".venv").symlink_to(made.checkout / ".venv")
    require_made_once(copy)
    assert belongs(made) and made.run(user=True).stdout == ""


def test_a_pip_that_is_configured_to_install_for_the_user_installs_here(machine: Machine) -> None:
    machine.has_apt([])
    machine.has(*ALL)
    config = machine.place / ".config/pip/pip.conf"
    config.parent.mkdir(parents=True)
    config.write_text("[install]\nuser = true\n")
    done = machine.run(user=True)
    assert done.returncode == 0 and machine.is_set_up, done.stderr


def test_a_read_only_checkout_is_not_blamed_on_its_owner(machine: Machine) -> None:
    machine.has_apt([])
    machine.has(*ALL)
    place = machine.checkout
    mount = f"mount --bind {place} {place} && mount -o remount,bind,ro {place} && cd {place}"
    done = machine.run(user=True, before=mount)
    assert done.returncode == 3
    error, fix = done.stderr.splitlines()
    assert error == f"error: {place} is on a read-only file system"
    copying = f"cp -R '{place}' ~/sqshforge && cd ~/sqshforge && ./setup.sh quickstart"
    assert fix == f"  fix:   {copying}"
    environment = {"HOME": str(machine.place), "PATH": f"{machine.tools}:/usr/bin:/bin"}
    subprocess.run(["sh", "-c", copying], cwd=place, env=environment, check=True)
    assert replace(machine, name="sqshforge").is_set_up
