"""The content of a squash file: entry by entry as from enroot, with any engine, every time."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sqshforge.host import files, rootless
from sqshforge.host.programs import Programs
from sqshforge.host.terminal import Reporter
from sqshforge.image import address as source
from sqshforge.image import enroot
from sqshforge.squash import pack as squash
from sqshforge.squash import request
from tests.support import odd_root
from tests.support.engines import CLIENT, Unmounted
from tests.support.engines import docker_fixture as docker_fixture
from tests.support.engines import docker_host_fixture as docker_host_fixture

pytestmark = pytest.mark.processes

QUIET = Reporter(quiet=True)
FAST = squash.Options.of("fast")
# What docker adds to every container; in these folders, something is added or removed.
SUPPLIED = {"etc/hosts", "etc/hostname", "etc/resolv.conf", "etc/mtab", "proc", "sys"}
CHANGED = {".", "etc", "dev"}
WORKDIR = {"made", "made/by workdir"}
ARCHIVES = ("oci", "oci-archive", "docker-archive")


class Odd(NamedTuple):
    """One tree, and the addresses that it can be packed from."""

    tree: Path
    addresses: dict[str, str]


@pytest.fixture(scope="module")
def odd(docker_host: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Odd]:
    folder = tmp_path_factory.mktemp("odd")
    tree = odd_root.make(folder / "tree")
    context = folder / "context"
    context.mkdir()
    odd_root.tar(tree, context / "rootfs.tar")
    (context / "Dockerfile").write_text(odd_root.DOCKERFILE)
    with odd_root.in_buildah(context) as buildah, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", docker_host)
        yield Odd(
            tree=tree,
            addresses={
                "buildah": f"buildah://{buildah}",
                "docker": f"dockerd://{(docker := odd_root.in_docker(context, docker_host))}",
                "unmounted": f"unmounted:{docker}",
                "rootfs": f"rootfs:{tree}",
                **archived(buildah, folder),
                "saved": saved(docker, folder),
            },
        )


def archived(name: str, folder: Path) -> dict[str, str]:
    """Archive a buildah image in all three kinds of archive; returns their addresses."""
    places = {kind: f"{kind}:{folder / kind}" for kind in ARCHIVES}
    for address in places.values():
        Programs().capture(["buildah", "push", "--quiet", name, f"{address}:odd:1"])
    return places


def saved(name: str, folder: Path) -> str:
    """Archive a docker image with docker itself; returns its address."""
    Programs().capture([CLIENT, "save", "--output", folder / "saved", name])
    return f"docker-archive:{folder / 'saved'}"


def pack(address: str, output: Path, **options: Any) -> squash.Packed:
    image, chosen, programs = parse(address), replace(FAST, **options), Programs()
    return rootless.call_as_root(
        lambda: squash.pack(image, output, chosen, programs, QUIET), address, programs
    )


def parse(address: str) -> source.Source:
    """Parse an address; `unmounted:` is docker's for a user who may not mount it."""
    kind, _, name = address.partition(":")
    if kind == "unmounted":
        return Unmounted(name, Programs())
    return source.parse(address, Programs())


@pytest.fixture(scope="module")
def packed(odd: Odd, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tree packed from each address."""
    folder = tmp_path_factory.mktemp("packed")
    return {
        name: pack(address, folder / f"{name}.sqsh").path for name, address in odd.addresses.items()
    }


@pytest.fixture(scope="module")
def found(packed: dict[str, Path]) -> dict[str, dict[str, odd_root.Entry]]:
    """The entries of each of the squash files."""
    return {
        name: odd_root.unpacked(path, path.with_suffix(".tree")) for name, path in packed.items()
    }


Found = dict[str, dict[str, odd_root.Entry]]
every = pytest.mark.parametrize(
    "name", ["buildah", "docker", "unmounted", "rootfs", *ARCHIVES, "saved"]
)


@every
def test_every_entry_is_what_enroot_gives(name: str, odd: Odd, found: Found) -> None:
    expected = odd_root.as_enroot(odd_root.entries(odd.tree))
    got = {path: entry for path, entry in found[name].items() if path in expected}
    for entries in (expected, got):
        for path in CHANGED:
            entries[path] = entries[path]._replace(mtime=None)
    assert got == expected


@every
def test_nothing_else_is_in_the_file(name: str, odd: Odd, found: Found) -> None:
    expected = set(odd_root.as_enroot(odd_root.entries(odd.tree)))
    workdir = set() if name == "rootfs" else WORKDIR
    assert set(found[name]) - expected == SUPPLIED | workdir | set(odd_root.FILES)


@every
def test_the_expected_oddities_are_really_there(name: str, found: Found) -> None:
    entries = found[name]
    assert entries["bin/passwd"].mode == 0o4755
    assert entries["data/one"].names == {"data/one", "data/two", "data/sub/three"}
    assert entries["etc/other-name"].names == {"etc/other-name", "lib/third-name"}
    assert entries["run/pipe"].kind == "p" and "run/zero" not in entries
    assert entries["lib/dangling"].content == "nowhere/at all"
    assert [entries[f"dir-{mode}"].mode for mode in ("000", "300", "555")] == [0o700, 0o700, 0o755]
    assert "names/latin caf\udce9" in entries
    assert {path for path in entries if path.startswith("dev")} == {"dev"}
    assert ".dockerenv" not in entries and "data/.dockerenv" in entries


def test_mounted_or_saved_by_docker_the_tree_is_the_same(found: Found) -> None:
    assert found["docker"] == found["unmounted"] == found["saved"]


@pytest.mark.parametrize("name", ARCHIVES)
def test_mounted_or_archived_the_tree_is_the_same(name: str, found: Found) -> None:
    assert found[name] == found["buildah"]


@pytest.mark.parametrize(
    ("mounted", "name"),
    [*(("buildah", name) for name in ARCHIVES), ("docker", "saved"), ("docker", "unmounted")],
)
def test_mounted_or_archived_the_bytes_are_the_same(
    mounted: str, name: str, packed: dict[str, Path]
) -> None:
    assert files.digest(packed[name], 1) == files.digest(packed[mounted], 1)


def test_both_engines_give_the_same_tree(found: Found) -> None:
    trees = {}
    for name in ("buildah", "docker"):
        dated = SUPPLIED | CHANGED | WORKDIR | set(odd_root.FILES)  # dated at the image's creation
        trees[name] = {
            path: entry._replace(mtime=None) if path in dated else entry
            for path, entry in found[name].items()
        }
    trees["docker"]["etc/rc"] = trees["buildah"]["etc/rc"]
    assert trees["buildah"] == trees["docker"]


@every
def test_the_four_files_are_made_of_the_config(
    name: str, odd: Odd, packed: dict[str, Path], found: Found
) -> None:
    config = parse(odd.addresses[name]).config()
    place = packed[name].with_suffix(".tree")
    for path, content in enroot.files(config).items():
        assert (place / path).read_bytes() == content
        assert not (place / path).is_symlink()
        assert (found[name][path].mode, found[name][path].owner) == (0o644, (0, 0))
    if name != "rootfs":
        assert "GREETING=hello = world\n" in (place / "etc/environment").read_text()
        assert r"/scratch\040disk " in (place / "etc/fstab").read_text()
        assert "# org.example.title two words\n" in (place / "etc/rc").read_text()


@every
@pytest.mark.parametrize("options", [{}, {"jobs": 1}, {"jobs": 2}, {"level": 1}])
def test_the_same_image_gives_the_same_bytes(
    name: str, options: dict[str, int], odd: Odd, packed: dict[str, Path], tmp_path: Path
) -> None:
    again = pack(odd.addresses[name], tmp_path / "again.sqsh", **options)
    assert not again.up_to_date
    assert again.path.read_bytes() == packed[name].read_bytes()
    first = request.read_record(packed[name])
    assert first is not None and again.key == first["key"]


@every
def test_attributes_and_capabilities_are_kept_on_request(
    name: str, odd: Odd, found: Found, tmp_path: Path
) -> None:
    output = pack(odd.addresses[name], tmp_path / "a.sqsh", xattrs=True).path
    kept = odd_root.unpacked(output, tmp_path / "tree")
    assert {path for path, entry in kept.items() if entry.xattrs} == {"bin/ping"}
    ping = tmp_path / "tree/bin/ping"
    assert os.getxattr(ping, "security.capability") == odd_root.CAPABILITY
    assert {path: entry._replace(xattrs=()) for path, entry in kept.items()} == found[name]


@pytest.mark.root
@pytest.mark.parametrize("xattrs", [True, False])
def test_folders_that_enroot_adds_to_keep_their_attributes(xattrs: bool, tmp_path: Path) -> None:
    """A socket is left out of an image in both cases."""
    tree, output = tmp_path / "tree", tmp_path / "a.sqsh"
    for name in ("etc", "dev", "proc", "sys", "run", "sqshforge"):
        (tree / name).mkdir(parents=True)
        os.setxattr(tree / name, "user.note", name.encode())
    os.setxattr(tree / "etc", "security.note", b"kept")
    for name in ("run", "sqshforge"):
        os.mknod(tree / name / "socket", stat.S_IFSOCK | 0o600)  # bind() limits paths to 108 bytes
    pack(f"rootfs:{tree}", output, xattrs=xattrs)
    found = odd_root.unpacked(output, tmp_path / "found")
    assert "run/socket" not in found and "sqshforge/socket" not in found
    noted = {path: entry.xattrs for path, entry in found.items() if entry.xattrs}
    user = ("user.note",)
    expected = {"etc": ("security.note", *user), "dev": user, "proc": user, "sys": user}
    assert noted == ({**expected, "run": user, "sqshforge": user} if xattrs else {})


@pytest.mark.parametrize("name", ["buildah", "rootfs", "oci"])
def test_device_nodes_are_kept_on_request(
    name: str, odd: Odd, found: Found, tmp_path: Path
) -> None:
    output = pack(odd.addresses[name], tmp_path / "a.sqsh", devices=True).path
    kept = odd_root.unpacked(output, tmp_path / "tree")
    assert kept.pop("run/zero").kind == "c"
    assert kept == found[name]


def test_the_same_bytes_with_attributes_too(odd: Odd, tmp_path: Path) -> None:
    files = [
        pack(odd.addresses[name], tmp_path / f"{name}-{jobs}", xattrs=True, jobs=jobs).path
        for name in ARCHIVES
        for jobs in (1, 2)
    ]
    assert len({file.read_bytes() for file in files}) == 1


def test_another_profile_is_another_file(odd: Odd, packed: dict[str, Path], tmp_path: Path) -> None:
    other = pack(odd.addresses["buildah"], tmp_path / "other.sqsh", level=9)
    first = request.read_record(packed["buildah"])
    assert first is not None and other.key != first["key"]
    assert other.path.read_bytes() != packed["buildah"].read_bytes()


@pytest.mark.parametrize("name", ["buildah", "docker"])
def test_source_date_epoch_is_the_newest_time_in_the_file(
    name: str, odd: Odd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = odd_root.TIME + 30
    monkeypatch.setenv("SOURCE_DATE_EPOCH", str(epoch))
    output = pack(odd.addresses[name], tmp_path / "dated.sqsh").path
    entries = odd_root.unpacked(output, tmp_path / "tree")
    times = {path: entry.mtime or 0 for path, entry in entries.items()}
    assert max(times.values()) == epoch == times["etc/rc"]
    before = odd_root.entries(odd.tree)["data/one"].mtime
    assert times["data/one"] == min(before or 0, epoch)
    made = int.from_bytes(output.read_bytes()[8:12], "little")  # superblock: creation time
    assert made == epoch


def test_a_folder_without_config_keeps_its_times(odd: Odd, found: Found) -> None:
    newest = max(entry.mtime or 0 for entry in odd_root.entries(odd.tree).values())
    assert found["rootfs"]["etc/rc"].mtime == newest <= time.time()


def test_an_image_without_etc_gets_one(tmp_path: Path) -> None:
    """Only through engines: a folder without etc/ is not accepted as a root file system."""
    (tmp_path / "context/tree").mkdir(parents=True)
    (tmp_path / "context/tree/hello").write_text("hello")
    odd_root.tar(tmp_path / "context/tree", tmp_path / "context/rootfs.tar")
    (tmp_path / "context/Dockerfile").write_text("FROM scratch\nADD rootfs.tar /\n")
    with odd_root.in_buildah(tmp_path / "context") as name:
        output = pack(f"buildah://{name}", tmp_path / "bare.sqsh").path
    entries = odd_root.unpacked(output, tmp_path / "tree")
    assert set(odd_root.FILES) < set(entries)
    assert (entries["etc"].kind, entries["etc"].mode) == ("d", 0o755)


def test_the_source_is_only_read(odd: Odd) -> None:
    before = odd_root.entries(odd.tree)
    pack(odd.addresses["rootfs"], odd.tree.parent / "read.sqsh")
    assert odd_root.entries(odd.tree) == before


def test_packing_leaves_no_volumes_in_docker(odd: Odd, packed: dict[str, Path]) -> None:
    """The image has two volumes, which docker creates anew for each container."""
    assert Programs().capture([CLIENT, "volume", "ls", "--quiet"]) == ""


def test_what_is_up_to_date_is_known_without_reading_it(
    odd: Odd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a file of many gigabytes takes longer than a second."""
    output = pack(odd.addresses["buildah"], tmp_path / "a.sqsh").path
    with monkeypatch.context() as patch:
        patch.setattr(
            "sqshforge.host.files.digest", lambda path, jobs: pytest.fail(f"{path} was read")
        )
        assert pack(odd.addresses["buildah"], output).up_to_date
    os.utime(output)
    assert pack(odd.addresses["buildah"], output).up_to_date  # its bytes count: it was only touched


def test_a_record_can_be_read_by_others(odd: Odd, tmp_path: Path) -> None:
    """Without the record, the file looks to others like somebody else's, and not up to date."""
    before = os.umask(0o077)
    try:
        pack(odd.addresses["buildah"], tmp_path / "a.sqsh")
    finally:
        os.umask(before)
    assert (tmp_path / "a.sqsh.json").stat().st_mode & 0o777 == 0o644
