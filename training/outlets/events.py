"""TensorBoard: a curve a quantity, over the steps."""

from __future__ import annotations

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from training.errors import RequestError, writing
from training.outlets.outlet import Outlet, Record

TAGS = {
    "own": {
        "step": {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "learning_rate"},
        "report": {
            "tokens_per_second_per_device": "tokens_per_second_per_device",
            "mfu": "mfu",
            "memory_bytes": "memory",
        },
        "evaluation": {"loss": "evaluation_loss", "perplexity": "perplexity"},
    },
    "smp": {
        "step": {
            "loss": "Loss/train",
            "grad_norm": "Norms/grad_norm",
            "learning_rate": "LR/learning_rate",
        },
        "report": {"samples_per_second": "Perf/SeqPerSec", "tflops": "Perf/ModelTFLOPs"},
        "evaluation": {"loss": "Loss/val", "perplexity": "Loss/perplexity"},
    },
}
"""Setting tensorboard_tags -> kind of record -> its field -> the tag.

The losses of steps are drawn, not the reports' means.
"""


class TensorBoard(Outlet):
    """Writes events; those that the folder has of steps after `start` are no longer shown.

    Raises RequestError if the folder cannot be written.
    """

    def __init__(self, folder: Path, start: int, tags: str) -> None:
        self.folder, self.tags = folder, TAGS[tags]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = SummaryWriter(str(folder), purge_step=start + 1)
        except OSError as error:
            raise RequestError(
                f"tensorboard_dir: {folder} cannot be written: {error.strerror}"
            ) from error

    def write(self, records: list[Record]) -> None:
        with writing(self.folder):
            for record in records:
                for name, tag in self.tags[record["kind"]].items():
                    if record[name] is not None:
                        self._writer.add_scalar(tag, record[name], record["step"])
            self._writer.flush()

    def close(self, failed: bool) -> None:
        with writing(self.folder):
            self._writer.close()
