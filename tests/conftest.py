"""Fixtures that several parts share; none of them mocks anything."""

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

# Set before torch is imported. Tests run side by side, one per core; with more threads than cores,
# OpenMP's busy waiting took four times the processor time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The default as of torch 2.4, in seconds; earlier, torchrun polled for ended processes every five.
os.environ.setdefault("PET_MONITOR_INTERVAL", "0.1")
# Set before Triton is imported, which torch may do: without a GPU, its interpreter runs kernels.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Hundreds of processes import training/: compiling it anew takes a fifth of a small run's time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout under test."""
    return ROOT


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tests' bases out of the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SQSHFORGE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def overlays() -> None:
    """Point buildah and skopeo at an ordinary user's storage and logins, as sqshforge does."""
    from sqshforge.host import rootless
    from sqshforge.network import access

    access.choose_login_file()
    programs = Programs()
    buildah = programs.which("buildah")
    if buildah is not None:
        rootless.choose_buildah_storage(buildah, programs)


@pytest.fixture(scope="session")
def packed_image() -> Iterator[Path]:
    """Build and pack build/cpu-mamba.sqsh of this checkout once, with buildah."""
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
        fcntl.flock(lock, fcntl.LOCK_EX)  # only one of several test processes does the work
        programs, reporter = Programs(), Reporter(quiet=True)
        what = recipe.find("cpu-mamba", ROOT / "recipes")
        locked = locks.load(what, ROOT / "recipes")
        chosen = engine.choose("buildah", programs)
        built = build.build(what, locked, chosen, ROOT, programs, reporter)
        image = address.parse(built.source, programs)
        hot = HotList.read(project.Project(ROOT).hot_list("cpu-mamba"))
        options = pack.Options.of("shared", hot=hot)  # as `make sqsh` does
        rootless.call_as_root(
            lambda: pack.pack(image, path, options, programs, reporter), built.source, programs
        )
    yield path


@pytest.fixture
def no_docker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make sure that no docker daemon answers, even if one runs on this machine."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")


@pytest.fixture(scope="session")
def as_root() -> None:
    """Requested by fixtures that only root can set up, to mark their tests as needing root."""


@pytest.fixture
def usual_hangup() -> Iterator[None]:
    """Give SIGHUP its default effect in what the test starts, even under nohup, which ignores it.

    This sets a handler, which child processes do not inherit, so the tests themselves still survive
    a hangup, as nohup promises.
    """
    before = signal.signal(signal.SIGHUP, lambda number, frame: None)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True)
def usual_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the tests, whatever a run in this process has set for it (StopRequest)."""
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure() -> None:
    """Restore SIGINT and SIGQUIT, which a shell ignores in background jobs and all their children.

    The tests send these signals to programs that they start, which need their usual effect.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by the marks set here
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start with the long tests: at the end, the other processes would have to wait for them.

    Then come the tests of jobs, which wait more than they compute, so that others can use the
    processors meanwhile.

    Also mark tests that need root through a fixture, and record in each report why its test may be
    skipped. Tests that need the real enroot are deselected unless their mark is asked for.
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
    """Tell whether a test needs root and we are not root; root runs every test."""
    return os.geteuid() != 0 and item.get_closest_marker("root") is not None


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if a test was skipped for any reason but missing hardware or rights."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and session.exitstatus == 0 and _skipped_without_reason(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _skipped(reporter: pytest.TerminalReporter, why: str) -> list[pytest.TestReport]:
    """Return the skipped tests that carry a reason of this kind."""
    skipped = reporter.stats.get("skipped", [])
    return [one for one in skipped if why in dict(getattr(one, "user_properties", ()))]


def _skipped_without_reason(reporter: pytest.TerminalReporter) -> list[pytest.TestReport]:
    known = [*_skipped(reporter, "hardware"), *_skipped(reporter, "root")]
    return [one for one in reporter.stats.get("skipped", []) if one not in known]


@pytest.hookimpl(wrapper=True, tryfirst=True)  # wraps pytest's own, to print below its summary
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """End with the counts and the reason for every skipped test, in plain words."""
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
