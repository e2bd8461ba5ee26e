"""Where skopeo and buildah find an ordinary user's logins at registries."""

from __future__ import annotations

import os
from pathlib import Path

from sqshforge.project import cache_home

CONFIGURED = ("XDG_RUNTIME_DIR", "REGISTRY_AUTH_FILE")  # either names another place


def choose() -> None:
    """Name the file of logins, for this process and its children, where its usual place is closed.

    Without XDG_RUNTIME_DIR, which su, cron and Slurm do not set, both programs look into
    /run/containers/UID first. On a machine where root has used them that is root's alone, and they
    fail there instead of going on to the user's own files.
    """
    if any(os.environ.get(name) for name in CONFIGURED):
        return
    try:
        Path(f"/run/containers/{os.geteuid()}/auth.json").stat()
    except PermissionError:
        os.environ["REGISTRY_AUTH_FILE"] = str(_file())
    except OSError:
        pass


def _file() -> Path:
    """The user's own logins, else a file that has none."""
    above = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    for file in (above / "containers/auth.json", Path.home() / ".docker/config.json"):
        if os.access(file, os.R_OK):
            return file
    none = cache_home() / "no-logins.json"
    none.parent.mkdir(parents=True, exist_ok=True)
    none.write_text("{}\n")
    return none
