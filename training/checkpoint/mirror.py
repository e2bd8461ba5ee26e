"""Checkpoints at a URL: each is copied there once it is complete, and back when it is needed.

They are written to the run's own folder, which all ranks must see, and last at the URL. Layout:
URL/checkpoints/step_<N>_ckp/ with the files of the checkpoint, and URL/metrics.jsonl. The manifest
is sent last and removed first, so a checkpoint that has one is complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path

from training import manifest
from training.config.config import RunConfig
from training.data.remote import one_line_errors, open_url
from training.errors import RequestError, TrainingError
from training.loggers.jsonl import FILE as METRICS
from training.process_group import Group


class Mirror:
    """A run's URL. Its methods are collective calls, and raise TrainingError on all ranks."""

    def __init__(self, run: RunConfig) -> None:
        self.url, self.save_path = run.mirror_url.rstrip("/"), Path(run.save_ckpt_path)
        self.fs, self.root = open_url(self.url, "mirror_url")
        self.keep, self.every = run.keep_checkpoints, run.keep_every

    def push(self, folder: Path, group: Group, warn: Callable[[str], None]) -> None:
        """Copy a complete checkpoint there, and remove those that are no longer kept there.

        `warn` gets, on rank 0, a line if they cannot be removed.
        """
        place = f"{self.root}/checkpoints/{folder.name}"
        complete, fault = manifest.read(folder)
        if complete is None:
            raise TrainingError(f"{folder} cannot be copied to {self.url}: {fault}")
        mine = manifest.share(complete.files, group.rank, group.world_size)
        # One of the same step, which the run has passed over as broken or taken again.
        group.together(lambda: self._revoke(place) if group.rank == 0 else None)
        group.together(lambda: self._send(folder, mine, place))

        def end() -> None:
            if group.rank == 0:
                if (self.save_path / METRICS).exists():  # there may have been no room for it
                    self._send(self.save_path, [METRICS], self.root)
                self._send(folder, [manifest.NAME], place)
                try:
                    self._retain(complete.step)
                except TrainingError as error:
                    warn(str(error))

        group.together(end)

    def pull(self, group: Group, say: Callable[[str], None], broken: Collection[Path] = ()) -> bool:
        """Fetch the newest sound checkpoint if it is newer than those here; return whether it was.

        Each fetched file is read again; checkpoints that are broken there are reported and passed
        over. broken: checkpoints here that are known to be broken; a replaced one is set aside.
        """
        names, step = group.broadcast(
            group.together(lambda: self._newer(broken) if group.rank == 0 else ([], None))
        )
        for name in names:
            say(f"fetching {self.url}/checkpoints/{name}")
            fault = self._bring(name, group, broken)
            if not fault:
                return True
            say(manifest.passed_over(f"{self.url}/checkpoints/{name}", fault))
        if names and step is None:
            raise TrainingError(
                f"none of the {len(names)} checkpoints of {self.url} is sound; fix: move them away "
                "to begin without them"
            )
        return False

    def _bring(self, name: str, group: Group, broken: Collection[Path]) -> str:
        """Fetch a checkpoint and publish it here; return the fault if it is broken there."""
        place = f"{self.root}/checkpoints/{name}"
        folder = manifest.checkpoints(str(self.save_path)) / manifest.unfinished(name)

        def begin() -> tuple[list[str], str]:
            with one_line_errors(f"{folder} cannot be made"):
                manifest.make_anew(folder)
            self._fetch(place, [manifest.NAME], folder)
            if not (self.save_path / METRICS).exists():
                with suppress(TrainingError):  # it is the history of the run, not the run
                    self._fetch(self.root, [METRICS], self.save_path)
            return manifest.listed(folder)

        def end() -> None:
            if fault:
                shutil.rmtree(folder, ignore_errors=True)
                return
            assert record is not None
            for one in broken:
                if one.name == name:
                    manifest.set_aside(one, str(self.save_path))
            with one_line_errors(f"{folder} cannot be written"):
                manifest.publish(folder, record)

        nothing: tuple[list[str], str] = ([], "")
        begun = group.together(lambda: begin() if group.rank == 0 else nothing)
        names, fault = group.broadcast(begun)
        mine = manifest.share(names, group.rank, group.world_size)
        group.together(lambda: self._fetch(place, mine, folder), copies=True)
        record = None
        if not fault:
            seen = manifest.read(folder) if group.rank == 0 else (None, "")
            record, fault = group.broadcast(seen)
        if record is not None:
            found = group.gather(manifest.rotten(folder, record, mine))
            fault = next((one for one in found if one), "")
        group.together(lambda: end() if group.rank == 0 else None)
        return fault

    def push_missing(self, path: Path, group: Group, say: Callable[[str], None]) -> None:
        """Copy the checkpoint that the run goes on from, if the run that made it could not."""
        lacking = path.parent == manifest.checkpoints(str(self.save_path)) and group.broadcast(
            group.together(lambda: group.rank == 0 and path.name not in self._complete().values())
        )
        if lacking:
            say(f"copying {path} to {self.url}, which lacks it")
            self.push(path, group, lambda warning: say(f"WARNING: {warning}"))

    def _newer(self, broken: Collection[Path]) -> tuple[list[str], int | None]:
        """Name the complete checkpoints there that are newer than the newest sound one here.

        The newest comes first. Also returns the step of the one here; None if none is here.
        """
        there = self._complete()
        sound = (
            step
            for step, path in manifest.numbered(manifest.checkpoints(str(self.save_path)))
            if path not in broken and manifest.read(path)[0] is not None
        )
        here = next(sound, None)
        newer = sorted((step for step in there if here is None or step > here), reverse=True)
        return [there[step] for step in newer], here

    def _complete(self) -> dict[int, str]:
        """List the complete checkpoints there: step -> name of the folder."""
        with one_line_errors(f"{self.url} cannot be listed"):
            self.fs.invalidate_cache()
            files = self.fs.glob(f"{self.root}/checkpoints/step_*_ckp/{manifest.NAME}")
        names = [one.split("/")[-2] for one in files]
        return {step: name for name in names if (step := manifest.step_of(name)) is not None}

    def _send(self, folder: Path, names: Iterable[str], place: str) -> None:
        with one_line_errors(f"{folder} cannot be copied to {self.url}"):
            self.fs.makedirs(place, exist_ok=True)
            for name in names:
                self.fs.put_file(str(folder / name), f"{place}/{name}")

    def _fetch(self, place: str, names: Iterable[str], folder: Path) -> None:
        with one_line_errors(f"{self.url} cannot be copied to {folder}"):
            for name in names:
                with suppress(FileNotFoundError):  # manifest.read reports what is missing
                    self.fs.get_file(f"{place}/{name}", str(folder / name))

    def _retain(self, newest: int) -> None:
        """Remove what is no longer kept there, whatever the run's own folder has.

        Checkpoints newer than the one just sent are those that the run has passed over as broken,
        and those without a manifest are what killed runs left behind.
        """
        if not self.keep:
            return
        valid = {step for step in self._complete() if step <= newest}
        kept = valid - manifest.outdated(valid, self.keep, self.every)
        with one_line_errors(f"{self.url} cannot be cleared"):
            for place in self.fs.ls(f"{self.root}/checkpoints", detail=False):
                step = manifest.step_of(place.rstrip("/").rpartition("/")[2])
                if step is not None and step not in kept:
                    self._revoke(place)
                    self.fs.rm(place, recursive=True)

    def _revoke(self, place: str) -> None:
        """Invalidate a checkpoint there, before its files are removed or replaced."""
        with one_line_errors(f"{self.url} cannot be cleared"):
            if self.fs.exists(f"{place}/{manifest.NAME}"):  # not everybody may remove files there
                self.fs.rm_file(f"{place}/{manifest.NAME}")


def check(run: RunConfig, group: Group) -> None:
    """Check early that every rank sees the run's own folder, and can use the URL.

    A collective call, after rank 0 has made the folder. Raises RequestError.
    """
    if not run.mirror_url:
        return

    def look() -> None:
        Mirror(run)
        if not manifest.checkpoints(run.save_ckpt_path).is_dir():
            raise RequestError(
                f"save_ckpt_path: {run.save_ckpt_path} is not seen by all ranks; fix: give a "
                "folder that is, where checkpoints are written before they are copied to "
                f"{run.mirror_url}"
            )

    group.together(look)
