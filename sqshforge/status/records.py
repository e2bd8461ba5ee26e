"""What config.json says of a run, of ours or of Composer's."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqshforge.status.tail import Record, document, whole

FILE = "config.json"
MOST = 1 << 20  # bytes of it
LENGTH = re.compile(r"(?P<value>(\d+\.?\d*|\.\d+)(e[+-]?\d+)?)(?P<unit>tok|ba)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is shown of a run's settings; None where the file does not tell."""

    model: str = ""
    num_steps: int | None = None
    world_size: int | None = None  # processes, a device each
    report_interval: int = 1  # steps
    evaluates: bool = False
    short: str = ""  # the setting that may end a run before num_steps


def there(folder: Path) -> bool:
    """Whether a folder has a run's config.json and not, for one, that of a model."""
    return _record(folder) is not None


def read(folder: Path) -> Settings:
    """The settings of a run's folder, as its last start wrote them; empty where there are none."""
    record = _record(folder)
    if record is None:
        return Settings()
    sections = {name: part for name, part in record["config"].items() if isinstance(part, dict)}
    world_size = whole(record.get("world_size"))
    return (
        _composer(sections, world_size) if "scheduler" in sections else _own(sections, world_size)
    )


def _record(folder: Path) -> Record | None:
    record = document(folder / FILE, MOST)
    return record if record and isinstance(record.get("config"), dict) else None


def _own(sections: dict[str, dict[str, Any]], world_size: int | None) -> Settings:
    run, data = sections.get("run", {}), sections.get("data", {})
    short = ""
    if data.get("epochs"):
        short = f"epochs={data['epochs']}"
    if run.get("compile_only"):
        short = "compile_only"
    return Settings(
        model=str(sections.get("model", {}).get("name", "")),
        num_steps=whole(run.get("num_steps")),
        world_size=world_size,
        report_interval=whole(run.get("report_interval")) or 1,
        evaluates=bool(data.get("eval_dataset_path")),
        short=short,
    )


def _composer(sections: dict[str, dict[str, Any]], world_size: int | None) -> Settings:
    """Composer's: the last step is that which reaches t_max; a sample is seq_len + 1 tokens."""
    data = sections.get("data", {})
    found = LENGTH.fullmatch(str(sections["scheduler"].get("t_max", "")))
    batch, length = whole(data.get("global_batch_size")), whole(data.get("seq_len"))
    steps = None
    if found and found["unit"].lower() == "ba":
        steps = int(float(found["value"]))
    elif found and batch and length:
        steps = math.ceil(float(found["value"]) / (batch * (length + 1)))
    return Settings(
        model=str(sections.get("general", {}).get("full_name", "")),
        num_steps=steps,
        world_size=world_size,
        evaluates=bool(data.get("eval_paths")),
    )
