"""The note at the end of a squash file that records its hot range."""

from __future__ import annotations

from pathlib import Path

import pytest

from sqshforge.squashfs import hot_note, hot_range
from sqshforge.squashfs.hot_note import HotRange
from sqshforge.squashfs.superblock import LAYOUT
from tests.support import squash_files


@pytest.mark.parametrize("room", [0, 23, 24, 25, 4095])
def test_a_note_is_at_the_end_of_the_file_and_outside_of_what_its_readers_see(
    room: int, tmp_path: Path
) -> None:
    path, used = tmp_path / "a.sqsh", 8192 - room
    made = bytearray(squash_files.chain(b"a", 1))
    fields = list(LAYOUT.unpack(made[: LAYOUT.size]))
    fields[12] = used
    made[: LAYOUT.size] = LAYOUT.pack(*fields)
    path.write_bytes(bytes(made.ljust(used, b"\1")) + bytes(room))
    with path.open("rb") as file:
        assert hot_note.noted(file, used) is None
    hot_range.note(path, HotRange(96, 1000))
    assert path.stat().st_size == (8192 if room >= hot_note.NOTE.size else 8192 + 4096)
    assert path.read_bytes()[:used] == bytes(made.ljust(used, b"\1"))
    with path.open("rb") as file:
        assert hot_note.noted(file, used) == HotRange(96, 1000)
    hot_range.note(path, HotRange(96, 8192))
    with path.open("rb") as file:
        assert hot_note.noted(file, used) is None  # it has fewer bytes than that
