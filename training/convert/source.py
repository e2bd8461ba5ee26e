"""A model on disk, in any format: its sizes, and its parameters one at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from training.convert.folders import open_folder
from training.convert.names import Parameters, Stored, doubles, layout
from training.convert.ranks import RankSettings
from training.convert.weights import Weights
from training.errors import RequestError
from training.models import Sizes, build
from training.models.language import LanguageModel


class Source:
    """A model whose tensors have been checked against its sizes.

    form: the format in which the tensors are named and cut. run: the folder of the run that the
    checkpoint in `folder` belongs to, if any. Raises RequestError listing all tensors that are
    missing, unexpected, or of another shape.
    """

    def __init__(
        self, form: str, folder: Path, sizes: Sizes, weights: Weights, run: Path | None = None
    ) -> None:
        self.form, self.folder, self.sizes = form, folder, sizes
        self.home = run or folder
        self.parameters = Parameters.of(sizes)
        self._weights = weights
        stored = layout(form, sizes, self.parameters)
        faults = _faults(weights, stored, doubles(self.parameters))
        if faults:
            raise RequestError(
                "\n  - ".join([f"{folder}: its tensors do not match its sizes:", *faults])
            )
        self._parts: dict[str, list[Stored]] = {}
        for one in stored:
            self._parts.setdefault(one.parameter, []).append(one)

    @classmethod
    def open(cls, form: str, folder: Path, settings: RankSettings | None = None) -> Source:
        """Open a folder of a format; settings: what the files of ranks do not state.

        Raises RequestError if it is of another format, or broken.
        """
        opened = open_folder(form, folder, settings or RankSettings())
        return cls(opened.layout, opened.folder, opened.sizes, opened.weights, opened.run)

    def find(self, name: str) -> Path | None:
        """Find a file beside the weights, or else in the folder of their run."""
        places = (self.folder / name, self.home / name)
        return next((path for path in places if path.is_file()), None)

    def initial(self, name: str, shape: torch.Size, seed: int) -> Tensor:
        """Read a parameter's initial values, (shape); stands in for `LanguageModel.initial`."""
        return self.read(name)  # shape

    def dtype(self, parameter: str) -> torch.dtype:
        """Return the dtype that a parameter is stored in."""
        return self._weights.found[self._parts[parameter][0].name].dtype

    def read(self, parameter: str) -> Tensor:
        """Read a parameter, in our shape and the dtype that it is stored in."""
        parts = self._parts[parameter]
        shape = self.parameters.shapes[parameter]
        if parts[0].joined is not None:
            dim, start = parts[0].joined
            return self._weights.read(parts[0].name).narrow(dim, start, shape[dim])  # its shape
        if parts[0].part is None:
            return self._weights.read(parts[0].name)  # the parameter's shape
        whole = torch.empty(shape, dtype=self.dtype(parameter))  # (e or rows, ...)
        for one in parts:
            whole[one.part] = self._weights.read(one.name)  # (...) or (its rows, ...)
        return whole


def load(source: Source, device: torch.device, dtype: torch.dtype) -> LanguageModel:
    """Make the model with its weights, on a device and in a dtype, one parameter at a time."""
    with torch.device("meta"):
        model = build(source.sizes)
    for name in source.parameters.shapes:
        # Read in its own dtype, so that a device gets no more than it keeps.
        value = source.read(name).to(device, dtype, copy=True)  # the parameter's shape
        _put(model, name, nn.Parameter(value, requires_grad=False))
    for second, first in model.tied.items():
        _put(model, second, model.get_parameter(first))
    return model.eval()


def _put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, attribute = name.rpartition(".")
    model.get_submodule(owner).register_parameter(attribute, parameter)


def _faults(weights: Weights, stored: list[Stored], again: list[Stored]) -> list[str]:
    """List tensors that are missing, unexpected, of a wrong shape, or unequal though tied."""
    found = weights.found
    wanted = {one.name: one for one in stored}
    allowed = wanted | {one.name: one for one in again}
    faults = [
        f"{name} is missing, wanted {one.shape}"
        for name, one in wanted.items()
        if name not in found
    ]
    faults += [f"{name} is not expected" for name in found if name not in allowed]
    faults += [
        f"{name} has shape {found[name].shape}, wanted {one.shape}"
        for name, one in allowed.items()
        if name in found and found[name].shape != one.shape
    ]
    if faults:
        return faults
    first = {one.parameter: one.name for one in stored}
    return [
        f"{one.name} differs from {first[one.parameter]}, but the sizes say that they are one"
        for one in again
        if one.name in found
        and not torch.equal(weights.read(one.name), weights.read(first[one.parameter]))
    ]
