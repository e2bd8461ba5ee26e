"""What a run reports: the records that are the lines of SAVE/metrics.jsonl, by kind.

Programs read them, so no field may be removed or renamed. The losses are means over all ranks,
written with all their digits. A run that resumes from step N first removes the records after N, so
that they always tell one uninterrupted history. Light: no torch here.
"""

from __future__ import annotations

from collections.abc import Mapping

_STEP = {
    "step": "its number, counted from 1",
    "loss": "mean over the step's targets on all ranks",
    "grad_norm": "global norm of the gradients, before they are clipped",
    "learning_rate": "learning rate of the step",
    "tokens_seen": "tokens up to the end of the step, over all ranks and starts of the run",
}

RECORDS: Mapping[str, Mapping[str, str]] = {
    "step": {
        **_STEP,
        "skipped": "true in a step that was left out (on_nan=skip), whose loss and grad_norm are "
        "null; else absent",
    },
    "report": {
        **_STEP,
        "loss": "mean over the interval's steps, except those that were left out",
        "grad_norm": "mean of the norms, over the same steps",
        "tokens_per_second_per_device": "tokens per second of one rank",
        "tokens_per_second": "tokens per second of all ranks",
        "seconds_per_step": "includes the time that training waited for saves, but no evaluations",
        "samples_per_second": "sequences per second of all ranks",
        "tflops": "TFLOPS of one device, by training.trainer.flops.model_tflops",
        "mfu": "share of the device's peak by training.trainer.flops; null if that is unknown",
        "memory_bytes": "peak memory: reserved on a GPU, resident on a CPU",
        "data_wait": "share of the time that steps waited for data, on the rank that waited "
        "longest; absent with Composer",
    },
    "evaluation": {
        "step": "step after which the model was evaluated",
        "loss": "mean over the held-out targets; null if there are none, or if it is not a number "
        "(`on_nan=skip`)",
        "perplexity": "exp of the loss; null if the loss is",
        "tokens": "targets that were evaluated on",
        "label": "Composer: the label of the evaluated data; its other metrics are further fields",
    },
    "save": {
        "step": "whose checkpoint is complete now; records of later steps may come before this one",
        "seconds": "seconds until it was complete",
        "waited": "those of the seconds during which training stood still",
    },
}
"""Kind of record (its field `kind`) -> field -> what it means."""

WHEN: Mapping[str, str] = {
    "step": "every step",
    "report": "every `report_interval` steps, means of these",
    "evaluation": "every `eval_interval` steps, and at the end, on held-out data",
    "save": "when a checkpoint is complete",
}
"""Kind of record -> when one is written."""
