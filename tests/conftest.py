"""Fixtures that several parts share; everything in them is the real thing."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter

ROOT = Path(__file__).resolve().parent.parent
JOBS = ROOT / "tests/training/job"
pytest_plugins = ["tests.support.process_guard"]

# Before torch is imported. Tests run side by side, a core each; with more threads than cores
# OpenMP's waiting took four times the processor's time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As of torch 2.4, in seconds; before, torchrun looked every five seconds for processes that ended.
os.environ.setdefault("PET_MONITOR_INTERVAL", "0.1")
# Before Triton is imported, as torch may do: without a GPU its interpreter runs kernels.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Hundreds of processes import training/: a fifth of a small run's time is compiling it anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout under test."""
    return ROOT


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No base of a test's goes to the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SQSHFORGE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def overlays() -> None:
    """Buildah and skopeo keep and find what is an ordinary user's where sqshforge looks for it."""
    from sqshforge.host import rootless
    from sqshforge.network import access

    access.choose_login_file()
    programs = Programs()
    buildah = programs.which("buildah")
    if buildah is not None:
        rootless.choose_buildah_storage(buildah, programs)


@pytest.fixture(scope="session")
def packed_image() -> Iterator[Path]:
    """build/cpu-mamba.sqsh of this very checkout, built and packed once by buildah."""
    from sqshforge import engine, project, recipe
    from sqshforge import lock as locks
    from sqshforge.build import build
    from sqshforge.host import rootless
    from sqshforge.hot import HotList
    from sqshforge.image import address
    from sqshforge.squash import pack

    path = ROOT / "build" / "cpu-mamba.sqsh"
    path.parent.mkdir(exist_ok=True)
    with (path.parent / ".tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of several test processes does the work
        programs, reporter = Programs(), Reporter(quiet=True)
        what = recipe.find("cpu-mamba", ROOT / "recipes")
        locked = locks.load(what, ROOT / "recipes")
        chosen = engine.choose("buildah", programs)
        built = build.build(what, locked, chosen, ROOT, programs, reporter)
        image = address.parse(built.source, programs)
        hot = HotList.read(project.Project(ROOT).hot_list("cpu-mamba"))
        options = pack.Options.of("shared", hot=hot)  # as make sqsh has it
        rootless.call_as_root(
            lambda: pack.pack(image, path, options, programs, reporter), built.source, programs
        )
    yield path


@pytest.fixture
def no_docker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No docker daemon answers, whatever runs on this machine."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")


@pytest.fixture(scope="session")
def as_root() -> None:
    """A fixture that only root can set up asks for this: it marks the tests as taking root."""


@pytest.fixture
def usual_hangup() -> Iterator[None]:
    """What the test starts has SIGHUP's usual meaning, also under nohup, which has it ignored.

    By a handler, which nobody inherits: the tests themselves go on after a hangup, as nohup says.
    """
    before = signal.signal(signal.SIGHUP, lambda number, frame: None)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True)
def usual_interrupt() -> Iterator[None]:
    """Ctrl-C ends the tests, whatever a run in this process has made of it (StopRequest)."""
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure() -> None:
    """A shell that starts this in the background has two signals ignored, and so has all below it.

    The tests send them to programs that they started, so they have their usual meaning here.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by what is marked here
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the long ones: at the end, the other processes would wait for them.

    Then come those of jobs, which wait more than they compute: while there are others beside them,
    these use the processors.

    Mark what takes root by a fixture, and let each report carry why its test may be skipped. What
    takes the real enroot is no part of a run that does not ask for it by its mark.
    """
    if not re.search(r"(?<!not )\benroot\b", config.option.markexpr):
        of_enroot = [item for item in items if item.get_closest_marker("enroot")]
        items[:] = [item for item in items if item not in of_enroot]
        config.hook.pytest_deselected(items=of_enroot)
    elif shutil.which("enroot") is None:
        raise pytest.UsageError("enroot is not on the PATH: the tests marked enroot take it")
    items.sort(key=lambda item: (item.get_closest_marker("long") is None, item.path.parent != JOBS))
    for item in items:
        if "as_root" in getattr(item, "fixturenames", ()):
            item.add_marker("root")
        if _needs_root(item):
            item.user_properties.append(("root", "taken"))
        marker = item.get_closest_marker("hardware")
        if marker is not None:
            item.user_properties.append(("hardware", marker.args[0]))


@pytest.hookimpl(tryfirst=True)  # before fixtures are set up
def pytest_runtest_setup(item: pytest.Item) -> None:
    if _needs_root(item):
        pytest.skip("takes root")


def _needs_root(item: pytest.Item) -> bool:
    """Tell whether a test takes root and we are not root: as root nothing is left out for it."""
    return os.geteuid() != 0 and item.get_closest_marker("root") is not None


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A skipped test is a failure, unless it takes hardware or rights that are not here."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and session.exitstatus == 0 and _skipped_without_reason(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _skipped(reporter: pytest.TerminalReporter, why: str) -> list[pytest.TestReport]:
    """The skipped tests that carry a reason of this kind."""
    skipped = reporter.stats.get("skipped", [])
    return [one for one in skipped if why in dict(getattr(one, "user_properties", ()))]


def _skipped_without_reason(reporter: pytest.TerminalReporter) -> list[pytest.TestReport]:
    known = [*_skipped(reporter, "hardware"), *_skipped(reporter, "root")]
    return [one for one in reporter.stats.get("skipped", []) if one not in known]


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest's own: below its summary
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """End with the counts and with the reason of every skipped test, in plain words."""
    yield
    stats = terminalreporter.stats
    passed, skipped = (len(stats.get(name, [])) for name in ("passed", "skipped"))
    failed = len(stats.get("failed", [])) + len(stats.get("error", []))
    terminalreporter.section("tests")
    left_out = _skipped(terminalreporter, "root")
    for one in stats.get("skipped", []):
        if one not in left_out:
            terminalreporter.line(f"skipped {one.nodeid}: {one.longrepr[2]}")
    for one in _skipped_without_reason(terminalreporter):
        terminalreporter.line(f"FAILED {one.nodeid}: skipped, and names no missing hardware")
    terminalreporter.line(
        f"{passed + failed + skipped} tests: {passed} passed, {failed} failed, {skipped} skipped"
    )
    if left_out:
        terminalreporter.line(
            f"{len(left_out)} of the skipped tests take root; to run them: sudo make test-root"
        )
