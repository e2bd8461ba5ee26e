"""Convert a Mamba-2 model for the Neuron system: `... -m training.convert_mamba2_ssm_checkpoint`.

Reads a folder of state-spaces' Mamba-2 (config.json, pytorch_model.bin) or of Mistral's
(params.json, consolidated.safetensors). Writes Hugging Face's format: config.json,
model.safetensors and the tokenizer's files. Runs alone or under torchrun, where rank 0 does the
work; needs no device. OUT must not exist; it is never left incomplete.
Exit codes: 0 done, 1 it failed, 2 the request was wrong.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from training.cli import Parser, run_command
from training.errors import RequestError
from training.models import Mamba2Config, Sizes

if TYPE_CHECKING:
    from training.convert.source import Source

TYPES = {
    "mamba_ssm": {"bos_token_id": 0, "pad_token_id": 0, "eos_token_id": 0},
    "codestral": {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2},
}
"""Model type -> the token ids that config.json gives for its tokenizer."""
PRECISIONS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

HUB = {
    "mamba_ssm": "state-spaces/mamba-130m-hf",
    "codestral": "mistralai/Mamba-Codestral-7B-v0.1",
}
"""Model type -> where its tokenizer is available."""
MODEL = "tokenizer.model"
"""A SentencePiece tokenizer, whose file Mistral also names by version: tokenizer.model.v3."""


def convert(arguments: Sequence[str]) -> None:
    """Do what the command line asks for. Raises RequestError and TrainingError."""
    given = _parser().parse_args(list(arguments))
    if os.environ.get("RANK", "0") != "0":
        return  # one process is enough, and all would write the same folder

    # Torch is not needed to refuse a bad request, nor to show help.
    import torch

    from training.convert.target import write_model

    tokenizer = _tokenizer(given.tokenizer or given.input)
    if given.tokenizer and not tokenizer:
        raise RequestError(
            f"-t: {given.tokenizer} is not a tokenizer.json, {MODEL} or folder of one"
        )
    source = _open(given.type, given.input)
    done = write_model(
        source,
        "neuron" if given.split_proj else "neuron-fused",
        given.output,
        getattr(torch, PRECISIONS[given.precision]),
        max_shard=sys.maxsize,  # all in model.safetensors, as the system has it
        settings=TYPES[given.type],
        tokenizer=tokenizer,
    )
    print(f"wrote {given.output}: {done.tensors} tensors, {done.size:,} bytes, {given.precision}")
    if not tokenizer:
        print(
            f"no tokenizer is written, as {given.input} has none; with a network: hf download "
            f"{HUB[given.type]} tokenizer.json tokenizer_config.json "
            f"--local-dir {given.output}"
        )
    if not given.split_proj and _differs(source.sizes):
        print(
            "transformers' own code takes the mean of the gated norm over all groups together, "
            "this model over each alone, as rmsnorm_within_groups in config.json says"
        )
    print(f"load it: training.pretrained.Mamba2ForCausalLM.from_pretrained({str(given.output)!r})")


def _open(model_type: str, folder: Path) -> Source:
    """Open a folder of a model type. Raises RequestError if it is of another type, or broken."""
    from training.convert import state_spaces
    from training.convert.config import read_json, read_table
    from training.convert.folders import CONFIG
    from training.convert.source import Source
    from training.convert.weights import open_files

    if model_type == "codestral":
        return Source.open(model_type, folder)
    where = folder / CONFIG
    settings = read_json(where)
    layers = read_table(settings, "ssm_cfg", where)
    if layers.get("layer", "Mamba2") != "Mamba2":
        raise RequestError(f"{where}: ssm_cfg.layer {layers['layer']!r}: must be Mamba2 here")
    # This program's own reading: all its inputs are Mamba-2, and the number of groups may be a
    # setting of the model.
    groups = {"ngroups": settings["ngroups"]} if "ngroups" in settings else {}
    settings["ssm_cfg"] = {**groups, **layers, "layer": "Mamba2"}
    sizes = state_spaces.read(settings, where)
    return Source("state-spaces", folder, sizes, open_files(folder))


def _tokenizer(place: Path) -> dict[str, Path]:
    """Find a tokenizer's files, by the names to write; empty if there is no tokenizer."""
    from training.convert.target import tokenizer_files

    if place.is_file():
        return {"tokenizer.json" if place.suffix == ".json" else MODEL: place}
    found = tokenizer_files(place)
    versions = sorted(place.glob(f"{MODEL}.v*"))
    if MODEL not in found and versions:
        found[MODEL] = versions[-1]
    return found if {"tokenizer.json", MODEL} & found.keys() else {}


def _differs(sizes: Sizes) -> bool:
    """Return whether transformers computes a different model from the same weights."""
    return isinstance(sizes, Mamba2Config) and sizes.n_groups > 1 and not sizes.norm_across_groups


def _parser() -> Parser:
    parser = Parser("python -m training.convert_mamba2_ssm_checkpoint", str(__doc__))
    parser.add_argument(
        "-i",
        "--mamba2_checkpoint_directory",
        dest="input",
        type=Path,
        required=True,
        metavar="IN",
        help="folder to read",
    )
    parser.add_argument(
        "-m", "--mamba2_model_type", dest="type", choices=TYPES, required=True, help="of IN"
    )
    parser.add_argument(
        "-p", "--precision", choices=PRECISIONS, required=True, help="of all tensors"
    )
    parser.add_argument(
        "-o",
        "--output_dir",
        dest="output",
        type=Path,
        required=True,
        metavar="OUT",
        help="folder to write",
    )
    parser.add_argument(
        "-t",
        "--tokenizer_model_path",
        dest="tokenizer",
        type=Path,
        metavar="PATH",
        help="a tokenizer's file or folder (default: that in IN, if there is one)",
    )
    parser.add_argument(
        "-s", "--split_proj", action="store_true", help="cut in_proj into three: z, xBC and dt"
    )
    return parser


if __name__ == "__main__":
    sys.exit(run_command(convert, sys.argv[1:]))
