"""docs/training/systems/: the table at the end of each page is true.

It has every flag of the system, the flag is accepted or refused as the table says, and the test
that the table names contains the flag.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sqshforge.run.passed import PASSED
from training import convert_mamba2_ssm_checkpoint as convert
from training import (
    create_mamba_config,
    get_dataset,
    llama_fsdp,
    llama_smp,
    mamba2_neuron,
    mamba_fsdp,
)
from training.config.flags import Flag, parse, setting_flags
from training.config.setting import boolean
from training.data.tokenize.__main__ import tokenize
from training.errors import RequestError
from training.systems.composer import yaml
from training.systems.smp import flags as smp

HEAD = "| flag | here | test |"
REFUSED = "refused"


@dataclass(frozen=True)
class Entry:
    """An entry point: its flags, those used most, and a minimal valid command line."""

    flags: Sequence[Flag]
    common: Sequence[str]
    configure: Callable[[Sequence[str]], Any]
    least: str


ENTRIES = {
    "mamba-fsdp": Entry(
        *(mamba_fsdp.FLAGS, mamba_fsdp.COMMON, mamba_fsdp.configure),
        "--dataset_path=text:x --save_ckpt_path=/x",
    ),
    "llama-fsdp": Entry(
        *(llama_fsdp.FLAGS, llama_fsdp.COMMON, llama_fsdp.configure),
        "--checkpoint_dir=/x --dataset=text:x",
    ),
    "llama-smp": Entry(
        *(smp.FLAGS, smp.COMMON, llama_smp.configure),
        "--use_synthetic_data=1 --checkpoint_dir=/x",
    ),
    "mamba2-neuron": Entry(
        *(mamba2_neuron.FLAGS, mamba2_neuron.COMMON, mamba2_neuron.configure),
        "--data_dir text:x --seq_len 128 --max_steps 9",
    ),
}
PAGES = (*ENTRIES, "mamba-composer")
PROGRAMS: dict[str, Callable[[Sequence[str]], Any]] = {
    "get_dataset": get_dataset.get_dataset,
    "tokenize_dataset": tokenize,
    "convert_mamba2_ssm_checkpoint": convert.convert,
    "create_mamba_config": create_mamba_config.main,
}
"""Programs other than the entry points; a table writes their flags after their names."""


@dataclass(frozen=True)
class Row:
    spans: list[str]  # the code spans in the first cell
    here: str
    test: str


@cache
def rows(root: Path, page: str) -> list[Row]:
    """Read the table, which is the last thing on the page."""
    text = (root / "docs" / "training" / "systems" / f"{page}.md").read_text()
    assert text.count(HEAD) == 1, HEAD
    lines = text[text.index(HEAD) :].splitlines()[2:]
    cells = [line.strip("|").split(" | ") for line in lines]
    assert all(len(row) == 3 for row in cells), [row for row in cells if len(row) != 3]
    return [
        Row(re.findall(r"`([^`]+)`", flag), here, test.strip(" `")) for flag, here, test in cells
    ]


def name_of(span: str) -> str:
    """Return the flag in `--name value`, `--name=value`, `program --name value`; empty for none."""
    found = re.match(rf"(?:(?:{'|'.join(PROGRAMS)}) )?(-{{1,2}}\w+)", span)
    return found[1] if found else ""


def key_of(span: str) -> tuple[str, str]:
    """Return the section and key of `section.key: value`; empty strings for anything else."""
    found = re.match(r"(\w+)\.(\w+)", span)
    return (found[1], found[2]) if found and found[1] in yaml.SECTIONS else ("", "")


def own(entry: Entry) -> list[Flag]:
    """Return the system's own flags, and those of our settings that are used most."""
    ours = {flag.name: flag for flag in setting_flags()}
    return [
        flag
        for flag in entry.flags
        if flag.name in entry.common
        or flag.name not in ours
        or replace(flag, listed=False) != ours[flag.name]
    ]


@pytest.mark.parametrize("page", PAGES)
def test_each_row_names_a_test_that_has_it(page: str, root: Path) -> None:
    for row in rows(root, page):
        file, _, name = row.test.partition("::")
        text = (root / file).read_text()
        defined = {
            one.name for one in ast.walk(ast.parse(text)) if isinstance(one, ast.FunctionDef)
        }
        assert name in defined and name.startswith("test_"), row
        for span in row.spans:
            named = name_of(span).lstrip("-") or key_of(span)[1]
            assert not named or named in text, f"{span} is not in {file}"


@pytest.mark.parametrize("page", ENTRIES)
def test_each_flag_of_the_system_is_in_the_table(page: str, root: Path) -> None:
    there = {name_of(span).lstrip("-") for row in rows(root, page) for span in row.spans}
    missing = [
        name
        for flag in own(ENTRIES[page])
        for name in (flag.name, *flag.aliases)
        if name not in there
    ]
    assert not missing


@pytest.mark.parametrize("page", ENTRIES)
def test_each_flag_is_taken_or_refused_as_the_table_says(page: str, root: Path) -> None:
    entry = ENTRIES[page]
    spellings = {one: flag for flag in entry.flags for one in flag.spellings}
    for row in rows(root, page):
        for span in row.spans:
            if not span.startswith("-"):
                continue
            words, name = shlex.split(span), name_of(span)
            if row.here.startswith(REFUSED):
                with pytest.raises(RequestError) as error:
                    entry.configure([*entry.least.split(), *words])
                assert name.lstrip("-") in str(error.value), span
            elif span == name and spellings[name].read is not boolean:
                assert name in spellings, span
            else:
                parse(entry.flags, words, program="", about="")


def test_each_key_of_composers_file_is_in_the_table_and_exists(root: Path) -> None:
    known = {(section, one.name) for section, kind in yaml.SECTIONS.items() for one in fields(kind)}
    there = {key_of(span) for row in rows(root, "mamba-composer") for span in row.spans}
    assert there - {("", "")} == known


@pytest.mark.parametrize("program", PROGRAMS)
def test_flags_of_other_programs_exist(
    program: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spans = [span for page in PAGES for row in rows(root, page) for span in row.spans]
    asked = {name_of(span) for span in spans if span.startswith(f"{program} -")}
    with pytest.raises(SystemExit):
        PROGRAMS[program](["--help"])
    assert asked and asked <= set(re.findall(r"(?<![\w-])-{1,2}\w+", capsys.readouterr().out))


@pytest.mark.parametrize("page", PAGES)
def test_each_variable_is_read_by_a_launcher_or_passed_into_the_container(
    page: str, root: Path
) -> None:
    launchers = "".join(path.read_text() for path in (root / "launch").glob("*.sbatch"))
    spans = [span for row in rows(root, page) for span in row.spans]
    names = [span.partition("=")[0] for span in spans if re.match(r"[A-Z][A-Z_0-9]+(=|$)", span)]
    patterns = [pattern for one in PASSED for pattern in one.patterns]
    assert names
    for name in names:
        read = re.search(rf"\$\{{{name}[:+/}}-]", launchers)
        assert read or any(fnmatchcase(name, pattern) for pattern in patterns), name


def test_the_pages_are_all_there(root: Path) -> None:
    folder = root / "docs" / "training" / "systems"
    assert sorted(path.stem for path in folder.glob("*.md")) == sorted(PAGES)
    table = (root / "docs" / "training" / "training.md").read_text()
    assert all(f"](systems/{page}.md)" in table for page in PAGES)
