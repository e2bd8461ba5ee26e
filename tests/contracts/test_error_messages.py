"""Every error that a user may see, in one list, so that reviews see new and changed ones.

After an intended change of a message: python -m tests.contracts.test_error_messages
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "tests" / "golden" / "error-messages.txt"
PACKAGES = ("sqshforge", "training")
# Functions that make errors, by the end of their names, in addition to the error classes.
MAKERS = ("broken", "refused", "shorter")
# Wording that is not plain: a riddle, or a word for which the field has another one.
UNCLEAR = re.compile(r"\bthat is none\b|\bis none\b|\bis no \w+ that\b|\bsee to\b")


def text(node: ast.expr) -> str:
    """Return the words of an expression, with {name} for what is inserted."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    return f"{{{ast.unparse(node)}}}"


def errors(module: Path) -> Iterator[str]:
    """Yield the errors that a module makes, in the order of its lines: the message and its fix."""
    calls = [one for one in ast.walk(ast.parse(module.read_text())) if isinstance(one, ast.Call)]
    for call in sorted(calls, key=lambda one: (one.lineno, one.col_offset)):
        name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        if call.args and (name.endswith("Error") or name in MAKERS):
            fixes = [text(one.value) for one in call.keywords if one.arg == "fix"]
            message = " -- fix: ".join([text(call.args[0]), *fixes])
            if re.search(r"[a-z]{3}", re.sub(r"\{[^}]*\}", "", message)):
                yield message.replace("\n", "\\n")


def listed() -> str:
    """Return the list: a heading for each module, one error per line."""
    modules = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
    made = {path.relative_to(ROOT).as_posix(): list(errors(path)) for path in modules}
    return "\n".join(
        "\n".join([f"{name}:", *(f"    {one}" for one in found), ""])
        for name, found in made.items()
        if found
    )


def test_the_list_is_what_the_code_says() -> None:
    assert listed() == LIST.read_text(), "see the first lines of this test"


def test_messages_are_plain() -> None:
    unclear = [line.strip() for line in LIST.read_text().splitlines() if UNCLEAR.search(line)]
    assert not unclear


if __name__ == "__main__":
    LIST.write_text(listed())
