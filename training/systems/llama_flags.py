"""What the doors for Llama share: the flags of both systems, and the styles of their schedule."""

from __future__ import annotations

from training.config.known import Known

STYLES = ("cosine", "constant", "linear", "exponential", "plateau")

COMMON = (
    Known("train_batch_size", "batch_size", 2),
    Known("val_batch_size", "eval_batch_size", 4),
    Known("max_steps", "num_steps", 5000, ("max_training_steps",)),
    Known("epochs", "epochs", 3),
    Known("seed", "seed", 12345),
    Known("max_context_width", "seq_length", 2048),
    Known("validation_freq", "eval_interval", 0),
    Known("validation_batches", "eval_batches", 10),
    Known("lr", "learning_rate", 1e-4),
    Known("grad_clip", "grad_clip_thresh", 1.0),
    Known("weight_decay", "weight_decay", 0.2),
    Known("activation_checkpointing", "fsdp_activation_checkpointing", True),
    Known("logging_freq", "report_interval", 1),
    Known("resume_from_checkpoint", "load_ckpt_path", ""),
)
