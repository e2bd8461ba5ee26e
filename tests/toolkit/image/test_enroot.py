"""The four files of enroot: their exact text, and the start script run by a real shell."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from sqshforge.image import enroot
from sqshforge.image.enroot import ImageConfig

CONFIG = ImageConfig(
    reference="dockerd://image:1",
    env=("PATH=/bin", "GREETING=hello = ${USER} 'x'", "EMPTY="),
    entrypoint=("/bin/say", "it's"),
    cmd=("a b",),
    workdir="/work dir",
    volumes=("/scratch", "/data disk"),
    labels=(("org.title", "two\nlines"), ("author", "A. Nobody")),
)
SHOW = ("printf", "%s|")


def test_the_four_files_and_no_other() -> None:
    files = enroot.files(CONFIG)
    assert sorted(files) == ["etc/environment", "etc/fstab", "etc/rc", "etc/rc.local"]
    assert files["etc/environment"] == b"PATH=/bin\nGREETING=hello = ${USER} 'x'\nEMPTY=\n"
    assert files["etc/fstab"] == (
        rb"${ENROOT_ROOTFS}/data\040disk /data\040disk none x-create=dir,bind,rw,nosuid,nodev"
        b"\n${ENROOT_ROOTFS}/scratch /scratch none x-create=dir,bind,rw,nosuid,nodev\n"
    )
    assert all(line.startswith(b"#") for line in files["etc/rc.local"].splitlines())


def test_the_start_script_in_full() -> None:
    assert enroot.rc(CONFIG) == (
        "#!/bin/sh\n"
        "# Written by sqshforge; the .json file beside the image says from what.\n"
        "# author A. Nobody\n"
        "# org.title two lines\n"
        "# The PATH that this was started with: a login shell's profile may set another.\n"
        "given=$({ tr '\\n\\0' '\\1\\n' < /proc/$$/environ "
        "| sed -n 's/^PATH=//p'; } 2> /dev/null)\n"
        '[ -z "$given" ] || export PATH="$given"\n'
        "unset given\n"
        "mkdir -p '/work dir' 2> /dev/null\n"
        "cd '/work dir' && unset OLDPWD || exit 1\n"
        "\n"
        "if [ -s /etc/rc.local ]; then\n"
        "    . /etc/rc.local\n"
        "fi\n"
        "\n"
        "if [ $# -gt 0 ]; then\n"
        "    exec /bin/say 'it'\"'\"'s' \"$@\"\n"
        "else\n"
        "    exec /bin/say 'it'\"'\"'s' 'a b'\n"
        "fi\n"
    )


def test_an_image_without_a_path_keeps_that_of_the_profile() -> None:
    script = enroot.rc(replace(CONFIG, env=("GREETING=PATH=/bin",)))
    assert "PATH" not in script and "given" not in script


def test_what_each_build_of_ours_changes_is_not_in_the_start_script() -> None:
    """In an image that is not ours it stays, as in enroot."""
    changing = (
        ("org.opencontainers.image.created", "2026-01-01T00:00:00Z"),
        ("org.opencontainers.image.revision", "0123abc"),
    )
    theirs = ImageConfig(reference="x", labels=(*changing, ("a", "b")))
    assert "2026-01-01" in enroot.rc(theirs) and "0123abc" in enroot.rc(theirs)
    ours = replace(theirs, labels=(*theirs.labels, ("io.sqshforge.inputs", "sha256:1")))
    assert enroot.rc(ours) == enroot.rc(ImageConfig(reference="x", labels=(("a", "b"),)))


def test_an_image_that_says_nothing_starts_a_shell_at_the_root() -> None:
    files = enroot.files(ImageConfig(reference="rootfs:/x"))
    assert files["etc/environment"] == files["etc/fstab"] == b""
    assert b"cd / &&" in files["etc/rc"]
    assert b"exec /bin/sh\n" in files["etc/rc"]


@pytest.mark.parametrize("label", ["a\nb", "a\r\nb", "a\n", "$(touch x)\n`touch x`"])
def test_no_label_gets_out_of_its_comment(label: str) -> None:
    config = ImageConfig(reference="a\nexit 7", labels=(("key\nexit 8", label),))
    head = enroot.rc(config).partition("mkdir")[0]
    assert all(line.startswith("#") for line in head.splitlines())


def test_a_variable_with_a_newline_does_not_become_another_variable() -> None:
    config = ImageConfig(reference="x", env=("A=1\nLD_PRELOAD=/evil", "B=2"))
    assert enroot.environment(config) == "B=2\n"


@pytest.mark.parametrize("letter", [*"\n\r\x0b\x0c\x1b\x1e\x7f\x85\u2028\u2029"])
def test_a_variable_with_a_control_character_is_left_out(letter: str) -> None:
    """Some reader takes it for the end of a line: a carriage return split one variable into two."""
    config = ImageConfig(reference="x", env=(f"A=1{letter}B=2", f"C{letter}=1", "D=tab\tä"))
    assert enroot.environment(config) == "D=tab\tä\n"
    assert enroot.left_out(config) == ["A", f"C{letter}"]


def test_bytes_that_are_no_text_pass_through() -> None:
    config = ImageConfig(reference="x", env=("A=caf\udce9",))
    assert enroot.files(config)["etc/environment"] == b"A=caf\xe9\n"


def started(config: ImageConfig, place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a config's start script with sh and some arguments."""
    script = place / "rc"
    script.write_text(enroot.rc(config))
    return subprocess.run(
        ["sh", script, *words], cwd=place, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.processes
@pytest.mark.parametrize(
    ("entrypoint", "cmd", "words", "printed"),
    [
        (SHOW, (), ("a b", "$HOME"), "a b|$HOME|"),
        (SHOW, ("default", "it's"), (), "default|it's|"),
        (SHOW, ("default",), ("given",), "given|"),
        (SHOW, (), (), "|"),
        ((), (*SHOW, "x y"), (), "x y|"),
        ((), (*SHOW, "default"), (*SHOW, "given", ""), "given||"),
        ((), (), (*SHOW, "only"), "only|"),
        ((*SHOW, '"', "\\", "*", "a\nb"), ("$(id)",), (), '"|\\|*|a\nb|$(id)|'),
    ],
    ids=[
        "entrypoint with arguments",
        "entrypoint with cmd",
        "arguments before cmd",
        "entrypoint alone",
        "cmd alone",
        "arguments for cmd",
        "arguments alone",
        "quoting",
    ],
)
def test_what_runs(
    entrypoint: tuple[str, ...],
    cmd: tuple[str, ...],
    words: tuple[str, ...],
    printed: str,
    tmp_path: Path,
) -> None:
    config = replace(CONFIG, entrypoint=entrypoint, cmd=cmd, workdir=str(tmp_path))
    done = started(config, tmp_path, *words)
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


@pytest.mark.processes
def test_neither_entrypoint_nor_cmd_nor_arguments_is_a_shell(tmp_path: Path) -> None:
    config = ImageConfig(reference="x", workdir=str(tmp_path))
    script = tmp_path / "rc"
    script.write_text(enroot.rc(config))
    done = subprocess.run(
        ["sh", script], input="echo $0 $(pwd)", capture_output=True, text=True, check=True
    )
    assert done.stdout == f"/bin/sh {tmp_path}\n"


@pytest.mark.processes
def test_the_workdir_is_made_and_the_way_there_forgotten(tmp_path: Path) -> None:
    place = tmp_path / "it's $HOME" / "new"
    config = ImageConfig(reference="x", workdir=str(place))
    done = started(config, tmp_path, "sh", "-c", "pwd; echo ${OLDPWD-unset}")
    assert done.stdout == f"{place}\nunset\n"


@pytest.mark.processes
def test_a_workdir_that_cannot_be_entered_ends_with_1(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = ImageConfig(reference="x", workdir=str(tmp_path / "file"))
    done = started(config, tmp_path, "echo", "ran")
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.processes
def test_the_exit_code_is_that_of_the_command(tmp_path: Path) -> None:
    config = ImageConfig(reference="x", workdir=str(tmp_path))
    assert started(config, tmp_path, "sh", "-c", "exit 43").returncode == 43
