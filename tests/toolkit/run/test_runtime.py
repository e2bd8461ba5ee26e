"""What a command finds in a container: environment, folders, mounts, a writable root."""

from __future__ import annotations

import hashlib
import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sqshforge import platforms
from sqshforge.host.programs import Programs, Result
from sqshforge.image.enroot import ImageConfig
from tests.support import containers, tiny_root

pytestmark = pytest.mark.processes

VARIABLES = (
    "COLOUR=image",
    "GREETING=two words = one line",
    "BOTH=${HOST_SAYS}/lib:${NOBODY_SAYS}",
    "PATH=/usr/bin",
)


Start = Callable[..., Result]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def tiny(images: Path) -> Path:
    """A sqsh with an environment and a working folder, but no entrypoint."""
    config = ImageConfig(reference="tiny", env=VARIABLES, workdir="/work here", cmd=("pwd",))
    return tiny_root.sqsh(images / "tiny", config)


@pytest.fixture(autouse=True)
def nothing_stays(images: Path) -> Iterator[None]:
    with containers.watched(images):
        yield


@pytest.fixture(params=containers.FUSE)
def start(request: pytest.FixtureRequest, tiny: Path) -> Start:
    """Runs a command in a container whose file is mounted by the kernel, or by squashfuse."""

    def run(*command: str, image: Path = tiny, environment: dict[str, str] | None = None) -> Result:
        return Programs().attempt(
            containers.argv_by(image, *command, environment=environment, fuse=request.param)
        )

    return run


def test_the_image_wins_over_the_host_and_the_request_over_both(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLOUR", "host")
    monkeypatch.setenv("HOST_SAYS", "/opt")
    monkeypatch.setenv("ONLY_HOST", "kept")
    shown = start("env")
    assert shown.code == 0
    lines = shown.out.splitlines()
    assert "COLOUR=image" in lines
    assert "GREETING=two words = one line" in lines
    assert "BOTH=/opt/lib:" in lines
    assert "ONLY_HOST=kept" in lines
    asked = start("env", environment={"COLOUR": "asked", "GREETING": "a=b c"})
    assert {"COLOUR=asked", "GREETING=a=b c"} < set(asked.out.splitlines())


def test_the_path_is_the_image_s_or_the_request_s_whatever_its_profile_says(
    start: Start, images: Path
) -> None:
    def change(root: Path) -> None:
        (root / "etc" / "profile").write_text("export PATH=/bin:/of/the/profile\n")

    config = ImageConfig(reference="path", env=("PATH=/opt/x/bin:/usr/bin:/bin",))
    image = tiny_root.sqsh(images / "path", config, change)
    words = ("sh", "-c", "echo $PATH $given")
    assert start(*words, image=image).out == "/opt/x/bin:/usr/bin:/bin\n"
    asked = {"PATH": "/asked:/bin", "LINES": "1\nPATH=/no"}
    assert start(*words, image=image, environment=asked).out == "/asked:/bin\n"
    image = tiny_root.sqsh(images / "no-path", change=change)
    assert start(*words, image=image).out == "/bin:/of/the/profile\n"


def test_the_image_s_environment_is_not_for_the_programs_that_set_it_up(
    start: Start, images: Path
) -> None:
    """Its PATH and LD_PRELOAD name files of the image, which the host need not have."""
    config = ImageConfig(
        reference="odd", env=("PATH=/opt/of/the/image", "LD_PRELOAD=/opt/of/the/image.so")
    )
    done = start("/bin/sh", "-c", "echo $PATH", image=tiny_root.sqsh(images / "odd", config))
    assert (done.code, done.out) == (0, "/opt/of/the/image\n")
    said = [line for line in done.err.splitlines() if "LD_PRELOAD" in line]
    assert len(said) == 2  # from the loader, for the login shell and for the command


def test_bytes_of_the_environment_come_through(start: Start, images: Path) -> None:
    def add(root: Path) -> None:
        with (root / "etc" / "environment").open("ab") as file:
            file.write(b"LATIN=caf\xe9\nFEED=one\x0cPAGE=two\n")

    image = tiny_root.sqsh(images / "bytes", change=add)
    done = start("sh", "-c", "echo $FEED; [ $LATIN = $(printf 'caf\\351') ]", image=image)
    assert (done.code, done.out) == (0, "one\x0cPAGE=two\n")


def test_a_caller_without_a_language_leaves_the_image_its_own(
    start: Start, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python then uses C.UTF-8, and puts that into its environment."""
    for name in [one for one in os.environ if one == "LANG" or one.startswith("LC_")]:
        monkeypatch.delenv(name)
    config = ImageConfig(reference="own", env=("LC_CTYPE=de_DE.UTF-8", "PATH=/usr/bin"))
    image = tiny_root.sqsh(images / "own", config)
    assert start("sh", "-c", "echo $LC_CTYPE", image=image).out == "de_DE.UTF-8\n"
    monkeypatch.setenv("LC_CTYPE", "C.UTF-8")
    assert start("sh", "-c", "echo $LC_CTYPE", image=image).out == "C.UTF-8\n"


def test_a_command_starts_in_the_working_folder_which_is_made(start: Start) -> None:
    assert start("pwd").out == "/work here\n"


def test_without_a_command_the_image_s_own_is_run(start: Start) -> None:
    assert start().out == "/work here\n"


def test_an_entrypoint_takes_the_arguments_or_the_image_s_command(
    start: Start, images: Path
) -> None:
    config = ImageConfig(
        reference="entry", entrypoint=("sh", "-c", 'echo "<$0>" "<$1>"'), cmd=("its", "own cmd")
    )
    image = tiny_root.sqsh(images / "entry", config)
    assert start(image=image).out == "<its> <own cmd>\n"
    assert start("a", "b  c", image=image).out == "<a> <b  c>\n"


def test_an_image_without_rc_starts_in_the_home_folder(
    start: Start, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = tiny_root.sqsh(images / "bare", change=lambda root: (root / "etc" / "rc").unlink())
    monkeypatch.setenv("HOME", "/root")
    assert start("sh", "-c", 'pwd; echo "$1"', "sh", "x  y", image=image).out == "/root\nx  y\n"
    monkeypatch.setenv("HOME", "/home/no one")
    assert start("pwd", image=image).out == "/home/no one\n"


@pytest.mark.parametrize(
    ("script", "code"), [("exit 7", 7), ("exit 0", 0), ("kill -TERM $$", -15), ("kill -9 $$", -9)]
)
def test_exit_codes_and_deaths_by_a_signal_come_back(start: Start, script: str, code: int) -> None:
    assert start("sh", "-c", script).code == code


def test_a_command_that_is_not_there_is_127_and_one_line(start: Start) -> None:
    done = start("no-such-program", "--flag")
    assert done.code == 127
    assert len(done.err.splitlines()) == 1
    assert "no-such-program: not found" in done.err


@pytest.mark.usefixtures("usual_hangup")
def test_signals_have_their_usual_meaning_inside(start: Start) -> None:
    """Python ignores SIGPIPE; a command that inherited that would not end with its reader."""
    done = start("sh", "-c", "yes | head -n 1; cat /proc/self/status")
    assert done.out.startswith("y\n")
    assert done.err == ""
    masks = dict(line.split(":\t") for line in done.out.splitlines() if line.startswith("Sig"))
    # Only the standard signals, 1 to 31: processes started by make have glibc's own signal 32
    # ignored.
    assert int(masks["SigIgn"], 16) & 0x7FFFFFFF == 0
    assert int(masks["SigBlk"], 16) & 0x7FFFFFFF == 0


def test_standard_input_and_output_pass_through(tiny: Path) -> None:
    letters = bytes(range(256)) * 4096
    script = containers.argv(tiny, "--", "cat")
    done = subprocess.run(script, input=letters, capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (letters, b"")


def test_the_root_can_be_written_to_and_forgets_it(start: Start, tiny: Path) -> None:
    before = hashlib.sha256(tiny.read_bytes()).hexdigest()
    script = "echo new > /etc/passwd && touch /usr/bin/more /here && cat /etc/passwd && ls /here"
    assert start("sh", "-c", script).out == "new\n/here\n"
    assert start("ls", "/here", "/usr/bin/more").code != 0
    assert hashlib.sha256(tiny.read_bytes()).hexdigest() == before


def test_the_host_s_processes_and_devices_are_seen_and_tmp_is_empty(start: Start) -> None:
    done = start("sh", "-c", f"ls -A /tmp; ls -d /proc/{os.getpid()} /dev/null /sys/kernel")
    assert (done.code, done.out) == (0, f"/dev/null\n/proc/{os.getpid()}\n/sys/kernel\n")
    mounts = [line.split()[:3] for line in start("cat", "/proc/mounts").out.splitlines()]
    assert ["tmpfs", "/tmp", "tmpfs"] in mounts
    points = [point for _, point, _ in mounts]
    assert points[0] == "/"
    assert not [point for point in points if "sqshforge" in point]  # the old root is gone


def test_names_come_from_the_host_even_where_the_image_links_to_nowhere(
    start: Start, images: Path
) -> None:
    def change(root: Path) -> None:
        (root / "etc" / "resolv.conf").symlink_to("/run/systemd/resolve/stub-resolv.conf")
        (root / "etc" / "hosts").write_text("")

    image = tiny_root.sqsh(images / "links", change=change)
    shown = start("cat", "/etc/hosts", "/etc/resolv.conf", image=image)
    hosts, resolver = Path("/etc/hosts"), Path("/etc/resolv.conf")
    assert shown.out == hosts.read_text() + resolver.read_text()


def test_links_of_the_image_in_place_of_its_folders_stay_inside(start: Start, images: Path) -> None:
    def change(root: Path) -> None:
        for name in ("etc", "proc", "tmp"):
            (root / name).rename(root / f"real-{name}")
            (root / name).symlink_to(f"/real-{name}")

    image = tiny_root.sqsh(images / "moved", change=change)
    done = start("sh", "-c", "cat /real-etc/hosts; ls -d /real-proc/self; pwd", image=image)
    assert done.out == Path("/etc/hosts").read_text() + "/real-proc/self\n/\n", done.err
    assert not Path("/real-etc").exists()
    assert not Path("/real-proc").exists()


def test_two_containers_of_one_file_at_once(tiny: Path, tmp_path: Path) -> None:
    script = "touch /out/$0; while [ ! -e /out/a ] || [ ! -e /out/b ]; do sleep 0.02; done; ls /out"
    words = ["--mount", f"{tmp_path}:/out", "--", "sh", "-c", script]
    with (
        containers.started(containers.argv(tiny, *words, "a")) as one,
        containers.started(containers.argv(tiny, *words, "b")) as other,
    ):
        assert (one.wait(20), other.wait(20)) == (0, 0)


def test_an_image_of_another_machine_is_one_error_with_a_way_out(
    start: Start, images: Path
) -> None:
    image = tiny_root.sqsh(images / uuid.uuid4().hex, change=tiny_root.of_another_machine)
    shown = start("env", image=image)
    own = platforms.own()
    other = next(name for name in platforms.ALL if name != own)
    assert shown.code == 2
    assert shown.err.splitlines() == [
        f"error: the image is for {other}, and this machine is {own}",
        f"  where: {image}",
        "  fix:   start it on such a machine, or make one for this: "
        f"make sqsh TARGET=... PLATFORM={own}",
    ]
