"""The doctor: every gap is told with what mends it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sqshforge import doctor
from sqshforge.programs import Programs
from tests.commands import sqshforge

pytestmark = pytest.mark.usefixtures("no_docker")


def test_on_a_machine_that_is_set_up_nothing_is_missing(tmp_path: Path) -> None:
    findings = doctor.examine(tmp_path, Programs())
    assert [one.what for one in findings if one.needed and not one.ok] == []


class Bare(Programs):
    """A machine with nothing installed but apt and Python."""

    def which(self, program: str) -> Path | None:
        return super().which(program) if program in ("apt-get", sys.executable) else None

    def all(self, program: str) -> list[Path]:
        return []


def test_on_a_bare_machine_each_gap_has_its_mend(tmp_path: Path) -> None:
    findings = doctor.examine(tmp_path, Bare())
    missing = {one.what.split()[0]: one.mend for one in findings if one.needed and not one.ok}
    assert missing["mksquashfs"] == "apt-get install squashfs-tools"
    assert missing["unshare"] == "apt-get install util-linux"
    assert "apt-get install buildah" in missing["buildah"]
    shown = "\n".join(doctor.lines(findings))
    assert "MISSING mksquashfs (packing): not found" in shown
    assert "mend: apt-get install squashfs-tools" in shown


def test_too_little_room_tells_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ROOM", 1e18)
    room = next(
        one for one in doctor.examine(tmp_path / "not" / "yet", Programs()) if "room" in one.what
    )
    assert str(tmp_path) in room.what
    assert not room.ok
    assert room.mend.startswith("free ")


def test_by_command_line() -> None:
    done = sqshforge("doctor")
    assert done.code == 0, done.out + done.err
    assert done.out.splitlines()[-1] == "next: make quickstart"
