"""`sqshforge run` with the real enroot: `make test-enroot`, if it is on the PATH."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from sqshforge.host.programs import Programs, Result
from sqshforge.image.enroot import ImageConfig
from sqshforge.run import zipapp
from tests.support import containers, enroots, processes, tiny_root
from tests.support.ordinary_user import existing

pytestmark = [
    pytest.mark.enroot,
    pytest.mark.processes,
    pytest.mark.usefixtures("usual_hangup"),
]

# What Debian's profile does to the PATH of every login shell.
PROFILE = """
if [ "$(id -u)" -eq 0 ]; then
    PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
else
    PATH="/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games"
fi
export PATH
"""
PATH = "/opt/x/bin:/usr/bin:/bin"
RUN = (sys.executable, "-m", "sqshforge", "run", "--runtime=enroot")
TIMES = 5  # tries of each way to end


@dataclass(frozen=True)
class Caller:
    """A user who starts containers, with a folder of their own."""

    place: Path
    argv: Callable[[Sequence[str]], list[str]]  # makes words that run a program as the user
    variables: dict[str, str]

    def run(self, *words: str | Path) -> Result:
        return Programs().attempt(self.argv([*map(str, words)]), env=self.variables)

    def left(self) -> list[Path]:
        """Return the files in enroot's folders and in the folder for temporary files."""
        folders = [Path(self.variables[name]) for name in ("XDG_RUNTIME_DIR", "TMPDIR")]
        return [path for one in folders for path in one.rglob("*") if not path.is_dir()]


@pytest.fixture(scope="module")
def images() -> Iterator[Path]:
    """A folder that every user can read; pytest's own ones are for one user."""
    folder = Path(tempfile.mkdtemp(prefix="sqshforge-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def tiny(images: Path) -> Path:
    def change(root: Path) -> None:
        (root / "etc" / "profile").write_text(PROFILE)
        (root / "usr" / "file").write_text("of the image\n" * 100_000)

    config = ImageConfig(reference="tiny", env=("COLOUR=image", f"PATH={PATH}"), workdir="/work")
    return tiny_root.sqsh(images / "tiny", config, change)


@pytest.fixture(autouse=True)
def nothing_stays(images: Path) -> Iterator[None]:
    with containers.watched(images):
        yield


@pytest.fixture(params=["myself", pytest.param("user", marks=pytest.mark.root)])
def caller(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Caller]:
    """Whoever runs the tests, and if that is root, an ordinary user as well."""
    with ExitStack() as stack:
        made = Caller(tmp_path, lambda words: [*words], enroots.real(tmp_path))
        if request.param == "user":
            user = stack.enter_context(existing())
            variables = user.environment(enroots.real(user.home))
            user.take(user.home)
            made = Caller(user.place, lambda words: user.argv(*words), variables)
        yield made
        assert made.left() == []


def ours(tiny: Path, *words: str | Path) -> list[str]:
    return [*RUN, str(tiny), *map(str, words)]


def inside(done: Result) -> dict[str, str]:
    assert done.code == 0, done.err
    return dict(line.split("=", 1) for line in done.out.splitlines())


def test_the_job_gets_in_and_the_host_does_not(caller: Caller, tiny: Path) -> None:
    host = {
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NODEID": "1",
        "SLURMD_NODENAME": "node-1",
        "MASTER_ADDR": "10.0.0.1",
        "AWS_SECRET_ACCESS_KEY": "se  cr$HOME\\et%s",
        "https_proxy": "http://proxy:3128",
        "PYTHONPATH": "/host",
        "LD_LIBRARY_PATH": "/host",
        "COLOUR": "host",
        "SLURM_JOB_COMMENT": "one\nLD_PRELOAD=/evil.so",
    }
    caller.variables.update(host, PYTHONPATH=caller.variables.get("PYTHONPATH", "/host"))
    seen = inside(caller.run(*ours(tiny, "--", "env")))
    got_in = {name for name in host if seen.get(name) == host[name]}
    out = {"PYTHONPATH", "LD_LIBRARY_PATH", "COLOUR", "SLURM_JOB_COMMENT"}
    assert got_in == set(host) - out
    assert seen["COLOUR"] == "image" and not {"PYTHONPATH", "LD_PRELOAD"} & set(seen)


def test_mounts(caller: Caller, tiny: Path) -> None:
    """Paths contain what an fstab takes for their end; `ro` is read-only."""
    source = caller.place / "my data\\1"
    source.mkdir()
    source.chmod(0o777)
    (source / "file").write_text("of the host\n")
    mounts = ("--mount", f"{source}:/in here", "--mount", f"{source}:/closed:ro")
    script = 'cat "/in here/file" && echo more > "/in here/new" && ! echo more > /closed/other'
    done = caller.run(*RUN, *mounts, tiny, "--", "sh", "-c", script)
    assert (done.code, done.out) == (0, "of the host\n"), done.err
    assert sorted(path.name for path in source.iterdir()) == ["file", "new"]


def test_what_is_asked_for_wins(caller: Caller, tiny: Path) -> None:
    caller.variables["SLURM_JOB_ID"] = "7"
    asked = {"SLURM_JOB_ID": "8", "COLOUR": "a b=c", "PATH": "/bin:/no", "HOME": "/usr"}
    asked |= {"LD_LIBRARY_PATH": "/of/the/image", "UID": "5", "env": "own", "root": "own"}
    options = [f"--env={name}={value}" for name, value in asked.items()]
    seen = inside(caller.run(*ours(tiny, *options, "--", "env")))
    assert {name: seen[name] for name in asked} == asked


def test_the_image_s_path_is_not_that_of_its_profile(caller: Caller, tiny: Path) -> None:
    done = caller.run(*ours(tiny, "--", "sh", "-c", "echo $PATH; pwd"))
    assert (done.code, done.out) == (0, f"{PATH}\n/work\n"), done.err


def test_pyxis_finds_the_image_s_path(caller: Caller, tiny: Path, images: Path) -> None:
    """Pyxis reads the environment of a shell that its own /etc/rc.local starts."""
    conf = images / "pyxis.conf"
    conf.write_text("hooks() {\n\techo 'exec \"$@\"' > ${ENROOT_ROOTFS}/etc/rc.local\n}\n")
    argv: list[str | Path] = [
        "enroot",
        "start",
        "--rw",
        "--conf",
        conf,
        tiny,
        "sh",
        "-c",
        "cat /proc/$$/environ",
    ]
    done = caller.run(*argv)
    assert f"PATH={PATH}" in done.out.split("\0"), done.err


def test_signals_have_their_usual_meaning_inside(caller: Caller, tiny: Path) -> None:
    done = caller.run(*ours(tiny, "--", "cat", "/proc/self/status"))
    masks = dict(line.split(":\t") for line in done.out.splitlines() if line.startswith("Sig"))
    assert int(masks["SigIgn"], 16) & 0x7FFFFFFF == int(masks["SigBlk"], 16) & 0x7FFFFFFF == 0


def test_exit_codes_come_back(caller: Caller, tiny: Path) -> None:
    for script, code in (("exit 37", 37), ("kill -KILL $$", -9), ("kill -TERM $$", -15)):
        done = caller.run(*ours(tiny, "--", "sh", "-c", script))
        assert done.code in (code, 128 - code if code < 0 else code), done.err


@contextmanager
def saving(caller: Caller, tiny: Path, start: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A container that is ready to save in `out`."""
    out = caller.place / "out"
    out.mkdir()
    out.chmod(0o777)
    words = ["--env", enroots.marked(), "--mount", f"{out}:/out", str(tiny)]
    with (
        enroots.patched(caller.variables),
        containers.started(caller.argv([*start, *words, "--", "sh", "-c", enroots.SAVES])) as one,
    ):
        assert containers.until((out / "ready").exists)
        yield one
    shutil.rmtree(out)


def of_test() -> list[int]:
    return processes.having({containers.MARK: os.environ[containers.MARK]})


def beside() -> list[str]:
    """Return the names of the processes that serve the root's files."""
    names = [processes.command(pid).partition(" ")[0] for pid in of_test()]
    return sorted(name for name in names if "fuse" in name)


@pytest.mark.parametrize("overlay", ["y", "n"])
@pytest.mark.parametrize("names", ["TERM", "CONT TERM", "USR1 HUP CONT TERM"])
def test_signals_to_every_process_leave_the_root_until_the_command_has_saved(
    caller: Caller, tiny: Path, names: str, overlay: str
) -> None:
    """Uses the kernel's overlay, and fuse-overlayfs."""
    caller.variables["ENROOT_NATIVE_OVERLAYFS"] = overlay
    servers = ["squashfuse"] if overlay == "y" else ["fuse-overlayfs", "squashfuse"]
    for _ in range(TIMES):
        with saving(caller, tiny, RUN) as process:
            assert beside() == sorted(["fuse-supervisor", *servers])
            for name in names.split():
                containers.signal_all(signal.Signals[f"SIG{name}"])
            assert process.wait(60) == 85
            saved = (caller.place / "out" / "saved").read_text()
            assert saved == "of the image\n" * 100_000
        assert containers.until(lambda: not of_test(), 5)


def test_kill_9_of_the_command_ends_what_is_beside_it(caller: Caller, tiny: Path) -> None:
    for _ in range(TIMES):
        with saving(caller, tiny, RUN) as process:
            process.kill()
            process.wait()
            assert containers.until(lambda: not of_test(), 5)


def test_kill_9_of_every_process(caller: Caller, tiny: Path) -> None:
    with saving(caller, tiny, RUN) as process:
        processes.kill(of_test())
        process.wait()


def test_the_copy_that_an_image_carries_does_the_same(caller: Caller, tiny: Path) -> None:
    file = caller.place / zipapp.NAME
    file.write_bytes(zipapp.runtime())
    with saving(caller, tiny, ["/usr/bin/python3", "-I", "-S", str(file)]) as process:
        for name in ("CONT", "TERM"):
            containers.signal_all(signal.Signals[f"SIG{name}"])
        assert process.wait(60) == 85


def test_two_containers_of_one_file_at_once(caller: Caller, tiny: Path) -> None:
    """When one ends, the other keeps its root."""
    with saving(caller, tiny, RUN) as first:
        done = caller.run(*ours(tiny, "--", "cat", "/usr/file"))
        assert done.code == 0
        containers.signal_all(signal.SIGCONT)
        first.terminate()
        assert first.wait(60) == 85
