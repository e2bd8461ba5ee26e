"""An image in a registry, read with skopeo, whose logins, certificates and mirrors apply."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqshforge.errors import RequestError, SqshforgeError, WorkError
from sqshforge.host import temporary
from sqshforge.host.programs import Programs
from sqshforge.host.resources import FullDisk, require_space
from sqshforge.host.terminal import Reporter
from sqshforge.image.archive.source import Archived
from sqshforge.image.config import parse_config, steps, understanding
from sqshforge.image.enroot import ImageConfig
from sqshforge.image.source import Content
from sqshforge.image.temporary import KIND
from sqshforge.network import access, registries
from sqshforge.project import cache_home

if TYPE_CHECKING:
    from sqshforge.image.archive.oci_layout import Document

UNPACKED = 3  # the estimated growth of a registry's compressed layers


@dataclass(frozen=True)
class Registry:
    """An image at a name such as HOST/NAME:TAG or HOST/NAME@DIGEST.

    The packed image is the one that the name stood for when it was first looked up.
    """

    name: str
    programs: Programs
    reporter: Reporter

    @property
    def address(self) -> str:
        return f"docker://{self.name}"

    def config(self) -> ImageConfig:
        from sqshforge.image.archive import oci_layout

        digest, manifest = self._manifest()
        text = self._ask("--config", "--raw", self._pinned(digest)).encode()
        facts = oci_layout.load_document(text, "the config", self.address)
        with understanding(self.address):
            return parse_config(
                facts.get("config") or {},
                reference=self.address,
                digest=manifest["config"]["digest"],
                created=facts.get("created") or "",
                size=UNPACKED * _size(manifest),
                layers=facts["rootfs"]["diff_ids"],
                history=steps(facts.get("history")),
            )

    @contextmanager
    def open(self, digest: str | None = None) -> Iterator[Content]:
        """While it is open, the layers are on the disk, compressed as in the registry."""
        manifest_digest, manifest = self._manifest()
        if digest not in (None, manifest["config"]["digest"]):
            raise WorkError(
                f"{self.name} now names another image: it was pushed again meanwhile",
                fix="pack it again",
            )
        pulled = cache_home() / "pulled"
        pulled.mkdir(parents=True, exist_ok=True)
        with temporary.folder(KIND, above=pulled) as place:
            require_space(pulled, _size(manifest), f"pulling {self.name}")
            try:
                self._copy(manifest_digest, place)
            except (OSError, WorkError) as error:
                full = FullDisk.of(error, pulled)
                if full is None:
                    raise
            else:
                full = None
                with Archived(f"oci:{place}").open(digest) as content:
                    yield content
        if full is not None:
            raise full.missing(_size(manifest), f"pulling {self.name}")

    def _manifest(self) -> tuple[str, dict[str, Any]]:
        """The digest and content of the manifest; of several, that for this machine's platform."""
        from sqshforge.image.archive import oci_layout

        text = self._ask("--raw", self.address)
        manifest = oci_layout.Document(
            oci_layout.load_document(text.encode(), "the manifest", self.address),
            "the manifest",
            self.address,
        )
        if "manifests" in manifest.value:
            chosen: Document = oci_layout.chosen(manifest, "", self.address)
            text = self._ask("--raw", self._pinned(chosen.text("digest")))
            value = oci_layout.load_document(text.encode(), "the manifest", self.address)
        else:
            value = manifest.value
        with understanding(self.address):
            _ = _size(value), value["config"]["digest"]
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}", value

    def _ask(self, *words: str) -> str:
        """The output of `skopeo inspect`; raises an error that says what is wrong with the name."""
        program = self.programs.require("skopeo", "it reads registries")
        access.choose_login_file()
        asked = self.programs.attempt([program, "inspect", *words])
        if asked.code != 0:
            raise self._fault(asked.err)
        return asked.out

    def _fault(self, said: str) -> SqshforgeError:
        why = registries.reason(said)
        state = registries.state_of(why)
        if state is registries.State.ABSENT:
            return RequestError(
                f"the registry has no image {self.name!r}", where=why, fix="check the spelling"
            )
        if state is registries.State.CLOSED:
            return RequestError(
                f"the registry does not let you read {self.name!r}",
                where=why,
                fix=f"check the spelling, and skopeo login {registries.host_of(self.name)}",
            )
        if "invalid reference format" in why:
            return RequestError(f"{self.name!r} is not an image reference", fix="HOST/NAME:TAG")
        return WorkError(f"the registry of {self.name!r} cannot be read", where=why)

    def _pinned(self, digest: str) -> str:
        return f"docker://{registries.pinned(self.name, digest)}"

    def _copy(self, digest: str, place: Path) -> None:
        """Pull the image into a folder, as an OCI layout with the registry's own documents."""
        program = self.programs.require("skopeo")
        blobs = place / "blobs"
        blobs.mkdir()
        with self.reporter.track(f"pull {self.name}") as tracker:
            argv: list[str | Path] = [program, "copy", self._pinned(digest), f"dir:{blobs}/sha256"]
            self.programs.follow(argv, tracker.note)
        manifest = (blobs / "sha256/manifest.json").rename(blobs / "sha256" / digest[7:])
        described = {"digest": digest, "size": manifest.stat().st_size}
        index = {"schemaVersion": 2, "manifests": [described]}
        (place / "index.json").write_text(json.dumps(index))


def _size(manifest: Mapping[str, Any]) -> int:
    """The bytes of the layers as the registry has them."""
    return sum(int(layer["size"]) for layer in manifest["layers"])
