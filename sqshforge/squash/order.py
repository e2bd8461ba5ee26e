"""What is to be packed and how, and the keys that follow from it: known before an image is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sqshforge import project
from sqshforge.image import enroot
from sqshforge.image.enroot import ImageConfig
from sqshforge.squash.mksquashfs import Options

FORMAT = 3  # part of every key: raised when equal inputs come to give other bytes


@dataclass(frozen=True)
class Order:
    """One image and the options to pack it with."""

    config: ImageConfig
    options: Options
    base_epoch: int  # the newest time in what is outside of /sqshforge, seconds of the epoch
    epoch: int  # the newest time in the file
    tool: str  # the squash tool and its version

    @classmethod
    def of(cls, config: ImageConfig, options: Options, tool: str) -> Order:
        """The order with SOURCE_DATE_EPOCH, else with the times at which the image was made.

        Raises `RequestError` for a SOURCE_DATE_EPOCH that is none.
        """
        asked = project.source_date_epoch()
        if asked is not None:
            return cls(config, options, asked, asked, tool)
        base = config.created if config.base_created is None else config.base_created
        return cls(config, options, base, config.created, tool)

    @property
    def files(self) -> dict[str, bytes]:
        """Enroot's four files."""
        return enroot.files(self.config)

    @property
    def settings(self) -> dict[str, Any]:
        """What, apart from the image, the bytes depend on."""
        return {
            "level": self.options.level,
            "block": self.options.block,
            "xattrs": self.options.xattrs,
            "tool": self.tool,
            "base_epoch": self.base_epoch,
            "epoch": self.epoch,
        }

    @property
    def key(self) -> str:
        """The content key: `content_key` of the image and the settings."""
        return content_key(self.config, self.settings)

    def base_key(self, layers: Sequence[str]) -> str:
        """The same of the image without /sqshforge, which is made of these layers."""
        files = {name: data.decode("latin-1") for name, data in self.files.items()}
        settings = {name: value for name, value in self.settings.items() if name != "epoch"}
        return _digest({"layers": list(layers), "files": files, **settings})


def content_key(config: ImageConfig, settings: Mapping[str, Any]) -> str:
    """A digest of all that the bytes of a squash file depend on.

    An image is its layers and what its config says of running it; under which name it was found,
    and in which store, does not matter.
    """
    facts = asdict(replace(config, size=0))
    if config.layers:
        facts = {**facts, "reference": "", "digest": ""}
    return _digest({"config": facts, **settings})


def _digest(facts: dict[str, Any]) -> str:
    text = json.dumps({"format": FORMAT, **facts}, sort_keys=True)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
