"""README's first commands on fresh machines, from nothing, as root and as an ordinary user."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.distros.machine import CLONE, USER, Machine, Ran, machine
from tests.distros.systems import SYSTEMS
from tests.support.page_tables import PageTable

pytestmark = pytest.mark.timeout(2400)

BUILDER = (
    "buildah --version | cut -d' ' -f3; "
    f"{CLONE}/.venv/bin/python -c 'import sys; print(sys.version.split()[0])'"
)
# Light tests, and some that really build, pack and run.
SOME_TESTS = " ".join(
    f"tests/toolkit/{name}.py"
    for name in (
        "recipe/test_recipe",
        "build/test_dockerfile",
        "run/test_runtime",
        "squash/test_pack",
    )
)


def test_quickstart(system: str, user: str, kept: Path, results: PageTable) -> None:
    """From nothing to a tested image with README's first command; then the same once more."""
    with machine(SYSTEMS[system], kept) as fresh:
        begin(fresh, user)
        before = fresh.run(f"cd {CLONE} && make doctor; ls", user=user)
        assert "MISSING buildah" in before.output and "MISSING mksquashfs" in before.output
        assert ".venv" not in before.output.split() and "build" not in before.output.split()
        first = quickstart(fresh, user)
        assert first.code == 0, first.output
        assert "passed: 22 of 22 checks" in first.output
        assert "copies all layers whole" not in first.output
        again = quickstart(fresh, user)
        assert again.code == 0, again.output
        assert again.output.count("already done") == 3
        followed = fresh.run(f"cd {CLONE} && {next_command(again)} < /dev/null", user=user)
        assert followed.code == 0, followed.output
        after = fresh.run(f"cd {CLONE} && make doctor", user=user)
        assert after.code == 0, after.output
        version, python = fresh.run(BUILDER, user=user).output.split()
        results.note(
            SYSTEMS[system].title,
            user,
            Python=python,
            builder=f"buildah {version}",
            make_quickstart=f"{first.seconds:.0f} s",
            again=f"{again.seconds:.1f} s",
        )


def test_set_up_for_the_tests(system: str, kept: Path, results: PageTable) -> None:
    """What `make test` sets up, and a few of the tests, as an ordinary user."""
    with machine(SYSTEMS[system], kept) as fresh:
        begin(fresh, USER)
        done = fresh.run(
            f"cd {CLONE} && ./setup.sh test && .venv/bin/python -m pytest -q {SOME_TESTS}",
            user=USER,
            limit=2000,
        )
        assert done.code == 0, done.output[-4000:]
        passed = re.search(r"(\d+) passed", done.output)
        assert passed is not None
        words = f"{done.seconds:.0f} s, with {passed[1]} tests"
        results.note(SYSTEMS[system].title, USER, **{"make test's set-up": words})


def test_quickstart_goes_on_wherever_it_was_interrupted(kept: Path) -> None:
    """Ctrl-C and kill -9 at any step, followed by the same command again."""
    with machine(SYSTEMS["debian-12"], kept) as fresh:
        begin(fresh, USER)
        for number in range(20):
            how = (signal.SIGINT, signal.SIGKILL)[number % 2]
            ran = quickstart(fresh, USER, after=5 * 1.25**number, how=how)
            # unshare's own message about the end of its child comes last.
            said = [one for one in ran.output.splitlines() if one and "unshare" not in one]
            print(f"{how.name} after {ran.seconds:.0f} s: {said[-2:]}", flush=True)
            assert "Traceback" not in ran.output, ran.output
            if ran.code == 0:
                break
        assert ran.code == 0, ran.output
        assert "passed: 22 of 22 checks" in ran.output


def test_without_sudo_the_packages_are_named_and_with_them_all_works(kept: Path) -> None:
    with machine(SYSTEMS["debian-12"], kept) as fresh:
        fresh.add_user(sudo=False)
        fresh.clone(USER)
        refused = quickstart(fresh, USER)
        assert refused.code != 0
        named = re.search(r"apt-get install (?P<packages>[^\n]+)", refused.output)
        assert named is not None, refused.output
        installed = fresh.run(
            "apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "
            f"--no-install-recommends {named['packages']}"
        )
        assert installed.code == 0, installed.output
        done = quickstart(fresh, USER)
        assert done.code == 0, done.output


def begin(fresh: Machine, user: str) -> None:
    if user == USER:
        fresh.add_user()
    fresh.clone(user)


def quickstart(
    fresh: Machine, user: str, after: float | None = None, how: signal.Signals = signal.SIGINT
) -> Ran:
    return fresh.run(f"cd {CLONE} && make quickstart", user=user, after=after, how=how)


def next_command(ran: Ran) -> str:
    """Return the command that the output ends with."""
    last = ran.output.splitlines()[-1]
    assert last.startswith("next: "), ran.output
    return last.removeprefix("next: ")
