"""Convert model weights: `python -m training.convert --from FORMAT SRC --to FORMAT DST`.

Formats: hf (Hugging Face), state-spaces (mamba-ssm), ours (a run's folder, one of its checkpoints,
or a folder of weights; DST is always the last), composer (read only: a checkpoint of
training.mamba_composer, or the folder of its run), neuron (the Neuron system's Mamba-2, with
in_proj in three parts; neuron-fused: in one), neuron-tp (read only: the files of its ranks, which
are merged), codestral (read only: Mistral's Mamba-2). DST must not exist; it is never left
incomplete. Exit codes: 0 done, 1 it failed, 2 the request was wrong.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from training.cli import Parser, run_command
from training.config.setting import boolean
from training.convert import SOURCES, TARGETS
from training.imports import loading

DTYPES = ("float32", "bfloat16", "float16")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def size(text: str) -> int:
    """Read a number of bytes, such as 5GB or 512MiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    amount = float(match[1]) * unit if match and unit else 0.0
    if not 1 <= amount < math.inf:
        raise argparse.ArgumentTypeError(f"must be a size such as 5GB or 512MiB, not {text!r}")
    return int(amount)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _boolean(text: str) -> bool:
    try:
        return boolean(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be {error}, not {text!r}") from error


def convert(arguments: Sequence[str]) -> None:
    """Do what the command line asks for. Raises RequestError and TrainingError."""
    program = "python -m training.convert"
    usage = f"{program} --from FORMAT SRC --to FORMAT DST [...]"
    parser = Parser(program, str(__doc__), usage=usage)
    parser.add_argument("--from", dest="form", required=True, choices=SOURCES, help="format of SRC")
    parser.add_argument("src", type=Path, metavar="SRC", help="folder or file to read")
    parser.add_argument("--to", required=True, choices=TARGETS, help="format of DST")
    parser.add_argument("dst", type=Path, metavar="DST", help="folder to write")
    parser.add_argument("--dtype", choices=DTYPES, help="data type of all tensors (default: keep)")
    parser.add_argument(
        "--max-shard-size",
        type=size,
        metavar="SIZE",
        help="of one file, such as 512MiB (default: 5GB)",
    )
    parser.add_argument(
        "--n-groups", type=_count, metavar="N", help="neuron-tp: groups (default: one per rank)"
    )
    parser.add_argument(
        "--norm-across-groups",
        type=_boolean,
        metavar="BOOL",
        help="neuron-tp: the gated norm's mean is of all channels, or of each group's",
    )
    given = parser.parse_args(list(arguments))

    with loading():  # torch is needed neither to refuse a bad request nor to print help
        import torch

        from training.convert.ranks import RankSettings
        from training.convert.source import Source
        from training.convert.target import write_model

    source = Source.open(
        given.form, given.src, RankSettings(given.n_groups, given.norm_across_groups)
    )
    print(f"reading {source.folder}: {source.sizes.family}", flush=True)
    dtype = getattr(torch, given.dtype) if given.dtype else None
    done = write_model(source, given.to, given.dst, dtype, given.max_shard_size)
    files = "1 file" if done.files == 1 else f"{done.files} files"
    print(
        f"wrote {given.dst}: {done.tensors} tensors, {done.size:,} bytes, {files}\n"
        f"try it: python -m training.generate {shlex.quote(str(given.dst))} --prompt=..."
    )


if __name__ == "__main__":
    sys.exit(run_command(convert, sys.argv[1:]))
