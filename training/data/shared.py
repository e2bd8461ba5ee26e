"""Find a run's data on one rank, so that only one of a thousand lists and opens all files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.config.config import Config
from training.data.lines import NotConverted
from training.data.sources import Source, open_source

if TYPE_CHECKING:
    from training.process_group import Group


def open_shared(config: Config, setting: str, group: Group) -> Source:
    """Open dataset_path or eval_dataset_path on rank 0, and give every rank what it found.

    A collective call. The other ranks open no file in it; later, each opens only those that it
    reads. In two cases every rank looks for itself: if lines: of JSON must be converted first,
    which all ranks do together, and if a node does not see rank 0's files, as with copies under
    other names. Raises RequestError on every rank.
    """

    def found() -> Source | None:
        try:
            return open_source(config, setting, convert=False)
        except NotConverted:
            return None

    source = group.by_first(found)
    is_first_of_node = group.rank % group.local_world_size == 0
    here = source is not None and (not is_first_of_node or source.is_here())
    if source is None or group.any(not here):
        source = group.together(lambda: open_source(config, setting))
    return source
