"""Detect a folder's format, and open it: its sizes, and tensors under the format's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training import manifest
from training.convert import formats, hf, native, ranks, state_spaces
from training.convert.ranks import RankSettings, open_ranks
from training.convert.weights import SafetensorsFiles, Weights, has_files, open_files, read_json
from training.errors import RequestError, reading
from training.models import Sizes

CONFIG = "config.json"

_READ: dict[str, Callable[[dict[str, Any], Path], Sizes]] = {
    "hf": hf.read,
    "state-spaces": state_spaces.read,
    "ours": native.read_sizes,
    "neuron": formats.read_neuron,
}


@dataclass(frozen=True)
class Opened:
    """A folder's content.

    layout: the format in which its tensors are named and cut. run: the folder of the run that the
    checkpoint in `folder` belongs to, if any.
    """

    layout: str
    folder: Path
    sizes: Sizes
    weights: Weights
    run: Path | None = None


def detect(folder: Path) -> str:
    """Return the format of a folder, or of Composer's file. Raises RequestError if it has none."""
    with reading(folder):
        return _formats(_run_of(folder))[0]


def open_folder(form: str, folder: Path, settings: RankSettings) -> Opened:
    """Open a folder of a format. Raises RequestError if it is of another format, or broken."""
    with reading(folder):
        return _open(form, _run_of(folder), settings)


def _open(form: str, folder: Path, settings: RankSettings) -> Opened:
    found = _formats(folder)
    if form not in found:
        raise RequestError(f"{folder} is of format {found[0]}, not {form}")
    if form != "neuron-tp" and settings != RankSettings():
        raise RequestError("--n-groups, --norm-across-groups: only --from neuron-tp needs them")
    if form == "neuron-tp":
        return _open_ranks(folder, settings)
    if form == "codestral":
        return _open_codestral(folder)
    if _is_trained(folder):
        if _is_checkpoint(folder):
            return Opened("ours", folder, *native.read_checkpoint(folder), run=_run_around(folder))
        newest = native.newest_checkpoint(folder)
        return Opened("ours", newest, *native.read_checkpoint(newest), run=folder)
    if file := native.find_composer(folder):
        return Opened("ours", file.parent, *native.read_composer(file))
    sizes = _READ[form](read_json(folder / CONFIG), folder / CONFIG)
    weights = open_files(folder)
    return Opened(_layout(form, weights), folder, sizes, weights)


def _open_ranks(folder: Path, settings: RankSettings) -> Opened:
    place = ranks.find_ranks(folder)
    assert place is not None, "its format was found by that"
    sizes, weights = open_ranks(place, settings)
    return Opened(_layout("neuron", weights), folder, sizes, weights)


def _open_codestral(folder: Path) -> Opened:
    settings = read_json(folder / formats.CODESTRAL_PARAMS)
    path = folder / formats.CODESTRAL_WEIGHTS
    if not path.is_file():
        raise RequestError(f"{path} does not exist")
    weights = SafetensorsFiles([path])
    shapes = {name: one.shape for name, one in weights.found.items()}
    sizes = formats.read_codestral(settings, shapes, folder / formats.CODESTRAL_PARAMS)
    is_prefixed = any(name.startswith(formats.CODESTRAL_PREFIX) for name in shapes)
    return Opened("codestral" if is_prefixed else "state-spaces", folder, sizes, weights)


def _layout(form: str, weights: Weights) -> str:
    """Return the tensors' layout: in the Neuron system's, in_proj may be in one, which is hf's."""
    if form == "neuron" and not any(".in_proj_" in name for name in weights.found):
        return "hf"
    return form


def _formats(folder: Path) -> list[str]:
    """List the formats that a folder may have, likeliest first. Raises RequestError for none."""
    if _is_trained(folder):
        return ["ours"]
    if native.find_composer(folder):
        return ["composer"]
    if not folder.is_dir():
        raise RequestError(f"{folder} is not a folder")
    if ranks.find_ranks(folder) is not None:
        return ["neuron-tp"]
    has_params = (folder / formats.CODESTRAL_PARAMS).is_file()
    if has_params and not (folder / CONFIG).is_file():
        return ["codestral"]
    saved = [] if (folder / CONFIG).is_file() else ranks.rank_checkpoints(folder)
    if saved:
        raise RequestError(
            f"{folder} holds checkpoints of ranks; fix: give one: {', '.join(saved)}"
        )
    found = [*_by_settings(folder), *(["codestral"] if has_params else [])]
    if not found:
        raise RequestError(
            f"{folder / CONFIG} has an unknown format: it has neither family (ours), "
            f"model_type (hf, neuron) nor d_model (state-spaces)"
        )
    return found


def _by_settings(folder: Path) -> list[str]:
    settings = read_json(folder / CONFIG)
    if "family" in settings:
        return ["ours"]
    if "model_type" in settings:
        return ["neuron", "hf"] if formats.NORM_WITHIN_GROUPS in settings else ["hf", "neuron"]
    return ["state-spaces"] if "d_model" in settings else []


def _is_trained(folder: Path) -> bool:
    """Return whether a folder is a checkpoint or a run's with checkpoints, rather than weights."""
    if _is_checkpoint(folder):
        return True
    return manifest.checkpoints(str(folder)).is_dir() and not _holds_weights(folder)


def _holds_weights(folder: Path) -> bool:
    """Return whether a folder's files are weights; a run's config.json is of no format."""
    return has_files(folder) and (folder / CONFIG).is_file() and bool(_by_settings(folder))


def _is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint, even unfinished; weights may have such a name."""
    if (folder / manifest.NAME).exists():
        return True
    is_called_so = manifest.step_of(folder.name) is not None
    return is_called_so and folder.is_dir() and not (folder / CONFIG).exists()


def _run_around(checkpoint: Path) -> Path | None:
    """Return the folder of the run that a checkpoint is in; None if it is elsewhere."""
    place = checkpoint.absolute().parent
    return place.parent if place.name == manifest.checkpoints("").name else None


def _run_of(folder: Path) -> Path:
    """Return the run's folder if a folder is the one of its checkpoints, else the folder itself."""
    is_inside = folder.name == manifest.checkpoints("").name and any(manifest.numbered(folder))
    return folder.parent if is_inside else folder
