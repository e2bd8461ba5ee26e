"""What is printed: a line a report or evaluation, and a bar on a terminal."""

from __future__ import annotations

from training.loggers.console import Console
from training.loggers.outlet import Outlet, Record


class Log(Outlet):
    """Prints a line a report interval, and one an evaluation."""

    def __init__(self, num_steps: int, console: Console) -> None:
        self.num_steps, self.console = num_steps, console

    def write(self, records: list[Record]) -> None:
        for record in records:
            if record["kind"] == "report":
                self.console.say(readable(record, self.num_steps))
            elif record["kind"] == "evaluation":
                self.console.say(evaluation(record, self.num_steps))


class Bar(Outlet):
    """Moves the bar a step at a time; the loss behind it is that of the last report."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def write(self, records: list[Record]) -> None:
        for record in records:
            if record["kind"] == "report" and record["loss"] is not None:
                self.console.advance(0, loss=f"{record['loss']:.4f}")

    def step(self) -> None:
        self.console.advance()

    def close(self, failed: bool) -> None:
        self.console.close()


def readable(record: Record, num_steps: int) -> str:
    """Format a report for people."""
    loss, norm = (record[what] for what in ("loss", "grad_norm"))
    mfu = "" if record["mfu"] is None else f"MFU {record['mfu']:.1%} | "
    return (
        f"step {record['step']}/{num_steps} | tokens {record['tokens_seen']:,} | "
        f"loss {'-' if loss is None else f'{loss:.4f}'} | "
        f"gradient norm {'-' if norm is None else f'{norm:.3f}'} | "
        f"learning rate {record['learning_rate']:.2e} | "
        f"{record['tokens_per_second_per_device']:,.0f} tokens/s/device | "
        f"{record['samples_per_second']:,.2f} samples/s | "
        f"{record['tflops']:.2f} TFLOPS/device | {mfu}"
        f"memory {record['memory_bytes'] / 2**30:.2f} GiB"
    )


def evaluation(record: Record, num_steps: int) -> str:
    """Format what an evaluation gave."""
    label = f" {record['label']}," if "label" in record else ""
    tops = [name for name in ("top3", "top10") if name in record]
    return (
        f"step {record['step']}/{num_steps} | evaluation on{label} {record['tokens']:,} tokens | "
        f"loss {record['loss']:.4f} | perplexity {record['perplexity']:.2f}"
    ) + "".join(f" | {name} {record[name]:.1%}" for name in tops)
