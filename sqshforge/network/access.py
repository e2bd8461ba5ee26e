"""Network settings of this machine: pip, proxies, certificates, apt, logins.

A build gets all of them through secrets and mounts, and none of them stay in the image.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlparse

from sqshforge.errors import WorkError
from sqshforge.host.files import sha256
from sqshforge.host.programs import Programs

PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy")
CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT")
CA_BUNDLES = (  # Debian's and Fedora's
    Path("/etc/ssl/certs/ca-certificates.crt"),
    Path("/etc/pki/tls/certs/ca-bundle.crt"),
)

TRUE = ("y", "yes", "t", "true", "on", "1")  # as pip reads its configuration
LOGIN_VARIABLES = ("XDG_RUNTIME_DIR", "REGISTRY_AUTH_FILE")  # either sets another place


@dataclass(frozen=True, kw_only=True)
class Pip:
    """The configuration of pip on this machine, merged from files and environment."""

    index: str | None = None
    extra_indexes: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    trusted_hosts: tuple[str, ...] = ()
    cert: Path | None = None
    proxy: str | None = None
    timeout: str | None = None
    no_index: bool = False

    def without_local_indexes(self) -> Pip:
        """Return this configuration without extra indexes that are local folders."""
        remote = tuple(url for url in self.extra_indexes if not _is_local(url))
        return dataclasses.replace(self, extra_indexes=remote)

    def for_uv(self, strategy: str = "unsafe-best-match") -> list[str]:
        """Return this configuration as options for uv.

        pip takes the best file of all its indexes; by default uv stops at the first index that has
        the name, which is the strategy `first-index`.
        """
        words = ["--index-strategy", strategy]
        words += ["--default-index", self.index] if self.index else []
        words += [word for url in self.extra_indexes for word in ("--index", url)]
        words += [word for url in self.find_links for word in ("--find-links", url)]
        words += [word for host in self.trusted_hosts for word in ("--allow-insecure-host", host)]
        words += ["--no-index"] if self.no_index else []
        return words

    def remote(self) -> str:
        """Return a pip.conf for use in a build: this configuration without local folders."""
        lines = ["[global]", *(["no-index = true"] if self.no_index else [])]
        if self.index and not _is_local(self.index):
            lines.append(f"index-url = {self.index}")
        for key, values in (
            ("extra-index-url", [v for v in self.extra_indexes if not _is_local(v)]),
            ("find-links", [v for v in self.find_links if not _is_local(v)]),
            ("trusted-host", list(self.trusted_hosts)),
        ):
            if values:
                lines.append(f"{key} =" + "".join(f"\n    {value}" for value in values))
        if self.proxy:
            lines.append(f"proxy = {self.proxy}")
        if self.timeout:
            lines.append(f"timeout = {self.timeout}")
        return "\n".join(lines) + "\n"


def pip(programs: Programs) -> Pip:
    """Read the configuration from pip itself, so that every way of configuring it counts.

    Raises `WorkError` if an index is neither an address nor a folder: pip ignores it, and a build
    would take its packages from elsewhere.
    """
    listing = programs.capture([sys.executable, "-m", "pip", "config", "list"])
    values: dict[str, str] = {}
    # pip's order of precedence, weakest first: [global], a command's section, the environment.
    for section in ("global", "install", ":env:"):
        for line in listing.splitlines():
            key, separator, value = line.partition("=")
            if separator and key.startswith(f"{section}."):
                values[key.removeprefix(f"{section}.")] = str(ast.literal_eval(value))
    cert = values.get("cert")
    no_index = values.get("no-index", "").lower() in TRUE
    if not no_index:
        _require_addresses(values)
    return Pip(
        index=None if no_index else values.get("index-url"),
        extra_indexes=() if no_index else tuple(values.get("extra-index-url", "").split()),
        find_links=tuple(values.get("find-links", "").split()),
        trusted_hosts=tuple(values.get("trusted-host", "").split()),
        cert=Path(cert) if cert else None,
        proxy=values.get("proxy"),
        timeout=values.get("timeout") or values.get("default-timeout"),
        no_index=no_index,
    )


def _require_addresses(values: Mapping[str, str]) -> None:
    for key in ("index-url", "extra-index-url"):
        for url in values.get(key, "").split():
            is_address = "://" in url or url.startswith("file:")
            if not is_address and not Path(url).expanduser().is_dir():
                variable = f"PIP_{key.upper().replace('-', '_')}"
                raise WorkError(
                    f"pip's {key} is neither an address nor a folder: {url}",
                    fix="begin an address with https://; it is set where python -m pip config "
                    f"debug shows, or by {variable}",
                )


def ca_bundle(settings: Pip, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file of the certificates that this machine trusts, including a company's own."""
    named = [settings.cert, *(Path(environment[v]) for v in CA_VARIABLES if environment.get(v))]
    return next((path for path in [*named, *CA_BUNDLES] if path and path.is_file()), None)


def uv_environment(settings: Pip) -> dict[str, str]:
    """Return uv's environment: the certificates that this machine trusts, and a proxy."""
    ca = ca_bundle(settings)
    certificates = {"SSL_CERT_FILE": str(ca)} if ca else {}
    if settings.proxy is None:
        return certificates
    return certificates | proxies({"http_proxy": settings.proxy, "https_proxy": settings.proxy})


def proxies(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the proxy variables that are set, in lower and upper case, as programs read either."""
    found: dict[str, str] = {}
    for name in PROXIES:
        value = environment.get(name) or environment.get(name.upper())
        if value:
            found |= {name: value, name.upper(): value}
    return found


def apt_sources(suite: str, programs: Programs) -> list[str]:
    """Return this machine's `deb` lines for a suite and its updates, if it has any."""
    if programs.which("apt-get") is None:
        return []
    listing = programs.attempt(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)"]
    )
    found: dict[tuple[str, str], list[str]] = {}
    for line in dict.fromkeys(listing.out.splitlines()):
        uri, release, component = line.split(" ", 2)
        if re.fullmatch(rf"{suite}(-updates|-security)?", release) and component in (
            "main",
            "universe",
        ):
            components = found.setdefault((uri, release), [])
            if component not in components:
                components.append(component)
    return [
        f"deb {uri} {release} {' '.join(components)}"
        for (uri, release), components in sorted(found.items(), key=lambda item: item[0][1])
    ]


def local_wheels(settings: Pip, wanted: Mapping[str, frozenset[str]]) -> Iterator[tuple[Path, str]]:
    """Yield the files in this machine's own package folders that a lock names, with their sums.

    `wanted` maps normalized package names to the allowed sha256 sums. A build cannot see these
    folders, so the files are put into its context.
    """
    for name, sums in sorted(wanted.items()):
        for path in _local_files(settings, name):
            total = sha256(path)
            if total in sums:
                yield path, total
                break


def _local_files(settings: Pip, name: str) -> Iterator[Path]:
    """Yield a package's files in local find-links folders and local indexes."""
    for link in settings.find_links:
        folder = _local_path(link)
        if folder and folder.is_dir():
            yield from (path for path in sorted(folder.iterdir()) if _is_of(path.name, name))
    for index in (settings.index, *settings.extra_indexes):
        folder = _local_path(index) if index else None
        page = folder / name / "index.html" if folder else None
        if page and page.is_file():
            yield from (
                path for path in _linked(page) if _is_of(path.name, name) and path.is_file()
            )


def _is_of(filename: str, name: str) -> bool:
    stem = re.sub(r"[-_.]+", "-", filename).lower()
    return stem.startswith(f"{name}-") and filename.endswith((".whl", ".tar.gz", ".zip"))


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found += [value for key, value in attrs if key == "href" and value]


def _linked(page: Path) -> list[Path]:
    """Return the local files that a page of a simple index (PEP 503) links to."""
    parser = _Links()
    parser.feed(page.read_text())
    addresses = [urlparse(urljoin(page.as_uri(), link)) for link in parser.found]
    return [Path(unquote(address.path)) for address in addresses if address.scheme == "file"]


def _is_local(address: str) -> bool:
    return _local_path(address) is not None


def _local_path(address: str) -> Path | None:
    parsed = urlparse(address)
    if parsed.scheme == "file":
        return Path(unquote(parsed.path))
    return Path(address).expanduser() if not parsed.scheme else None


def choose_login_file() -> None:
    """Set REGISTRY_AUTH_FILE, for this process and its children, if its usual place is closed.

    Without XDG_RUNTIME_DIR, which su, cron and Slurm do not set, both buildah and skopeo first look
    into /run/containers/UID. If root has used them on this machine, only root can read that, and
    they fail there instead of going on to the user's own files.
    """
    if any(os.environ.get(name) for name in LOGIN_VARIABLES):
        return
    try:
        Path(f"/run/containers/{os.geteuid()}/auth.json").stat()
    except PermissionError:
        os.environ["REGISTRY_AUTH_FILE"] = str(_login_file())
    except OSError:
        pass


def _login_file() -> Path:
    """Return the user's file of logins, else an empty one in this package; nothing is written."""
    with suppress(RuntimeError):  # without HOME there is no file
        above = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        for file in (above / "containers/auth.json", Path.home() / ".docker/config.json"):
            if os.access(file, os.R_OK):
                return file
    return Path(__file__).with_name("no-logins.json")
