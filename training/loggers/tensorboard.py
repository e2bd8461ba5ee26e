"""TensorBoard: a curve for each quantity, over the steps."""

from __future__ import annotations

import io
import os
import socket
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from training.errors import RequestError, TrainingError, writing
from training.loggers.base import Logger, Record
from training.loggers.jsonl import append_whole

VERSION = "brain.Event:2"

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

The curves show the losses of steps, not the reports' means.
"""


class TensorBoard(Logger):
    """Writes events; the folder's events of steps after `start` are no longer shown.

    It does not use torch's SummaryWriter, whose thread dies of a full disk and then writes no more.
    Raises RequestError if the folder cannot be written.
    """

    def __init__(self, folder: Path, start: int, tags: str) -> None:
        self.tags = TAGS[tags]
        # TensorBoard reads a folder's files in the order of their names.
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.0"
        self.path = folder / name
        first = start + 1
        try:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
            self._append(
                Event(file_version=VERSION),
                Event(step=first, file_version=VERSION),
                Event(step=first, session_log=SessionLog(status=SessionLog.START)),
            )
        except TrainingError as error:
            raise RequestError(f"tensorboard_dir: {error}") from error

    def write(self, records: list[Record]) -> None:
        self._append(
            *(
                Event(step=record["step"], summary=Summary(value=[point(tag, record[name])]))
                for record in records
                for name, tag in self.tags.get(record["kind"], {}).items()
                if record[name] is not None
            )
        )

    def _append(self, *events: Event) -> None:
        packed = io.BytesIO()
        writer = RecordWriter(packed)
        for event in events:
            event.wall_time = time.time()
            writer.write(event.SerializeToString())
        append_whole(self.path, packed.getvalue())


def point(tag: str, value: float) -> Summary.Value:
    """Return one point of a curve."""
    return Summary.Value(tag=tag, simple_value=value)
