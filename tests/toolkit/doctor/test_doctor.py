"""The doctor: it finds each cause before the work starts, and reports it with its fix."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sqshforge import doctor
from sqshforge.doctor.finding import Finding, Host
from sqshforge.errors import MissingError
from sqshforge.host.programs import Programs, Result, failed
from sqshforge.network import access
from sqshforge.network.access import Pip
from sqshforge.project import Project

pytestmark = pytest.mark.usefixtures("no_docker")

ALL = ["apt-get", "buildah", "mmdebstrap", "gpgv", "mksquashfs", "unsquashfs", "unshare"]
ALL += ["squashfuse", "fuse-overlayfs", "newuidmap", "newgidmap", "sbatch"]
KERNEL = "proc/sys/kernel/osrelease"
NATIVE = {"GraphDriverName": "overlay", "GraphRoot": "/home/u/graph", "GraphOptions": None}


class Fake(Programs):
    """A machine with these programs, which print preset output."""

    def __init__(
        self, names: Sequence[str], said: Mapping[str, str], store: Mapping[str, Any], works: bool
    ) -> None:
        self.names, self.said, self.store, self.works = names, said, store, works

    def which(self, program: str) -> Path | None:
        return Path("/usr/bin", program) if program in self.names else None

    def all(self, program: str) -> list[Path]:
        return [path for path in [self.which(program)] if path]

    def attempt(self, argv: Sequence[str | Path], **given: Any) -> Result:
        words = [Path(argv[0]).name, *map(str, argv[1:])]
        if words[:2] == ["buildah", "info"]:
            return Result(tuple(words), 0, json.dumps({"store": dict(self.store)}), "")
        if words[:2] == ["buildah", "--version"]:
            return Result(tuple(words), 0, f"buildah version {self.said['buildah']} (x)\n", "")
        if words[:2] == ["buildah", "unshare"]:
            return Result(tuple(words), 0 if self.works else 1, "", "")
        if words[1:] == ["-version"]:
            version = self.said.get(words[0], "4.5.1")
            return Result(tuple(words), 0, f"{words[0]} version {version} (2025/09/01)\n", "")
        fault = self.said.get(words[0], "")
        return Result(tuple(words), 1 if fault else 0, "", fault)


Make = Callable[..., Host]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A machine of an ordinary user with everything installed, except for what a test removes."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("STORAGE_DRIVER", "overlay")  # the user's choice is left alone
    monkeypatch.setenv("HOME", str(tmp_path))

    def make(
        *,
        without: Sequence[str] = (),
        besides: Sequence[str] = (),
        store: Mapping[str, Any] = NATIVE,
        overlay: bool = True,
        fuse: int | None = 0o666,
        files: Mapping[str, str] | None = None,
        uid: int = 1000,
        engine: str = "",
        **said: str,
    ) -> Host:
        root = tmp_path / "root"
        given = {"etc/subuid": "u:100000:65536\n", "etc/subgid": "u:100000:65536\n"}
        given |= {KERNEL: "6.6.0-1-amd64\n"}
        for name, text in {**given, **(files or {})}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        if fuse is not None:
            (root / "dev").mkdir(exist_ok=True)
            (root / "dev/fuse").touch()
            (root / "dev/fuse").chmod(fuse)
        # The tests run as root, who may read anything, so the mode decides for the user.
        monkeypatch.setattr(
            os, "access", lambda path, mode: bool(Path(path).stat().st_mode & 0o006)
        )
        names = [name for name in (*ALL, *besides) if name not in without]
        programs = Fake(names, {"buildah": "1.28.2", **said}, store, overlay)
        checkout = Project(tmp_path / "checkout")
        return Host(
            project=checkout, programs=programs, root=root, uid=uid, user="u", engine=engine
        )

    return make


def work(host: Host) -> list[Finding]:
    return list(doctor._work(host, is_made=False))


def gaps(host: Host) -> dict[str, str]:
    """Return what is needed but missing, by its first word, with the fix."""
    return {one.what.split()[0]: one.fix for one in work(host) if one.needed and not one.ok}


def one(host: Host, name: str) -> Finding:
    return next(found for found in work(host) if found.what.startswith(name))


def test_where_all_is_there_nothing_is_missing(machine: Make) -> None:
    assert gaps(machine()) == {}
    doctor.require(machine(), Path("none.sqsh"))


def test_on_a_bare_machine_each_gap_has_its_command(machine: Make) -> None:
    host = machine(without=[name for name in ALL if name != "apt-get"])
    found = gaps(host)
    assert found["mksquashfs"] == "sudo apt-get install squashfs-tools"
    assert found["unshare"] == "sudo apt-get install util-linux"
    assert found["buildah"].startswith("sudo apt-get install buildah;")
    assert one(host, "mmdebstrap").fix == "sudo apt-get install mmdebstrap"
    lines = Finding("mksquashfs (packing)", False, "not found", found["mksquashfs"]).lines()
    assert lines == [
        "MISSING mksquashfs (packing): not found",
        "          fix: sudo apt-get install squashfs-tools",
    ]


def test_where_there_is_dnf_its_packages_are_named(machine: Make) -> None:
    host = machine(
        without=["apt-get", "mksquashfs", "newuidmap", "mmdebstrap", "gpgv"], besides=["dnf"]
    )
    found = gaps(host)
    assert found["mksquashfs"] == "sudo dnf install squashfs-tools"
    assert found["newuidmap"] == "sudo dnf install shadow-utils"
    assert (
        one(host, "mmdebstrap").fix == "no package that we know of has mmdebstrap for this system"
    )


def test_a_registry_may_answer_so_mmdebstrap_is_only_wanted(machine: Make) -> None:
    host = machine(without=["mmdebstrap", "gpgv"])
    assert gaps(host) == {}
    assert not one(host, "mmdebstrap").ok


def test_what_proves_debian_s_packages_is_looked_for(machine: Make) -> None:
    assert gaps(machine(without=["gpgv"])) == {"gpgv": "sudo apt-get install gpgv"}
    assert gaps(machine(without=["gpgv"], besides=["sqv"])) == {}


def test_an_old_buildah_is_reported_with_what_works_and_what_does_not(machine: Make) -> None:
    host = machine(buildah="1.23.1")
    assert gaps(host) == {}  # buildah builds cpu-mamba
    found = one(host, "buildah 1.24")
    assert "1.23.1 builds cpu-mamba" in found.detail and "CUDA targets" in found.detail
    assert found.fix.startswith("sudo apt-get install docker.io")


@pytest.mark.parametrize("version", ["4.7", "4.7.2", "4.7.4"])
def test_a_mksquashfs_that_may_corrupt_files_is_reported(machine: Make, version: str) -> None:
    host = machine(mksquashfs=version)
    assert gaps(host) == {
        "mksquashfs": "install squashfs-tools 4.7.5 or later, or one before 4.7",
    }
    assert f"/usr/bin/mksquashfs: mksquashfs {version} may corrupt" in one(host, "mksq").detail


@pytest.mark.parametrize("version", ["4.4", "4.6.1", "4.7.5", "4.8", "5.0-git.1a2b3c4"])
def test_others_are_fit(machine: Make, version: str) -> None:
    assert gaps(machine(mksquashfs=version)) == {}


def test_a_new_buildah_takes_netavark(machine: Make) -> None:
    assert gaps(machine(buildah="1.39.3")) == {"netavark": "sudo apt-get install netavark"}
    there = {"usr/lib/podman/netavark": ""}
    assert gaps(machine(buildah="1.39.3", files=there)) == {}


def test_without_a_range_of_ids_a_free_one_is_named(machine: Make) -> None:
    files = {"etc/subuid": "other:100000:65536\nmore:165536:65536\n", "etc/subgid": ""}
    (fix,) = gaps(machine(files=files)).values()
    assert fix == "sudo usermod --add-subuids 231072-296607 --add-subgids 231072-296607 u"
    by_number = {"etc/subuid": "1000:100000:65536\n", "etc/subgid": "1000:100000:65536\n"}
    assert gaps(machine(files=by_number)) == {}
    short = {"etc/subuid": "u:100000:1000\n"}
    (fix,) = gaps(machine(files=short)).values()
    assert fix == "sudo usermod --add-subuids 165536-231071 u"


def test_ranges_of_a_directory_service_are_left_to_it(machine: Make) -> None:
    files = {"etc/subuid": "", "etc/subgid": "", "etc/nsswitch.conf": "subid: sss\n"}
    assert gaps(machine(files=files)) == {}


def test_the_programs_that_give_ids_are_looked_for(machine: Make) -> None:
    found = gaps(machine(without=["newuidmap", "newgidmap"]))
    assert found == dict.fromkeys(("newuidmap", "newgidmap"), "sudo apt-get install uidmap")


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("user/max_user_namespaces", 0, "sudo sysctl user.max_user_namespaces=10000"),
        ("kernel/unprivileged_userns_clone", 0, "sudo sysctl kernel.unprivileged_userns_clone=1"),
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            1,
            "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ("kernel/other", 1, "ask whoever runs this machine"),
    ],
)
def test_what_forbids_user_namespaces_is_named(
    machine: Make, name: str, value: int, fix: str
) -> None:
    said = "unshare: unshare failed: Operation not permitted"
    host = machine(files={f"proc/sys/{name}": f"{value}\n"}, unshare=said)
    found = one(host, "user namespaces")
    assert found.needed and not found.ok and found.fix.startswith(fix)
    assert "`sqshforge run`" in found.what
    if "apparmor" in name:
        assert "buildah has one" in found.detail


def test_with_enroot_there_is_no_need_of_our_own_runtime(machine: Make) -> None:
    host = machine(besides=["enroot"], without=["squashfuse"], fuse=None)
    assert gaps(host) == {}


@pytest.mark.parametrize(("fuse", "shown"), [(0o600, "its mode is 0600"), (None, "not there")])
def test_a_closed_fuse_is_reported(machine: Make, fuse: int | None, shown: str) -> None:
    host = machine(fuse=fuse)
    found = one(host, "/dev/fuse")
    assert found.needed and not found.ok and shown in found.detail
    assert found.fix == "sudo modprobe fuse && sudo chmod 0666 /dev/fuse"


def test_before_linux_6_6_a_user_takes_fuse_overlayfs(machine: Make) -> None:
    lacking: dict[str, Any] = {"without": ["fuse-overlayfs"]}
    assert gaps(machine(**lacking)) == {}
    lacking["files"] = {KERNEL: "5.15.0-91-generic\n"}
    assert gaps(machine(**lacking)) == {"fuse-overlayfs": "sudo apt-get install fuse-overlayfs"}
    assert gaps(machine(besides=["enroot"], **lacking)) == gaps(machine(uid=0, **lacking)) == {}


def test_root_needs_none_of_what_users_do(machine: Make) -> None:
    host = machine(without=["squashfuse", "newuidmap"], fuse=None, uid=0)
    assert gaps(host) == {}


VFS = {**NATIVE, "GraphDriverName": "vfs"}
PROGRAM = {**NATIVE, "GraphOptions": ["overlay.mount_program=/usr/bin/fuse-overlayfs"]}


def test_the_storage_that_buildah_uses_is_reported(machine: Make) -> None:
    assert one(machine(), "storage").detail == "the kernel's overlay, in /home/u/graph"
    by_program = one(machine(store=PROGRAM), "storage")
    assert by_program.ok and by_program.detail.startswith("fuse-overlayfs, in /home/u/graph")
    closed = one(machine(store=PROGRAM, fuse=0o600), "storage")
    assert not closed.ok and "chmod 0666 /dev/fuse" in closed.fix


def test_copying_layers_whole_is_reported_with_what_is_faster(machine: Make) -> None:
    faster = one(machine(store=VFS), "storage")
    assert "every layer is copied whole" in faster.detail
    assert faster.fix.endswith("> ~/.config/containers/storage.conf")
    assert 'driver = "overlay"' in faster.fix and "mount_program" not in faster.fix
    by_program = one(machine(store=VFS, overlay=False), "storage")
    assert 'mount_program = "/usr/bin/fuse-overlayfs"' in by_program.fix
    closed = machine(store=VFS, overlay=False, fuse=0o600, besides=["enroot"])
    assert one(closed, "storage").fix.startswith("sudo modprobe fuse && sudo chmod 0666 /dev/fuse")
    assert "Linux 5.13" in one(closed, "storage").fix
    lacking = machine(store=VFS, overlay=False, without=["fuse-overlayfs"])
    assert "apt-get install fuse-overlayfs" in one(lacking, "storage").fix
    doctor.require(closed, Path("none.sqsh"))  # it is slow, but works


def test_a_setting_of_the_user_s_own_is_not_overwritten(
    machine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    place = tmp_path / ".config/containers/storage.conf"
    place.parent.mkdir(parents=True)
    place.write_text('[storage]\ndriver = "vfs"\n')
    fix = one(machine(store=VFS), "storage").fix
    assert fix.startswith("in ~/.config/containers/storage.conf: ") and ">" not in fix
    assert 'driver = "overlay"' in fix


@pytest.mark.processes
def test_the_setting_that_mends_it_is_one(machine: Make, tmp_path: Path) -> None:
    fix = one(machine(store=VFS), "storage").fix
    subprocess.run(["sh", "-c", fix], env={**os.environ, "HOME": str(tmp_path)}, check=True)
    written = (tmp_path / ".config/containers/storage.conf").read_text()
    assert written == '[storage]\ndriver = "overlay"\n'


def test_an_engine_that_is_asked_for_is_the_one_that_is_needed(machine: Make) -> None:
    assert set(gaps(machine(engine="docker"))) == {"docker"}
    assert set(gaps(machine(engine="buildah", without=["buildah"]))) == {"buildah"}


def test_a_docker_that_is_not_for_this_user_is_reported(machine: Make) -> None:
    class Closed(Fake):
        def attempt(self, argv: Sequence[str | Path], **given: Any) -> Result:
            if "--version" in argv and "docker" in str(argv[0]):
                return Result((), 0, "Docker version 20.10.24, build x", "")
            if "docker" in str(argv[0]):
                return Result((), 1, "", "Got permission denied while trying to connect")
            return super().attempt(argv, **given)

    host = machine(besides=["docker"])
    programs = Closed([*ALL, "docker"], {"buildah": "1.28.2"}, NATIVE, True)
    found = one(Host(project=host.project, programs=programs, root=host.root, user="u"), "docker")
    assert found.fix == "sudo usermod --append --groups docker u, then log in again"


def test_podman_under_docker_s_name_is_reported(machine: Make) -> None:
    class Podman(Fake):
        def attempt(self, argv: Sequence[str | Path], **given: Any) -> Result:
            if Path(argv[0]).name == "docker":
                return Result((), 0, "podman version 5.4.2\n", "")
            return super().attempt(argv, **given)

    host = machine(besides=["docker"])
    programs = Podman([*ALL, "docker"], {"buildah": "1.28.2"}, NATIVE, True)
    found = one(Host(project=host.project, programs=programs, root=host.root, user="u"), "docker")
    assert not found.ok and not found.needed
    assert found.detail == "/usr/bin/docker is not Docker's: it says podman version 5.4.2"
    assert "apt-get install docker.io; not needed beside buildah" in found.fix


def test_a_checkout_whose_path_has_a_space(machine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    host = machine()
    home = Project(host.project.root / "one two")
    home.build.mkdir(parents=True)
    monkeypatch.setattr(doctor, "in_the_way", lambda folder: folder)
    found = next(doctor._owners(replace(host, project=home)))
    assert shlex.split(found.fix) == ["sudo", "chown", "-R", "u", str(home.build)]


def test_too_little_room_tells_the_bytes(machine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ROOM", 1e18)
    host = machine()
    room = next(found for found in doctor.examine(host) if "room" in found.what)
    assert not room.ok and room.fix.startswith("free ")


def test_a_configuration_that_pip_cannot_read_is_one_gap_among_others(
    machine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(programs: Programs) -> Pip:
        raise failed(["python", "-m", "pip"], 2, ["File contains no section headers."])

    monkeypatch.setattr(access, "pip", unreadable)
    found = doctor.examine(machine())
    gap = next(found for found in found if found.what == "pip's configuration")
    assert gap.needed and not gap.ok and gap.detail == "File contains no section headers."
    assert any(one.what == "CA certificates" for one in found)


@pytest.mark.processes
def test_an_index_that_pip_ignores_is_a_gap_with_its_own_fix(
    machine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = access.pip
    monkeypatch.setenv("PIP_INDEX_URL", "a.test/b")
    monkeypatch.setattr(access, "pip", lambda programs: read(Programs()))  # the real pip
    found = doctor.examine(machine())
    gap = next(found for found in found if found.what == "pip's configuration")
    assert gap.needed and not gap.ok
    assert gap.detail == "pip's index-url is neither an address nor a folder: a.test/b"
    assert "begin an address with https://" in gap.fix


def test_what_is_needed_is_named_before_the_work_starts(machine: Make) -> None:
    host = machine(without=["mksquashfs", "squashfuse", "newuidmap", "newgidmap"])
    with pytest.raises(MissingError) as caught:
        doctor.require(host, Path("none.sqsh"))
    assert "4 in all" in caught.value.what and "mksquashfs (packing): not found" in str(
        caught.value
    )
    assert "sudo apt-get install squashfs-tools" in caught.value.fix
    assert len("\n".join(caught.value.lines()).splitlines()) <= 8


# With the real machine.
