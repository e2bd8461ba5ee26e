"""Builds that fail, are killed, or must not start: one clear reason, and nothing left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sqshforge import engine as engines
from sqshforge import lock, recipe
from sqshforge.build import base_image
from sqshforge.build import build as building
from sqshforge.engine import Engine
from sqshforge.errors import MissingError, RequestError, WorkError
from sqshforge.host import temporary
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter
from sqshforge.network.mirrors import Mirrors
from tests.support import checkouts, containers, processes
from tests.support.engines import CLIENT
from tests.support.engines import docker_host_fixture as docker_host_fixture
from tests.support.engines import engine_fixture as engine_fixture
from tests.support.engines import storage_fixture as storage_fixture

pytestmark = pytest.mark.processes

PROGRAMS = Programs()


def slow(place: Path) -> str:
    """Return an instruction that is in no cache, and slow enough to be killed in the middle."""
    return (
        f"RUN --mount=type=secret,id=ca \\\n    : {place}; test -e /run/secrets/ca && i=0"
        " && while [ $i -lt 40 ]; do sleep 0.1; i=$((i + 1)); done"
    )


def working_containers(engine: Engine) -> list[str]:
    if engine.name == "docker":
        return PROGRAMS.capture([CLIENT, "ps", "--all", "--quiet"]).split()
    listed = json.loads(PROGRAMS.capture(["buildah", "containers", "--json"]))
    return [one["id"] for one in listed or ()]


def secrets(root: Path) -> Path:
    return root / "build" / checkouts.TARGET / "secrets"


def at_work(process: subprocess.Popen[str]) -> bool:
    """Tell whether the slow instruction of a build is running."""
    if process.poll() is not None:
        raise RuntimeError(process.communicate()[1])
    return any(
        processes.command(int(path.name)) == "sleep 0.1"
        for path in Path("/proc").iterdir()
        if path.name.isdigit()
    )


def test_a_build_that_fails_tells_why(engine: Engine, tmp_path: Path) -> None:
    root = checkouts.copy(tmp_path / "x", "RUN echo 'the reason why' && exit 7")
    with pytest.raises(WorkError, match="the reason why") as caught:
        checkouts.build(engine, root)
    assert "7" in caught.value.what
    assert not secrets(root).exists()
    assert working_containers(engine) == []


def test_a_package_that_does_not_exist_is_named(engine: Engine, tmp_path: Path) -> None:
    root = checkouts.copy(
        tmp_path / "x", '{{ apt.install(["sqshforge-no-such-package"], "system") }}'
    )
    with checkouts.command(root, "--engine", engine.name) as process:
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (1, "")
    assert "Unable to locate package sqshforge-no-such-package" in err
    assert "Traceback" not in err
    assert not secrets(root).exists()
    assert working_containers(engine) == []


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_build_that_is_ended_leaves_nothing(
    how: signal.Signals, engine: Engine, tmp_path: Path
) -> None:
    root = checkouts.copy(tmp_path / "x", slow(tmp_path))
    with checkouts.command(root, "--engine", engine.name) as process:
        assert containers.until(lambda: at_work(process), 120)
        assert secrets(root).stat().st_mode & 0o777 == 0o700
        process.send_signal(how)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 128 + how, err
    assert "Traceback" not in err
    assert not secrets(root).exists()
    assert containers.until(lambda: working_containers(engine) == [], 120)


def test_what_a_killed_build_leaves_goes_with_the_next(engine: Engine, tmp_path: Path) -> None:
    root = checkouts.copy(tmp_path / "x", slow(tmp_path))
    with checkouts.command(root, "--engine", engine.name) as process:
        assert containers.until(lambda: at_work(process), 120)
        process.kill()
        process.wait()
        assert not checkouts.build(engine, root).up_to_date
        assert not secrets(root).exists()
        # The engine's own process outlives its caller, but ends and cleans up by itself.
        assert containers.until(lambda: working_containers(engine) == [], 120)
    assert checkouts.build(engine, root).up_to_date


def test_of_two_builds_one_waits_and_has_nothing_to_do(engine: Engine, tmp_path: Path) -> None:
    root = checkouts.copy(tmp_path / "x", slow(tmp_path))
    with checkouts.command(root, "--engine", engine.name) as first:
        assert containers.until(lambda: at_work(first), 120)
        with checkouts.command(root, "--engine", engine.name) as second:
            shown, waited = second.communicate(timeout=300)
        out, err = first.communicate(timeout=300)
    assert (first.returncode, second.returncode) == (0, 0), err + waited
    assert "built in" in out and "up to date" in shown
    assert "waiting for another build of cpu-mamba" in waited


@pytest.fixture
def buildah(storage: None) -> Engine:
    return engines.choose("buildah", PROGRAMS)


def test_the_containers_of_a_killed_build_go_with_the_next_and_no_others(
    buildah: Engine, tmp_path: Path
) -> None:
    """Nothing of the build survives: its own process, buildah and all below it are killed."""
    root = checkouts.copy(tmp_path / "x", slow(tmp_path))
    with checkouts.command(root, "--engine", "buildah") as process:
        assert containers.until(lambda: at_work(process) and working_containers(buildah) != [], 120)
        processes.kill([process.pid, *processes.descendants(process.pid)])
        process.wait()
    left = working_containers(buildah)
    assert left
    image = json.loads(PROGRAMS.capture(["buildah", "inspect", left[-1]]))["FromImageID"]
    looked_into = PROGRAMS.capture(["buildah", "from", image]).strip()  # by a user looking into it
    assert not checkouts.build(buildah, root).up_to_date
    (kept,) = working_containers(buildah)
    PROGRAMS.capture(["buildah", "rm", looked_into])
    assert kept not in left and working_containers(buildah) == []


def test_a_build_that_fails_leaves_the_containers_of_others(
    buildah: Engine, tmp_path: Path
) -> None:
    """Another build's looks like its own, and a packer's must not be touched by anyone."""
    root = checkouts.copy(tmp_path / "first", slow(tmp_path))
    failing = checkouts.copy(tmp_path / "second", f"RUN : {tmp_path}; sleep 3; exit 7")
    with checkouts.command(failing, "--engine", "buildah") as second:
        assert containers.until(lambda: working_containers(buildah) != [], 120)
        with checkouts.command(root, "--engine", "buildah") as first:
            assert containers.until(lambda: at_work(first), 120)
            ours = temporary.name("pack")
            image = PROGRAMS.capture(["buildah", "images", "--quiet"]).split()[0]
            PROGRAMS.capture(["buildah", "from", "--name", ours, image])
            _, reported = second.communicate(timeout=300)
            _, err = first.communicate(timeout=300)
    assert (first.returncode, second.returncode) == (0, 1), err + reported
    assert PROGRAMS.attempt(["buildah", "rm", ours]).code == 0
    assert containers.until(lambda: working_containers(buildah) == [], 120)


def test_a_build_has_the_limits_of_its_caller(buildah: Engine, tmp_path: Path) -> None:
    """Left alone, buildah may ask for higher limits, which not every root may have."""
    files = PROGRAMS.capture(["sh", "-c", "ulimit -H -n"]).strip()
    root = checkouts.copy(tmp_path / "root", lines=f'RUN test "$(ulimit -H -n)" = {files}')
    assert checkouts.build(buildah, root).image.size > 0


def edited(root: Path, old: str, new: str) -> None:
    path = root / "recipes" / "cpu-mamba.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_disk_too_small_is_noticed_before_anything(buildah: Engine, tmp_path: Path) -> None:
    root = checkouts.copy(tmp_path / "x")
    edited(root, "disk_gb: 5.0", "disk_gb: 1000000.0")
    began = time.monotonic()
    with checkouts.command(root, "--engine", "buildah") as process:
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (3, "")
    assert "needs 1,000,000,000,000,000 bytes" in err
    assert f"where: {buildah.storage()}" in err
    assert not (root / "build" / checkouts.TARGET).exists()
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda root: edited(root, "numpy==2.3.4", "numpy==2.3.5"), "out of date"),
        (lambda root: edited(root, "[mamba_fsdp,", "[no_such,"), "launcher no_such"),
        (lambda root: (root / "images/cpu-mamba.Dockerfile.j2").unlink(), "does not exist"),
        (lambda root: (root / "recipes/locks/cpu-mamba.lock").unlink(), "no lock"),
    ],
    ids=["lock", "launcher", "template", "no lock"],
)
def test_a_recipe_that_does_not_fit_is_refused(
    spoil: Callable[[Path], object], said: str, buildah: Engine, tmp_path: Path
) -> None:
    root = checkouts.copy(tmp_path / "x")
    spoil(root)
    with pytest.raises(RequestError, match=said):
        checkouts.build(buildah, root)
    assert not (root / "build" / checkouts.TARGET).exists()


def test_no_registry_and_no_bootstrap_is_something_missing(buildah: Engine, tmp_path: Path) -> None:
    root = checkouts.copy(tmp_path / "x")
    text = (root / "recipes/cpu-mamba.yaml").read_text()
    head, _, rest = text.partition("  bootstrap:")
    text = head + rest.partition("\n\n")[2]
    text = text.replace("debian:bookworm-slim", "localhost:1/no/such:1")
    (root / "recipes/cpu-mamba.yaml").write_text(text)
    what = recipe.find("cpu-mamba", root / "recipes")
    recipes = checkouts.ROOT / "recipes"
    locked = lock.load(recipe.find("cpu-mamba", recipes), recipes)
    locked = locked.model_copy(
        update={"base": lock.LockedImage(image=what.base.image, digest=None)}
    )
    with pytest.raises(MissingError, match="localhost:1/no/such:1"):
        base_image.prepare(
            what,
            locked,
            base_image.BaseImageProvider(
                engine=buildah,
                cache=tmp_path,
                keys=tmp_path,
                mirrors=Mirrors(),
                programs=PROGRAMS,
                reporter=Reporter(quiet=True),
            ),
            [],
        )


def test_a_package_that_no_index_has_gets_the_way_to_it(root: Path) -> None:
    locked = lock.read("cpu-mamba", root / "recipes")
    said = "ERROR: No matching distribution found for torch==2.13.0+cpu (from -r x)"
    explained = building.explained(WorkError(said), locked)
    assert "does not find torch==2.13.0+cpu" in explained.fix
    assert "PIP_EXTRA_INDEX_URL" in explained.fix
    other = WorkError("another fault")
    assert building.explained(other, locked) is other
