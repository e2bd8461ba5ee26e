"""Programs of another machine: recognized by their first bytes, and tried where it matters."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from sqshforge import platforms
from sqshforge.errors import MissingError
from sqshforge.host import emulation
from sqshforge.host.programs import Programs, Result


def test_a_program_says_for_which_machine_it_is() -> None:
    head = Path("/bin/sh").read_bytes()[: platforms.HEAD]
    assert platforms.of_program(head) == platforms.own()
    for one in platforms.ALL.values():
        assert platforms.of_program(one.smallest_program()) == one.name
    assert platforms.of_program(b"#!/bin/sh\n" + bytes(20)) == ""
    assert platforms.of_program(b"\x7fELF") == ""
    riscv = bytearray(platforms.ARM.smallest_program())
    riscv[platforms.MACHINE_AT] = 243
    assert platforms.of_program(bytes(riscv)) == "another machine (ELF number 243)"


@pytest.mark.processes
def test_the_smallest_program_of_this_machine_ends_well(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(platforms.ALL[platforms.own()].smallest_program())
    program.chmod(0o755)
    assert Programs().attempt([program]).code == 0


class Without(Programs):
    """The real programs, but with no emulator registered."""

    def attempt(
        self,
        argv: Sequence[str | Path],
        *,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float | None = None,
    ) -> Result:
        if argv[-1] == "/program":
            return Result(tuple(map(str, argv)), 127, "", "Exec format error")
        return super().attempt(argv, stdin=stdin, env=env, cwd=cwd, timeout=timeout)


def test_a_machine_that_runs_no_such_programs_is_answered_with_what_helps() -> None:
    other = next(one for one in platforms.ALL.values() if not one.is_own)
    with pytest.raises(MissingError, match=f"cannot run programs of {other.name}") as caught:
        emulation.require(other, Without())
    assert os.uname().machine in ("x86_64", "aarch64")
    assert "qemu-user-static" in caught.value.fix
    emulation.require(platforms.ALL[platforms.own()], Without())
    emulation.require(None, Without())
