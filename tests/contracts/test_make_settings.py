"""What a user passes to make reaches sqshforge unchanged, without any shell interpreting it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sqshforge.host.programs import Programs

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("target", ["image", "sqsh", "smoke-test", "vendor"])
def test_each_word_of_set_is_one_setting(target: str, root: Path, tmp_path: Path) -> None:
    shutil.copy(root / "Makefile", tmp_path)
    program = tmp_path / ".venv/bin/sqshforge"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "setup.sh").write_text("#!/bin/sh\n")
    for path in (program, tmp_path / "setup.sh"):
        path.chmod(0o755)
    settings = ["A=x", "B=p;touch", "C=it's", "D=M*", 'E="q"', "F=`id`"]
    done = Programs().attempt(
        ["make", target, f"SET={' '.join(settings)}"],
        cwd=tmp_path,
        env={"MAKEFLAGS": "", "MAKELEVEL": "0"},  # set by a make that runs the tests
    )
    assert done.code == 0, done.err
    words = [word for one in settings for word in ("--set", one)]
    assert done.out.splitlines()[2:] == words
