"""metrics.jsonl contains one undisturbed history."""

import json
from pathlib import Path

from training.loggers.console import Console
from training.loggers.jsonl import truncate
from training.loggers.text import TextLogger, format_report


def test_lines_after_the_checkpoint_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"kind": "step", "step": step}) + "\n" for step in range(1, 8)]
    lines.insert(4, json.dumps({"kind": "report", "step": 4}) + "\n")
    path.write_text("".join(lines) + '{"kind": "st')  # a kill has torn the last one
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
        "tokens_per_second": 24691.2,
        "seconds_per_step": 0.08294,
        "samples_per_second": 24.113,
        "tflops": 41.987,
        "mfu": None,
        "memory_bytes": 3 * 2**29,
    }
    assert format_report(line, 80, 185.0) == (
        "step 20/80 | loss 4.1235 | norm 1.50 | 0.0829 s/step | 24,691 tokens/s | 3 min 5 s left"
    )
    assert format_report({**line, "loss": None, "grad_norm": None}, 80, None) == (
        "step 20/80 | loss - | norm - | 0.0829 s/step | 24,691 tokens/s"
    )


def test_the_line_of_a_large_run_fits() -> None:
    line = {
        "step": 900000,
        "loss": 11.12345,
        "grad_norm": 12345.678,
        "tokens_per_second": 12_345_678.9,
        "seconds_per_step": 12.3456,
        "mfu": 0.4123,
    }
    shown = format_report(line, 1000000, 40 * 3600 + 59 * 60)
    assert shown == (
        "step 900000/1000000 | loss 11.1235 | norm 12,346 | 12.3 s/step | 12.3M tokens/s | "
        "MFU 41.2% | 40 h 59 min left"
    )
    assert len(shown) <= 110
    assert format_report({**line, "tokens_per_second": 966_123.0}, 1000000, 4e5).endswith(
        "966k tokens/s | MFU 41.2% | 4 d 15 h left"
    )


def test_time_left_is_by_the_median_of_reports_and_left_out_where_the_end_is_not_known() -> None:
    """A start's first report includes compilation."""
    base = {"kind": "report", "loss": 1.0, "grad_norm": 1.0, "tokens_per_second": 9.0, "mfu": None}
    for may_end_early in (False, True):
        shown: list[str] = []
        console = Console()
        console.say = lambda text, file=None: shown.append(text)  # type: ignore[method-assign,assignment] # noqa: B023
        logger = TextLogger(1000, console, may_end_early=may_end_early)
        for step, seconds in ((100, 9.0), (200, 1.0), (300, 2.0)):
            logger.write([{**base, "step": step, "seconds_per_step": seconds}])
        ends = [line.partition("tokens/s")[2] for line in shown]
        left = [" | 2 h 15 min left", " | 13 min 20 s left", " | 23 min 20 s left"]
        assert ends == (["", "", ""] if may_end_early else left)
