"""Make the set that a launcher trains on by default: `python -m training.get_dataset`.

It tokenizes wikicorpus, from the hub, to the folder where the launcher looks for it. --launcher
selects the launcher; the flags of training.data.tokenize override each part, so that
--dataset=/data/mine replaces wikicorpus with your own texts.

    python3 -m training.get_dataset                  # for mamba_fsdp.sbatch
    python3 -m training.get_dataset --launcher=mamba2_neuron

Exit codes: 0 done, 1 it failed (start it again to continue), 2 the request was wrong,
130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from training.config.flags import Flag, parse
from training.data.tokenize.__main__ import FLAGS, main, make_set

SOURCE = {"dataset": "wikicorpus", "dataset_config": "raw_en"}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "mamba_fsdp": {
        "tokenizer": "hf-internal-testing/llama-tokenizer",
        "seq_len": 4096,
        "save_path": Path("/fsx/data/wikicorpus_llama2_7B_tokenized_4k"),
    },
    "mamba2_neuron": {
        "tokenizer": "EleutherAI/gpt-neox-20b",
        "seq_len": 512,
        "save_path": Path("/fsx/data/wikicorpus_512"),
    },
}
"""What each launcher's data set is made of, and where it is."""


def _launcher(text: str) -> str:
    if text not in DEFAULTS:
        raise ValueError(" or ".join(DEFAULTS))
    return text


def get_dataset(arguments: Sequence[str]) -> None:
    """Do what the command line asks for. Raises RequestError and TrainingError."""
    own = Flag("launcher", _launcher, "mamba_fsdp", f"whose data: {' or '.join(DEFAULTS)}")
    flags = [replace(flag, default=None) if _is_own(flag) else flag for flag in FLAGS]
    program = "python -m training.get_dataset"
    given = parse([own, *flags], arguments, program=program, about=str(__doc__))
    source = {} if given["dataset"] else SOURCE
    for name, value in (*DEFAULTS[given["launcher"]].items(), *source.items()):
        if given[name] is None:
            given[name] = value
    make_set(given)


def _is_own(flag: Flag) -> bool:
    return any(flag.name in defaults for defaults in (SOURCE, *DEFAULTS.values()))


if __name__ == "__main__":
    sys.exit(main(get_dataset))
