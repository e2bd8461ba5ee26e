"""Loss curves of small models on the standard library's text, stored once as a reference.

`python -m tests.training.support.curves` regenerates tests/golden/curves/*.json: only after a
change that is meant to change the losses, which the commit then says.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
import tempfile
from pathlib import Path

from tests.training.support.runs import losses, run

GOLDEN = Path(__file__).parents[2] / "golden" / "curves"
FAMILIES = sorted(path.stem for path in GOLDEN.glob("*.yaml"))
LIBRARY = Path(sysconfig.get_path("stdlib"))


def train(family: str, save: Path) -> list[float]:
    """Train the family's run; returns the losses of all steps."""
    changes = (f"dataset_path=text:{LIBRARY}/*.py", f"save_ckpt_path={save}")
    done = run(0, "--config", str(GOLDEN / f"{family}.yaml"), *changes, program=("-m", "training"))
    assert done.returncode == 0, done.stderr
    return losses(save)


def digest() -> str:
    """Return the text's digest: each release of Python has a different standard library."""
    total = hashlib.sha256()
    for path in sorted(LIBRARY.glob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()


def main() -> None:
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            curve = [round(loss, 5) for loss in train(family, Path(folder))]
        record = {"text": digest(), "losses": curve}
        (GOLDEN / f"{family}.json").write_text(json.dumps(record) + "\n")
        print(family, curve[0], curve[-1])


if __name__ == "__main__":
    main()
