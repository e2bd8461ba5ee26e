"""Starting training from given weights instead of random ones.

Every rank maps the files into its memory, and reads only what it keeps: its shards if the model
starts on the meta device under FSDP2, else whole parameters, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training import manifest
from training.checkpoint import hub
from training.config.config import Config, ModelConfig
from training.errors import RequestError
from training.models import Sizes
from training.models.families import WITHOUT_EFFECT
from training.process_group import Group

if TYPE_CHECKING:  # it needs safetensors, which a run from random values does not
    from training.convert.source import Source

_FOLLOWS = {
    "head_dim": "d_head",
    "dt_rank": "d_delta",
    "attention_multiplier": "score_multiplier",
}
"""Sizes that follow from others if they are 0, and the property that has their value."""
_OF_FILES = ("hf", "ours")
"""Formats that a single file of weights may have, distinguished by the names of its tensors."""


def weights(config: Config, group: Group, say: Callable[[str], None]) -> Source | None:
    """Open the weights that a run starts from; None for random ones (a collective call).

    They are not read if there is a checkpoint: the run goes on from it, or is refused if none is
    sound. Raises as `open_weights` does.
    """
    model = config.model
    if not model.init_weights and not model.init_hub:
        return None
    folders = config.run.checkpoint_folders if group.rank == 0 else []
    if group.broadcast(any(manifest.candidates(folder) for folder in folders)):
        name = "init_weights" if model.init_weights else "init_hub"
        say(f"{name}: not read, as there is a checkpoint to go on from")
        return None
    if model.init_hub:
        folder = hub.fetch(model.init_hub, model.init_weights, group, say)
        model = replace(model, init_weights=str(folder))
    return group.together(lambda: open_weights(model))


def open_weights(model: ModelConfig) -> Source:
    """Open init_weights, a folder or one file, and compare it with the model.

    Raises RequestError if it has no weights, listing every size that differs, or listing every
    tensor that is missing, unexpected or of another shape.
    """
    from training.convert import native
    from training.convert.folders import detect
    from training.convert.source import Source

    folder = Path(model.init_weights)
    try:
        if folder.is_file() and not native.find_composer(folder):
            return _of_file(folder, model.sizes)
        source = Source.open(detect(folder), folder)
    except RequestError as error:
        raise RequestError(f"init_weights: {error}") from error
    differing = _differing(source.sizes, model.sizes)
    if differing:
        first = f"init_weights: {folder} is of another model than {model.name}:"
        raise RequestError("\n  - ".join([first, *differing]))
    return source


def _of_file(path: Path, sizes: Sizes) -> Source:
    """Open a file of weights, which has no sizes; its format is the one whose names it has."""
    from training.convert.names import Parameters, layout
    from training.convert.source import Source
    from training.convert.weights import open_file

    weights, parameters = open_file(path), Parameters.of(sizes)

    def missing(form: str) -> int:
        return sum(one.name not in weights.found for one in layout(form, sizes, parameters))

    return Source(min(_OF_FILES, key=missing), path, sizes, weights)


def _differing(found: Sizes, wanted: Sizes) -> list[str]:
    """List the sizes that differ."""
    if found.family != wanted.family:
        return [f"family: {found.family} there, {wanted.family} asked for"]
    return [
        f"{one.name}: {_meant(found, one.name)!r} there, {_meant(wanted, one.name)!r} asked for"
        for one in fields(wanted)
        if one.name not in WITHOUT_EFFECT and _meant(found, one.name) != _meant(wanted, one.name)
    ]


def _meant(sizes: Sizes, name: str) -> Any:
    """Return a size; one that follows from others is the same written out or left at 0."""
    if name == "norm_across_groups" and getattr(sizes, "n_groups", 0) == 1:
        return False  # with one group both norms are the same
    own = getattr(sizes, name)
    return getattr(sizes, _FOLLOWS[name], own) if name in _FOLLOWS else own
