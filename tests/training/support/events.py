"""Read TensorBoard's files as TensorBoard does."""

from __future__ import annotations

from pathlib import Path


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the curves that TensorBoard shows of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    shown.Reload()
    tags = shown.Tags()["scalars"]
    return {tag: [(one.step, one.value) for one in shown.Scalars(tag)] for tag in tags}
