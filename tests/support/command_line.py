"""The command line, as a user types it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from sqshforge.host.programs import Programs, Result

SCRIPT = Path(sys.executable).with_name("sqshforge")


def sqshforge(*words: str | Path, env: Mapping[str, str] | None = None) -> Result:
    """Run `sqshforge WORDS`, with these variables besides the ones that are set."""
    return Programs().attempt([SCRIPT, *words], env=env)
