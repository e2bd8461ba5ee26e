"""Loss curves of small models on a text of our own making, stored once as a reference.

`python -m tests.training.support.curves` regenerates tests/golden/curves/*.json: only after a
change that is meant to change the losses, which the commit then says.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

from tests.training.support.runs import losses, run

GOLDEN = Path(__file__).parents[2] / "golden" / "curves"
FAMILIES = sorted(path.stem for path in GOLDEN.glob("*.yaml"))
WORDS = ("class", "def", "else", "for", "import", "in", "not", "return", "self", "try", "while")
LINES = 4000


def text() -> str:
    """Return lines of words, each of which is followed by one of four others, one mostly.

    The same with every Python: `random.random` is the one function of its kind that promises it.
    """
    draw = random.Random(7).random
    after = [[int(len(WORDS) * draw()) for _ in range(4)] for _ in WORDS]
    lines = []
    for _ in range(LINES):
        word, line = int(len(WORDS) * draw()), []
        for _ in range(3 + int(6 * draw())):
            line.append(WORDS[word])
            word = after[word][int(4 * draw() ** 2)]
        lines.append("    " * int(3 * draw()) + " ".join(line))
    return "\n".join(lines)


def train(family: str, folder: Path) -> list[float]:
    """Train the family's run, in a folder; returns the losses of all steps."""
    save = folder / "run"
    (folder / "text.txt").write_text(text())
    changes = (f"dataset_path=text:{folder}/text.txt", f"save_ckpt_path={save}")
    done = run(0, "--config", str(GOLDEN / f"{family}.yaml"), *changes, program=("-m", "training"))
    assert done.returncode == 0, done.stderr
    return losses(save)


def main() -> None:
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            curve = [round(loss, 5) for loss in train(family, Path(folder))]
        (GOLDEN / f"{family}.json").write_text(json.dumps(curve) + "\n")
        print(family, curve[0], curve[-1])


if __name__ == "__main__":
    main()
