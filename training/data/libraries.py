"""Import the libraries that read and tokenize text, which not every image has; no torch here."""

from __future__ import annotations

import importlib
from typing import Any

from training.data.one_column import read_column_alone
from training.data.zst import read_zst_whole
from training.errors import RequestError

IMAGES = (
    *("cuda-mamba", "cuda-mamba-ubuntu", "cuda13-mamba", "composer-mamba", "llama-fsdp"),
    *("neuron-mamba2", "neuron29-mamba2", "cpu-mamba"),
)
"""Images that have datasets and tokenizers."""
INSTALLED_BY = "pip install 'datasets>=2.19' 'tokenizers>=0.20' transformers"


def library(name: str, what: str) -> Any:
    """Import a library. Raises RequestError that says where to get it.

    what: what the library does, for the message, such as "texts are read".
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise missing(name, what, error) from error


def missing(names: str, what: str, error: ImportError) -> RequestError:
    """Make the error for libraries that cannot be imported, which says where to get them."""
    reason = " ".join(str(error).split())
    return RequestError(
        f"{what} by {names}, which cannot be imported here ({reason}); fix: {INSTALLED_BY}, or use "
        f"an image that has it: {', '.join(IMAGES)}"
    )


def datasets_library(what: str) -> Any:
    """Import the library datasets, kept quiet and from running code that comes with a set.

    It also reads .zst files to their end, and one column of JSON and CSV files if asked to.
    Raises RequestError as library() does.
    """
    datasets = library("datasets", what)
    # Releases before 4 run a set's own code unless asked not to.
    datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False
    # The caller reports errors, in one line.
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    read_zst_whole()
    read_column_alone()
    return datasets
