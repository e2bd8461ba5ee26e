"""metrics.jsonl tells one undisturbed history."""

import json
from pathlib import Path

from training.loggers.jsonl import truncate
from training.loggers.text import format_report


def test_lines_after_the_checkpoint_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"kind": "step", "step": step}) + "\n" for step in range(1, 8)]
    lines.insert(4, json.dumps({"kind": "report", "step": 4}) + "\n")
    path.write_text("".join(lines) + '{"kind": "st')  # the last one torn by a kill
    truncate(path, 5)
    assert path.read_text() == "".join(lines[:6])
    truncate(path, 0)
    assert path.read_text() == ""
    truncate(tmp_path / "none", 3)


def test_a_whole_line_without_its_end_is_torn_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "step", "step": 1}')
    truncate(path, 5)
    assert path.read_text() == ""


def test_the_line_for_people() -> None:
    line = {
        "step": 20,
        "tokens_seen": 40960,
        "loss": 4.12345,
        "grad_norm": 1.5,
        "learning_rate": 3e-4,
        "tokens_per_second_per_device": 12345.6,
        "samples_per_second": 24.113,
        "tflops": 41.987,
        "mfu": None,
        "memory_bytes": 3 * 2**29,
    }
    assert format_report(line, 80) == (
        "step 20/80 | tokens 40,960 | loss 4.1235 | gradient norm 1.500 | "
        "learning rate 3.00e-04 | 12,346 tokens/s/device | 24.11 samples/s | "
        "41.99 TFLOPS/device | memory 1.50 GiB"
    )
    assert "41.99 TFLOPS/device | MFU 41.2% | memory" in format_report({**line, "mfu": 0.4123}, 80)
