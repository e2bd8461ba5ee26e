"""The command lines in the `sh` blocks of a page, parsed as a shell would; nothing is run.

Forms in brackets count as given (`[--check]`; of `a|b` the first), and the page's earlier
assignments, exports and aliases apply.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.support.page_blocks import Block

WRAPPERS = ("srun", "nsys", "neuron_parallel_compile")
"""Programs that start the command after their own options."""
INNER = re.compile(r"(\.venv/bin/)?(python3?|sqshforge|torchrun|composer|neuron_parallel_compile)")

_HERE = re.compile(r"<<-?\s*(['\"]?)(\w+)\1([^\n]*)\n.*?^\2$", re.DOTALL | re.MULTILINE)
_OPTIONAL = re.compile(r"(?<=\s|:|\w)\[([^\[\]\n]*)\](?:\.\.\.)?")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """One program with its words, and the variables that are set for it."""

    where: str
    words: tuple[str, ...]
    variables: Mapping[str, str]
    before: tuple[str, ...] = ()  # the words of the command that pipes into it

    def __str__(self) -> str:
        return f"{self.where}: {shlex.join(self.words)}"


@dataclass
class _Session:
    """The shell of one page."""

    assigned: dict[str, str] = field(default_factory=dict)
    exported: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, list[str]] = field(default_factory=dict)

    def read(self, block: Block) -> Iterator[Command]:
        text = _HERE.sub(r"\3", block.text).replace("\\\n", " ")
        while _OPTIONAL.search(text):
            text = _OPTIONAL.sub(lambda found: found[1].split("|")[0], text)
        for line in _logical_lines(text):
            # A variable that the page has assigned stands for its value, perhaps several words.
            line = re.sub(r"\$(\w+)", lambda name: self.assigned.get(name[1], name[0]), line)
            yield from self._line(line, block.where)

    def _line(self, line: str, where: str) -> Iterator[Command]:
        before: tuple[str, ...] = ()
        for words, is_piped in _simple_commands(line):
            variables = dict(self.exported)
            while words and (found := _ASSIGNED.fullmatch(words[0])):
                variables[found[1]] = found[2]
                words = words[1:]
            if not words:
                self.assigned |= variables
            elif words[0] in ("alias", "export"):
                name, _, value = words[1].partition("=")
                if words[0] == "alias":
                    self.aliases[name] = shlex.split(value)
                else:
                    self.exported[name] = self.assigned[name] = value
            else:
                words = [*self.aliases.get(words[0], words[:1]), *words[1:]]
                for one in _with_inner(words):
                    yield Command(where, tuple(one), variables, before if is_piped else ())
                before = tuple(words)
            for word in words:
                for inner in re.findall(r"\$\(([^()]*)\)", word):
                    yield from self._line(inner, where)


def commands(blocks: Sequence[Block]) -> list[Command]:
    """Return every command of a page's blocks, in order; one that another starts comes after it."""
    session = _Session()
    return [one for block in blocks for one in session.read(block)]


def _logical_lines(text: str) -> Iterator[str]:
    """Yield lines, joining those that a quotation spans."""
    kept = ""
    for line in text.splitlines():
        kept = f"{kept}\n{line}" if kept else line
        try:
            shlex.split(kept, comments=True)
        except ValueError:  # a quotation is still open
            continue
        yield kept
        kept = ""
    assert not kept, f"a quotation stays open: {kept}"


def _simple_commands(line: str) -> Iterator[tuple[list[str], bool]]:
    """Yield the words of each program in a line, and whether another one pipes into it."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&<>")
    lexer.whitespace_split = True
    words: list[str] = []
    is_piped = False
    tokens = [*lexer, ";"]
    for at, token in enumerate(tokens):
        if set(token) <= set(";|&"):
            if words and words[0] not in ("for", "done"):
                yield (words[1:] if words[0] in ("do", "then") else words), is_piped
            words, is_piped = [], token == "|"
        elif not set(token) <= set("<>") and not set(tokens[at - 1]) <= set("<>"):
            words.append(token)


def _with_inner(words: list[str]) -> Iterator[list[str]]:
    """Yield a command and those that it starts: after `--` in a container, by srun on a node."""
    yield words
    inner: list[str] = []
    if words[0].endswith(("sqshforge", "sqshforge-run.pyz")) or words[0] == "python3":
        starts = {"run", "trace"} & set(words[1:2]) or words[1:2] == ["sqshforge-run.pyz"]
        inner = words[words.index("--") + 1 :] if starts and "--" in words else []
    elif words[0] in WRAPPERS:
        at = (n for n, word in enumerate(words) if n and INNER.fullmatch(word))
        inner = words[next(at, len(words)) :]
    if inner:
        yield from _with_inner(inner)
