"""Free space is checked before the work, on the file system that the work happens on."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from sqshforge.errors import MissingError
from sqshforge.host.resources import require_space


def test_enough_is_enough(tmp_path: Path) -> None:
    require_space(tmp_path, shutil.disk_usage(tmp_path).free // 2, "work")
    require_space(tmp_path, 0, "work")


def test_what_is_missing_is_named_to_the_byte(tmp_path: Path) -> None:
    with pytest.raises(MissingError) as caught:
        require_space(tmp_path, 10**18, "packing a.sqsh")
    error = caught.value
    assert error.exit_code == 3
    assert error.where == str(tmp_path)
    numbers = re.findall(r"[\d,]{4,}(?= bytes| are)", error.what)
    needed, free, missing = (int(number.replace(",", "")) for number in numbers)
    assert (needed, missing) == (10**18, needed - free)
    assert "packing a.sqsh" in error.what and "1000000.0 TB" in error.what
    assert "free " in error.fix and str(tmp_path) in error.fix


@pytest.mark.parametrize("relative", [False, True])
def test_a_folder_to_be_made_counts_by_the_one_it_will_be_in(
    relative: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("new/deeper") if relative else tmp_path / "new" / "deeper"
    require_space(folder, 1, "work")
    with pytest.raises(MissingError) as caught:
        require_space(folder, 10**18, "work")
    assert caught.value.where == str(folder)


def test_another_file_system_has_its_own_space() -> None:
    with pytest.raises(MissingError, match="0 are free"):
        require_space(Path("/proc"), 1, "work")
