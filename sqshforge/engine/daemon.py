"""A docker daemon, used through its API with the Docker SDK for Python.

It is the one that the docker client would talk to. The SDK is slow to load, so it is imported only
when a daemon is asked.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqshforge.errors import MissingError, RequestError, SqshforgeError, WorkError
from sqshforge.host import suggest
from sqshforge.host.programs import Programs

DEFAULT = "unix:///var/run/docker.sock"
TIMEOUT = 20.0  # seconds until a daemon must have said which API it speaks
FORMS = "unix:///PATH, tcp://HOST:PORT or ssh://USER@HOST"


@dataclass(frozen=True)
class Endpoint:
    """A daemon's address, in the form of DOCKER_HOST, and the folder of its certificates if any."""

    host: str
    certificates: Path | None = None
    verify: bool = True

    @classmethod
    def current(cls, programs: Programs) -> Endpoint:
        """The docker client's endpoint: DOCKER_HOST, else the current context's, else the default.

        Raises `RequestError` if the context does not exist.
        """
        host = os.environ.get("DOCKER_HOST")
        if not host:
            name = os.environ.get("DOCKER_CONTEXT") or _current_context()
            return cls(DEFAULT) if name == "default" else cls._of_context(name, programs)
        verify = bool(os.environ.get("DOCKER_TLS_VERIFY"))
        folder = os.environ.get("DOCKER_CERT_PATH") or (_settings() if verify else None)
        return cls(host, Path(folder) if folder else None, verify)

    @classmethod
    def _of_context(cls, name: str, programs: Programs) -> Endpoint:
        client = programs.require("docker", f"it knows what the context {name!r} is")
        asked = programs.attempt([client, "context", "inspect", name])
        try:
            facts = json.loads(asked.out)[0]
            endpoint = facts["Endpoints"]["docker"]
            folder = Path(facts["Storage"]["TLSPath"], "docker")
            verify = not endpoint.get("SkipTLSVerify")
            return cls(endpoint["Host"], folder if folder.is_dir() else None, verify)
        except (ValueError, LookupError, TypeError, AttributeError):
            raise RequestError(
                f"docker has no context {name!r}",
                where=asked.err.strip(),
                fix="docker context ls lists them; or set DOCKER_HOST",
            ) from None

    def options(self) -> dict[str, Any]:
        """The arguments of the SDK's client."""
        # The SDK loads paramiko if that is installed, which takes longer than all the rest of it,
        # but needs it only for ssh.
        if not self.host.startswith("ssh://"):
            sys.modules.setdefault("paramiko", None)  # type: ignore[arg-type]
        from docker.tls import TLSConfig

        found: dict[str, Any] = {"base_url": self.host, "use_ssh_client": True}
        if self.certificates is not None:
            ca, cert, key = (str(self.certificates / f"{one}.pem") for one in ("ca", "cert", "key"))
            found["tls"] = TLSConfig(client_cert=(cert, key), ca_cert=ca, verify=self.verify)
        return found


def _settings() -> Path:
    """The folder of the docker client's settings."""
    return Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")


def _current_context() -> str:
    try:
        return str(json.loads((_settings() / "config.json").read_text())["currentContext"])
    except (OSError, ValueError, LookupError, TypeError, RuntimeError):  # RuntimeError: no HOME
        return "default"


@dataclass(frozen=True)
class Daemon:
    """A daemon that has answered; all methods raise `WorkError` if it fails or goes away."""

    api: Any  # docker.APIClient
    host: str

    @classmethod
    def connect(cls, programs: Programs) -> Daemon:
        """The daemon that the docker client would talk to.

        Raises `MissingError` if none answers this user, `RequestError` for an invalid DOCKER_HOST
        or an unknown context.
        """
        endpoint = Endpoint.current(programs)
        try:
            _require_socket(endpoint.host)
            options = endpoint.options()
            from docker import APIClient

            with contextlib.closing(
                APIClient(version="auto", timeout=TIMEOUT, **options)
            ) as asking:
                version = asking.api_version
            # Later requests may take minutes before the first byte comes.
            return cls(APIClient(version=version, timeout=None, **options), endpoint.host)
        except Exception as error:  # the SDK has no common class for errors of an address
            raise _refused(error, endpoint.host) from None

    def image(self, name: str) -> dict[str, Any] | None:
        """The daemon's facts about an image; None if it has none of that name."""
        from docker.errors import APIError

        if not name or ".." in name.split("/"):  # it would lead to another URL of the API
            return None
        with self._talking(f"look at {name}"):
            try:
                found: dict[str, Any] = self.api.inspect_image(name)
            except APIError as error:
                if error.status_code in (400, 404):  # an invalid name, or no such image
                    return None
                raise
        return found

    def history(self, image: str) -> list[dict[str, Any]]:
        """The steps that made an image, the newest first."""
        with self._talking(f"tell the history of {image}"):
            found: list[dict[str, Any]] = self.api.history(image)
        return found

    def save(self, image: str, write: Callable[[bytes], object]) -> None:
        """Pass an image to `write` as an archive, in pieces."""
        with self._talking(f"save {image}"), self._closing():
            for piece in self.api.get_image(image):
                write(piece)

    def containers(self) -> list[str]:
        """The names of all containers, running or not."""
        with self._talking("list its containers"):
            found = self.api.containers(all=True)
        return [name.removeprefix("/") for one in found for name in one.get("Names") or ()]

    @contextmanager
    def container(
        self, image: str, name: str | None = None, volumes: Sequence[str] = ()
    ) -> Iterator[str]:
        """Make a container of an image, which is never started, for the length of a block.

        Docker would make a volume for each of the image's `volumes` and copy the image's content
        into it; a tmpfs in its place prevents that.
        """
        with self._talking(f"create a container of {image}"):
            settings = self.api.create_host_config(tmpfs=dict.fromkeys(volumes, ""))
            # An image without a command cannot be "created" unless one is named.
            found = self.api.create_container(image, ["true"], name=name, host_config=settings)
        try:
            yield found["Id"]
        finally:
            self.remove(found["Id"])

    def remove(self, container: str) -> None:
        """Remove a container and its volumes; errors are ignored."""
        with contextlib.suppress(SqshforgeError), self._talking(f"remove {container}"):
            self.api.remove_container(container, v=True, force=True)

    def copy(self, container: str, path: str, write: Callable[[bytes], object]) -> bool:
        """Pass a container's file or folder to `write` as a tar; return False if it has none."""
        from docker.errors import NotFound

        with self._talking(f"copy {path}"), self._closing():
            try:
                pieces, _ = self.api.get_archive(container, path)
            except NotFound:
                return False
            for piece in pieces:
                write(piece)
        return True

    def tag(self, image: str, name: str) -> None:
        with self._talking(f"tag {image}"):
            self.api.tag(image, *_split(name))

    def load(self, archive: Path) -> None:
        """Load the images of an archive of `docker save`."""
        with self._talking(f"load {archive}"), archive.open("rb") as file:
            self._finish(self.api.load_image(file))

    def import_tar(self, tar: Path, name: str) -> None:
        """Make an image of one layer from the tar of a root file system."""
        with self._talking(f"import {tar}"):
            repository, tag = _split(name)
            said = self.api.import_image(str(tar), repository=repository, tag=tag)
            self._finish(json.loads(line) for line in said.splitlines() if line.strip())

    @property
    def is_here(self) -> bool:
        """Whether the daemon is on this machine, behind a Unix socket."""
        return self.host.startswith("unix://")

    def pull(self, reference: str, platform: str | None = None) -> None:
        with self._talking(f"pull {reference}"):
            self.api.reload_config()  # the user may have logged in since the connection was made
            self._finish(self.api.pull(reference, stream=True, decode=True, platform=platform))

    def storage(self) -> Path:
        """The folder on the daemon's machine that holds the images."""
        with self._talking("describe itself"):
            return Path(self.api.info()["DockerRootDir"])

    def resources(self) -> tuple[int, int]:
        """The processors and the bytes of memory of the daemon's machine."""
        with self._talking("describe itself"):
            facts = self.api.info()
        return facts["NCPU"], facts["MemTotal"]

    def uses_containerd(self) -> bool:
        """Whether containerd stores the images, as since Docker 29 unless it is configured."""
        with self._talking("describe itself"):
            facts = self.api.info()
        return ["driver-type", "io.containerd.snapshotter.v1"] in (facts.get("DriverStatus") or [])

    def _finish(self, lines: Iterable[dict[str, Any]]) -> None:
        """Read the daemon's messages until its work is done; raises `WorkError` if it fails."""
        for line in lines:
            if "error" in line:
                raise WorkError(f"docker failed: {line['error']}", where=self.host)

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """Close the daemon's responses at the end of a block, whether they were read or not.

        A response that is not read to its end would keep the daemon waiting and a container locked.
        """
        answers: list[Any] = []

        def note(answer: Any, **_: Any) -> None:
            answers.append(answer)

        hooks = self.api.hooks["response"]
        hooks.append(note)
        try:
            yield
        finally:
            hooks.remove(note)
            for answer in answers:
                answer.close()

    @contextmanager
    def _talking(self, what: str) -> Iterator[None]:
        """Turn the SDK's errors into a `WorkError`; `what` names the work that was asked for."""
        from docker.errors import APIError, DockerException
        from requests.exceptions import JSONDecodeError, RequestException
        from urllib3.exceptions import HTTPError

        try:
            yield
        except APIError as error:
            said = error.explanation or f"status {error.status_code}"
            raise WorkError(f"docker cannot {what}: {said}", where=self.host) from None
        except JSONDecodeError as error:
            raise WorkError(f"unexpected answer from docker: {error}", where=self.host) from None
        except (DockerException, RequestException, HTTPError) as error:
            raise WorkError(
                f"docker did not {what}: the connection was lost ({_reason(error)})",
                where=self.host,
                fix="check that its daemon is running, then try again",
            ) from None


def _split(name: str) -> tuple[str, str | None]:
    """Split an image's name into the name without a tag, and the tag."""
    from docker.utils import parse_repository_tag

    found: tuple[str, str | None] = parse_repository_tag(name)
    return found


def _require_socket(host: str) -> None:
    """Raise `ConnectionError` for a missing socket before the SDK is loaded, which is slow."""
    if host.startswith("unix://"):
        try:
            Path(host.removeprefix("unix://")).stat()
        except OSError as error:
            raise ConnectionError("nothing to connect to") from error


def _refused(error: Exception, host: str) -> SqshforgeError:
    """The error for a connection that failed."""
    if error.__cause__ is None:  # no connection was tried
        return RequestError(
            f"DOCKER_HOST is not a valid address: {error}",
            where=host,
            fix=f"set DOCKER_HOST to {FORMS}, or unset it",
        )
    fix = "start it (systemctl start docker), or set DOCKER_HOST"
    if isinstance(_cause(error), PermissionError):
        fix = f"{suggest.sudo()}usermod --append --groups docker $USER, then log in again"
    return MissingError(f"no docker daemon answers: {_reason(error)}", where=host, fix=fix)


def _reason(error: BaseException) -> str:
    cause = _cause(error)
    said = str(cause.strerror) if cause is not None else str(error.__cause__ or error)
    return said[:1].lower() + said[1:]


def _cause(error: BaseException) -> OSError | None:
    """The operating system's error behind an error of the SDK, if there is one."""
    seen: list[BaseException] = []
    found: list[object] = [error]
    while found:
        one = found.pop()
        if not isinstance(one, BaseException) or one in seen:
            continue
        if isinstance(one, OSError) and one.errno is not None:
            return one
        seen.append(one)
        found += [*one.args, getattr(one, "reason", None), one.__context__, one.__cause__]
    return None
