"""`sqshforge run` with enroot on the PATH: a stand-in that does what enroot was observed to do.

test_real_enroot.py does the same with the real enroot, where it is installed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqshforge.errors import MissingError
from sqshforge.host.programs import Programs, Result
from sqshforge.image.enroot import ImageConfig
from sqshforge.run import enroot, zipapp
from sqshforge.run.start import RUNTIMES, run
from tests.support import containers, enroots, processes, tiny_root

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("usual_hangup")]

# Like a training job, whose root exists as long as its server; a server that has ended, as a
# zombie, has no command line.
SAVES = """
trap 'sleep 0.3; grep -q fuse /proc/$(cat $0/server)/cmdline && touch $0/saved; exit 85' TERM
trap "" USR1 USR2 HUP INT QUIT
touch $0/ready
while :; do sleep 0.05; done
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def tiny(images: Path) -> Path:
    config = ImageConfig(reference="tiny", env=("COLOUR=image", "PATH=/usr/bin:/bin"))
    return tiny_root.sqsh(images / "tiny", config)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, images: Path) -> Iterator[Path]:
    """The folder where the stand-in, found first, records what it does; nothing else is left."""
    folder = tmp_path / "stand-in"
    folder.mkdir()
    with containers.watched(images), enroots.patched(enroots.stand_in(folder)):
        yield folder


def started(tiny: Path, *words: str | Path) -> Result:
    return Programs().attempt(enroots.argv(tiny, *words))


def inside(done: Result) -> dict[str, str]:
    """Return the environment that `env` printed."""
    assert done.code == 0, done.err
    return dict(line.split("=", 1) for line in done.out.splitlines())


def test_the_words_of_the_call(tiny: Path, place: Path, tmp_path: Path) -> None:
    mounts = ("--mount", f"{tmp_path}:/data:ro", "--mount", "/etc/hosts:/h")
    done = started(tiny, *mounts, "--env", "A=b c=d", "--", "sh", "-c", "exit 42", "")
    assert done.code == 42, done.err
    words = enroots.words(place)
    conf = words[words.index("--conf") + 1]
    assert Path(conf) == Path(enroot.__file__).with_name("enroot.conf")
    assert words[:4] == ["start", "--rw", "--conf", conf]
    assert words[4:8] == [
        *("--mount", f"{tmp_path}:/data:x-create=dir,bind,ro"),
        *("--mount", "/etc/hosts:/h:x-create=file,rbind,rw"),
    ]
    assert words[-5:] == [str(tiny), "sh", "-c", "exit 42", ""]


def test_a_mount_with_a_blank_in_its_name(tiny: Path, place: Path, tmp_path: Path) -> None:
    """Enroot refuses blanks, but accepts their escapes for an fstab."""
    source = tmp_path / "my data\\1"
    source.mkdir()
    done = started(tiny, "--mount", f"{source}:/in here", "--", "true")
    assert done.code == 0, done.err
    words = enroots.words(place)
    asked = rf"{tmp_path}/my\040data\1341:/in\040here:x-create=dir,rbind,rw"
    assert words[words.index("--mount") + 1] == asked


def test_the_job_and_its_secrets_get_in_and_no_value_is_among_the_words(
    tiny: Path, place: Path
) -> None:
    host = {
        "SLURM_JOB_NUM_NODES": "1234567",
        "SLURMD_NODENAME": "node-1",
        "AWS_SECRET_ACCESS_KEY": "se cr et",
        "WANDB_API_KEY": "'hidden' key",
        "https_proxy": "http://proxy:3128",
        "COLOUR": "host",
        "PYTHONPATH": "/host",
    }
    with enroots.patched(host):
        seen = inside(started(tiny, "--", "env"))
    got_in = {name for name in host if seen.get(name) == host[name]}
    assert got_in == set(host) - {"COLOUR", "PYTHONPATH"}
    assert seen["COLOUR"] == "image" and "PYTHONPATH" not in seen and "STAND_IN" not in seen
    assert seen["PATH"] == "/usr/bin:/bin"
    words = "\n".join(enroots.words(place))
    assert not [value for value in host.values() if value in words]


def test_a_value_of_several_lines_is_left_out_and_makes_no_variables(tiny: Path) -> None:
    with enroots.patched({"SLURM_JOB_COMMENT": "one\nLD_PRELOAD=/evil.so", "SLURM_JOB_ID": "7"}):
        seen = inside(started(tiny, "--", "env"))
    assert seen["SLURM_JOB_ID"] == "7"
    assert "SLURM_JOB_COMMENT" not in seen and "LD_PRELOAD" not in seen


def test_what_is_asked_for_wins_and_does_not_lead_enroot_itself_astray(
    tiny: Path, place: Path
) -> None:
    """Even if the names are those that enroot's shell uses itself."""
    asked = {"SLURM_JOB_ID": "87654321", "COLOUR": "asked", "TOKEN": "se cr et", "UID": "12345678"}
    asked |= {"PATH": "/bin:/no", "LD_PRELOAD": "/no.so", "BASH_ENV": "/no.sh", "name": "my own"}
    options = [f"--env={name}={value}" for name, value in asked.items()]
    with enroots.patched({"SLURM_JOB_ID": "7654321"}):
        seen = inside(started(tiny, *options, "--", "env"))
    assert {name: seen[name] for name in asked} == asked
    words = "\n".join(enroots.words(place))
    assert not [value for value in asked.values() if value in words]


@pytest.mark.parametrize("pair", ["A=1\nB=2", "A-B=1", "1A=1", "É=1"])
def test_a_variable_that_enroot_cannot_pass_is_refused(tiny: Path, place: Path, pair: str) -> None:
    done = started(tiny, "--env", pair, "--", "true")
    assert done.code == 2
    what, where, fix = done.err.splitlines()
    assert what.startswith("error: enroot ") and where == "  where: --env" and "builtin" in fix
    assert not (place / "words").exists()


@pytest.fixture(params=["command", "carried"])
def saving(
    request: pytest.FixtureRequest, tiny: Path, place: Path, tmp_path: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A container ready to save at TERM, started by `sqshforge run` or an image's copy of it."""
    command = ("--env", enroots.marked(), "--", "sh", "-c", SAVES, str(place))
    argv = enroots.argv(tiny, *command)
    if request.param == "carried":
        file = tmp_path / zipapp.NAME
        file.write_bytes(zipapp.runtime())
        (tmp_path / "tmp").mkdir()
        argv = [sys.executable, "-I", "-S", str(file), str(tiny), *command]
    with (
        enroots.patched({"TMPDIR": str(tmp_path / "tmp")}),
        containers.started(argv) as process,
    ):
        assert containers.until((place / "ready").exists)
        assert not list((tmp_path / "tmp").glob("*"))  # the copy's file is read and removed
        yield process


@pytest.mark.parametrize(
    "names", ["TERM", "CONT TERM", "USR1 TERM", "HUP USR2 INT QUIT ALRM TSTP CONT TERM"]
)
def test_signals_to_every_process_leave_the_root_until_the_command_has_saved(
    saving: subprocess.Popen[bytes], place: Path, names: str
) -> None:
    """Slurm sends CONT and TERM at scancel, and USR1 and USR2 if a user wishes."""
    for name in names.split():
        if name in ("ALRM", "TSTP"):  # by default they end and stop the command
            beside = processes.having({containers.MARK: os.environ[containers.MARK]})
            processes.kill(set(beside) - {saving.pid}, signal.Signals[f"SIG{name}"])
        else:
            containers.signal_all(signal.Signals[f"SIG{name}"])
    assert saving.wait(20) == 85
    assert (place / "saved").exists()


def test_a_supervisor_that_is_slow_to_start_is_waited_for(
    tiny: Path, place: Path, tmp_path: Path
) -> None:
    """The signals would kill it, and once the root is entered, its programs are out of reach."""
    slow = tmp_path / "bash"
    slow.write_text('#!/bin/bash\nsleep 0.5\nexec -a fuse-supervisor /bin/bash "$@"\n')
    slow.chmod(0o755)
    argv = enroots.argv(tiny, "--env", enroots.marked(), "--", "sh", "-c", SAVES, str(place))
    with enroots.patched({"STAND_IN_BASH": str(slow)}), containers.started(argv) as process:
        assert containers.until((place / "ready").exists)
        for number in (signal.SIGCONT, signal.SIGTERM):
            containers.signal_all(number)
        assert process.wait(20) == 85
    assert (place / "saved").exists()


def test_kill_9_of_the_command_ends_what_is_beside_it(saving: subprocess.Popen[bytes]) -> None:
    saving.kill()
    saving.wait()
    # The fixture `place` checks after every test that nothing is left.


def test_signals_have_their_usual_meaning_inside(tiny: Path) -> None:
    done = started(tiny, "--", "sh", "-c", "cat /proc/self/status")
    masks = dict(line.split(":\t") for line in done.out.splitlines() if line.startswith("Sig"))
    assert int(masks["SigIgn"], 16) & 0x7FFFFFFF == 0


def test_without_squashfuse_enroot_tells_it(tiny: Path, tmp_path: Path) -> None:
    for name in ("bash", "env", "unsquashfs"):
        found = Programs().which(name)
        assert found is not None
        (tmp_path / name).symlink_to(found)
    (tmp_path / "enroot").symlink_to(enroots.STAND_IN / "enroot")
    with enroots.patched({"PATH": str(tmp_path)}):
        done = started(tiny, "--", "true")
    assert (done.code, done.err) == (1, "[ERROR] Command not found: squashfuse\n")


def test_the_runtime_that_is_asked_for_is_taken(tiny: Path, place: Path, tmp_path: Path) -> None:
    carried = tmp_path / zipapp.NAME
    carried.write_bytes(zipapp.runtime())
    for argv in ([sys.executable, "-m", "sqshforge", "run"], [sys.executable, str(carried)]):
        for runtime in (*RUNTIMES, None):
            option = [f"--runtime={runtime}"] if runtime else []
            words = [*option, str(tiny), "--", "env", "--version"]
            done = Programs().attempt([*argv, *words])
            assert done.code == 0, done.err
            assert (place / "words").exists() == (runtime != "builtin")
            (place / "words").unlink(missing_ok=True)
        done = Programs().attempt([*argv, "--runtime=other", tiny, "--", "true"])
        assert done.code == 2 and "--runtime" in done.err


def test_enroot_asked_for_and_not_installed_is_reported(tiny: Path, tmp_path: Path) -> None:
    class Without(Programs):
        def which(self, program: str) -> Path | None:
            return None if program == "enroot" else super().which(program)

    with pytest.raises(MissingError, match="enroot is not installed") as caught:
        run(tiny, ["true"], runtime="enroot", programs=Without())
    assert caught.value.exit_code == 3 and "--runtime=builtin" in caught.value.fix
