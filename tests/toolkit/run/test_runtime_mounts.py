"""Host paths and volumes in a container."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sqshforge.errors import RequestError
from sqshforge.host.programs import Programs
from sqshforge.image.enroot import ImageConfig
from sqshforge.run.mounts import Mount
from tests.support import containers, enroots, tiny_root

pytestmark = pytest.mark.processes

Sh = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def tiny(images: Path) -> Path:
    """A sqsh with volumes, and with links that lead out of it."""

    def change(root: Path) -> None:
        (root / "absolute").symlink_to("/outside/deep")
        (root / "relative").symlink_to("../../../outside")
        (root / "chain").symlink_to("absolute/../more")
        (root / "round").symlink_to("round")
        (root / "usr" / "file").write_text("of the image\n")

    volumes = ("/scratch", "/with space/and\ttab", "/links/volume")
    return tiny_root.sqsh(images / "tiny", ImageConfig(reference="t", volumes=volumes), change)


@pytest.fixture(autouse=True)
def nothing_stays(images: Path) -> Iterator[None]:
    with containers.watched(images):
        yield


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "file").write_text("of the host\n")
    return folder


@pytest.fixture
def sh(tiny: Path) -> Sh:
    """Runs a shell script in a container with mounts; returns its exit code and output."""

    def run(script: str, *mounts: str) -> tuple[int, str]:
        done = Programs().attempt(containers.argv_by(tiny, "sh", "-c", script, mounts=mounts))
        return done.code, done.out + done.err

    return run


@pytest.mark.parametrize("flag", ["", ":rw"])
def test_a_folder_is_mounted_where_there_was_none(sh: Sh, data: Path, flag: str) -> None:
    script = "cat /a/b/file && echo from inside > /a/b/new"
    assert sh(script, f"{data}:/a/b{flag}") == (0, "of the host\n")
    assert (data / "new").read_text() == "from inside\n"


def test_a_mount_can_be_read_only(sh: Sh, data: Path) -> None:
    code, said = sh("cat /data/file; echo x > /data/new", f"{data}:/data:ro")
    assert code != 0
    assert said.startswith("of the host\n")
    assert "Read-only file system" in said
    assert list(data.iterdir()) == [data / "file"]


def test_a_mount_is_read_only_also_where_the_folder_for_temporary_files_is_a_link(
    sh: Sh, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tempfile.gettempdir())
    monkeypatch.setenv("TMPDIR", f"{tmp_path}/link")
    code, said = sh("echo x > /data/new", f"{data}:/data:ro")
    assert code != 0 and "Read-only file system" in said
    assert not (data / "new").exists()


@pytest.mark.parametrize("name", ["a:b", "a,b", "a\\b"])
def test_a_folder_for_temporary_files_that_overlay_cannot_name(
    sh: Sh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / name))
    code, said = sh("true")
    assert code == 2 and said.startswith(f"error: TMPDIR: {tmp_path / name} has a colon, a comma")
    assert "fix:   TMPDIR=/tmp" in said
    assert not list((tmp_path / name).iterdir())


@pytest.mark.root
def test_a_read_only_mount_is_so_all_the_way_down(sh: Sh, data: Path) -> None:
    """A file system mounted somewhere below the source is included, and read-only too."""
    below = data / "be low"
    below.mkdir()
    mount = Programs().capture
    mount(["mount", "-t", "tmpfs", "-o", "nosuid,noexec", "tmpfs", below])
    try:
        (below / "deep").write_text("deep\n")
        code, said = sh('cat "/data/be low/deep"; echo x > "/data/be low/new"', f"{data}:/data:ro")
        options = sh("cat /proc/self/mountinfo", f"{data}:/data:ro")[1]
    finally:
        mount(["umount", below])
    assert code != 0
    assert said.startswith("deep\n")
    assert "Read-only file system" in said
    assert "/data/be\\040low ro,nosuid,noexec" in options


def test_a_file_is_mounted_as_a_file(sh: Sh, data: Path) -> None:
    source = data / "file"
    assert sh("cat /conf/one", f"{source}:/conf/one") == (0, "of the host\n")
    script = "cat /usr/file; echo changed > /usr/file"
    assert sh(script, f"{source}:/usr/file") == (0, "of the host\n")
    assert source.read_text() == "changed\n"


def test_many_mounts_in_their_order_also_in_tmp_and_over_what_the_image_has(
    sh: Sh, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    mounts = (f"{data}:/tmp/data", f"{tmp_path}/other:/tmp/data/in", f"{data}:/root")
    assert sh("ls /tmp/data /root", *mounts) == (0, "/root:\nfile\nin\n\n/tmp/data:\nfile\nin\n")


def test_a_mount_in_a_mount_below_a_link_of_the_image_is_made(
    sh: Sh, data: Path, tmp_path: Path
) -> None:
    """The user's own words put the one into the other."""
    (tmp_path / "other").mkdir()
    mounts = (f"{data}:/absolute/data", f"{tmp_path}/other:/absolute/./data//in")
    assert sh("ls /outside/deep/data", *mounts) == (0, "file\nin\n")


def test_a_home_of_nobody_is_refused(tiny: Path) -> None:
    done = Programs().attempt(enroots.argv(tiny, "--mount", "~nobody-here/x:/x", "--", "true"))
    assert done.code == 2, done.err
    assert "error: there is no such home: ~nobody-here/x\n" in done.err


def test_a_source_may_be_relative(sh: Sh, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data.parent)
    assert sh("cat /x/file", "./data:/x") == (0, "of the host\n")


@pytest.mark.parametrize(
    ("target", "seen"),
    [
        ("/absolute", "/outside/deep"),
        ("/relative/in", "/outside/in"),
        ("/chain", "/outside/more"),
        ("/../../up", "/up"),
        ("/usr/../../up", "/up"),
    ],
)
def test_a_target_never_leads_out_of_the_root(sh: Sh, data: Path, target: str, seen: str) -> None:
    """Links and dots are resolved as from inside, where / is the image's root."""
    assert sh(f"cat {seen}/file", f"{data}:{target}") == (0, "of the host\n")
    assert not Path("/outside").exists()
    assert not Path("/up").exists()


def test_a_target_through_a_link_to_itself_is_reported(sh: Sh, data: Path) -> None:
    code, said = sh("true", f"{data}:/round/in")
    assert code == 1
    assert said.startswith("error: the container cannot be set up")
    assert "symbolic links" in said
    assert len(said.splitlines()) == 2


@pytest.mark.parametrize(
    ("mount", "said"),
    [
        ("DATA/file:/root", "DATA/file is no folder, and /root in the image is a folder"),
        ("DATA:/usr/file", "DATA is a folder, and /usr/file in the image is no folder"),
        ("DATA:/", "/ is all of the container, which DATA would hide"),
        ("DATA:/tmp/..", "/tmp/.. is all of the container, which DATA would hide"),
    ],
)
def test_a_target_that_the_source_does_not_fit_is_refused(
    sh: Sh, data: Path, mount: str, said: str
) -> None:
    code, shown = sh("true", mount.replace("DATA", str(data)))
    assert code == 2
    assert shown.startswith(f"error: {said.replace('DATA', str(data))}\n")
    assert "  where: --mount\n  fix:   " in shown


@pytest.mark.parametrize("text", ["", "/data", ":/x", "/data:relative", "/data:/x:rx", "/:/x:ro:z"])
def test_a_mount_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="is not SRC:DST"):
        Mount.parse(text)


def test_a_missing_source_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=f"does not exist: {tmp_path}/gone"):
        Mount.parse(f"{tmp_path}/gone:/x")


def test_volumes_are_folders_of_their_own_in_the_root(sh: Sh) -> None:
    script = """
    touch /scratch/new "/with space/and\ttab/new" /links/volume/new || exit 1
    while read -r _ _ _ _ point options _; do
        case $point in /scratch|/with*|/links*)
            printf '%s\\n' "$point ${options%%,relatime*}"
        esac
    done < /proc/self/mountinfo
    """
    code, said = sh(script)
    assert code == 0, said
    assert said.splitlines() == [
        "/links/volume rw,nosuid,nodev",
        "/scratch rw,nosuid,nodev",
        "/with\\040space/and\\011tab rw,nosuid,nodev",
    ]
