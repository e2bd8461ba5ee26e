"""The filter between an image's tar and the squash tool, entry by entry."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import pytest

from sqshforge.errors import WorkError
from sqshforge.host.programs import Programs
from sqshforge.image import docker_export

FILES = {"etc/environment": b"A=1\n", "etc/rc": b"#!/bin/sh\n"}
EPOCH = 1_700_000_000


def entry(name: str, content: bytes = b"", **facts: object) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.uid, member.uname = len(content), 1_600_000_000, 7, "seven"
    for key, value in facts.items():
        setattr(member, key, value)
    return member, content


def folder(name: str, mode: int = 0o755) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=tarfile.DIRTYPE, mode=mode)


def link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=tarfile.LNKTYPE, linkname=target)


def packed(members: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member, content in members:
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def filtered(source: bytes | IO[bytes]) -> dict[str, tuple[tarfile.TarInfo, bytes]]:
    """What comes out, by name; no name may come twice."""
    target = io.BytesIO()
    stream = io.BytesIO(source) if isinstance(source, bytes) else source
    docker_export.copy(stream, target, FILES, EPOCH, lambda amount: None)
    target.seek(0)
    with tarfile.open(fileobj=target) as archive:
        members = archive.getmembers()
        assert len({member.name for member in members}) == len(members)
        contents = {
            member.name: archive.extractfile(member) if member.isreg() else None
            for member in members
        }
        return {
            member.name.removeprefix("./").strip("/"): (
                member,
                content.read() if (content := contents[member.name]) else b"",
            )
            for member in members
        }


def test_the_files_replace_the_images_own() -> None:
    found = filtered(packed([folder("etc/"), entry("etc/rc", b"own"), entry("etc/x", b"x")]))
    assert sorted(found) == ["etc", "etc/environment", "etc/rc", "etc/x"]
    for name, data in FILES.items():
        member, content = found[name]
        assert (content, member.mode, member.uid, member.mtime) == (data, 0o644, 0, EPOCH)


def test_an_image_without_etc_gets_one() -> None:
    member, _ = filtered(packed([entry("hello", b"hi")]))["etc"]
    assert member.isdir() and member.mode == 0o755


@pytest.mark.parametrize("prefix", ["", "./", "/"])
def test_devices_and_the_marker_are_left_out_wherever_the_names_begin(prefix: str) -> None:
    names = ["dev/null", ".dockerenv", "usr/dev/kept", "a/.dockerenv", "device"]
    found = filtered(packed([folder(f"{prefix}dev"), *(entry(prefix + name) for name in names)]))
    assert set(found) - {"etc", *FILES} == {"dev", "usr/dev/kept", "a/.dockerenv", "device"}


def test_modes_are_widened_for_the_owner() -> None:
    modes = {0o000: 0o400, 0o4755: 0o4755, 0o200: 0o600, 0o111: 0o511}
    found = filtered(
        packed(
            [folder("d0", 0o000), folder("d555", 0o555), folder("d1777", 0o1777)]
            + [entry(f"f{mode}", mode=mode) for mode in modes]
        )
    )
    assert [found[name][0].mode for name in ("d0", "d555", "d1777")] == [0o700, 0o755, 0o1777]
    assert {mode: found[f"f{mode}"][0].mode for mode in modes} == modes


def test_names_of_any_bytes_and_length_and_times_pass() -> None:
    names = ["caf\udce9", "two  words ", "n" * 250, "d/" * 60 + "deep", "new\nline"]
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name in names:
            archive.addfile(entry(name)[0])
    found = filtered(stream.getvalue())
    assert set(names) <= set(found)
    assert all(found[name][0].mtime == 1_600_000_000 for name in names)


def test_hard_links_stay_links() -> None:
    found = filtered(packed([entry("./a", b"same"), link("./b", "./a"), link("./c", "/a")]))
    assert [(found[n][0].islnk(), found[n][0].linkname.strip("./")) for n in "bc"] == [
        (True, "a")
    ] * 2


@pytest.mark.parametrize("lost", ["etc/rc", "dev/shm/file", ".dockerenv"])
def test_a_file_whose_first_name_is_dropped_lives_on_under_the_others(lost: str) -> None:
    members = [entry(lost, b"content", mode=0o600), link("other", lost), link("third", lost)]
    found = filtered(packed(members))
    member, content = found["other"]
    assert member.isreg() and (content, member.mode, member.mtime) == (
        b"content",
        0o600,
        1_600_000_000,
    )
    assert found["third"][0].islnk() and found["third"][0].linkname == "other"


def test_a_dropped_link_leaves_its_file_alone() -> None:
    found = filtered(packed([entry("a", b"a"), link("etc/rc", "a"), link("b", "etc/rc")]))
    assert found["a"][1] == b"a"
    assert found["b"][0].linkname == "a"
    assert found["etc/rc"][1] == FILES["etc/rc"]


@pytest.mark.processes
@pytest.mark.parametrize("form", ["gnu", "pax"])
def test_the_holes_of_a_sparse_entry_are_zeros(form: str, tmp_path: Path) -> None:
    with (tmp_path / "holes").open("wb") as file:
        file.seek(3 << 20)
        file.write(b"middle")
        file.seek(4 << 20)
        file.truncate()
    archive = tmp_path / "tar"
    Programs().capture(
        ["tar", "--sparse", f"--format={form}", "-cf", archive, "-C", tmp_path, "holes"]
    )
    assert archive.stat().st_size < 1 << 20
    assert filtered(archive.read_bytes())["holes"][1] == (tmp_path / "holes").read_bytes()


def symlink(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, type=tarfile.SYMTYPE, linkname=target)


@pytest.mark.parametrize("target", ["usr/etc", "/usr/etc", "./usr/../usr/etc/"])
def test_where_etc_is_a_link_the_files_go_where_it_leads(target: str) -> None:
    members = [symlink("etc", target), folder("usr"), folder("usr/etc"), entry("usr/etc/rc", b"x")]
    found = filtered(packed(members))
    assert sorted(found) == ["etc", "usr", "usr/etc", "usr/etc/environment", "usr/etc/rc"]
    assert found["etc"][0].issym()
    assert found["usr/etc/rc"][1] == FILES["etc/rc"]


@pytest.mark.parametrize("target", ["nowhere", "../../nowhere", "etc", "/", "file"])
def test_where_etc_leads_nowhere_it_becomes_a_folder(target: str) -> None:
    found = filtered(packed([symlink("etc", target), entry("file", b"")]))
    assert found["etc"][0].isdir()
    assert found["etc/rc"][1] == FILES["etc/rc"]


def test_a_folder_in_the_place_of_one_of_the_files_goes() -> None:
    found = filtered(packed([folder("etc"), folder("etc/rc"), entry("etc/rc/x", b"x")]))
    assert sorted(found) == ["etc", "etc/environment", "etc/rc"]


def test_what_is_split_off_is_left_out_but_not_what_links_to_it() -> None:
    names = ["sqshforge/a", "sqshforgery", "usr/sqshforge/b"]
    members = [folder("sqshforge"), *(entry(name, b"x") for name in names)]
    target = io.BytesIO()
    source = packed([*members, link("usr/a", "sqshforge/a")])
    docker_export.copy(io.BytesIO(source), target, {}, EPOCH, lambda amount: None, split=True)
    with tarfile.open(fileobj=io.BytesIO(target.getvalue())) as archive:
        assert sorted(archive.getnames()) == ["etc", "sqshforgery", "usr/a", "usr/sqshforge/b"]
        kept = archive.extractfile("usr/a")
        assert kept is not None and kept.read() == b"x"


def test_the_bytes_are_told_as_they_pass() -> None:
    told: list[float] = []
    source = io.BytesIO(packed([entry("a", bytes(3_000_000)), entry("b", b"b")]))
    docker_export.copy(source, io.BytesIO(), FILES, EPOCH, told.append)
    assert 3_000_001 <= sum(told) <= 3_000_001 + 2 * 511
    assert len(told) > 3


def test_the_same_stream_comes_out_in_the_same_bytes() -> None:
    source, targets = packed([folder("etc"), entry("a", b"a")]), [io.BytesIO(), io.BytesIO()]
    for target in targets:
        docker_export.copy(io.BytesIO(source), target, FILES, EPOCH, lambda amount: None)
    assert targets[0].getvalue() == targets[1].getvalue()


@pytest.mark.parametrize("length", [0, 100, 512 + 700, 512 + 4096 + 100])
def test_a_stream_that_breaks_off_is_an_error(length: int) -> None:
    whole = packed([entry("a", bytes(4096)), entry("b", bytes(4096))])
    with pytest.raises(WorkError, match="broken"):
        filtered(whole[:length])


def test_what_is_no_tar_is_an_error() -> None:
    with pytest.raises(WorkError, match="broken"):
        filtered(b"<html>" * 1000)


def test_the_writer_is_read_to_its_end() -> None:
    source = io.BytesIO(packed([entry("a", b"a")]) + bytes(1 << 20))
    filtered(source)
    assert source.read() == b""
