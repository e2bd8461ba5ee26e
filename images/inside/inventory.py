"""The Debian and Python packages in an image, as items of an SPDX document.

Standard library only, for Python 3.10 and later: `sbom.py` runs this while an image is built.
Broken parts of a package's own record are left out or replaced; only `OSError` is raised.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

UNKNOWN = "NOASSERTION"

# States of packages whose files are unpacked, whether configured or not.
UNPACKED = {"installed", "triggers-pending", "triggers-awaited", "half-configured", "unpacked"}
PYTHON_FOLDERS = (
    "usr/lib*/python3*/*-packages",
    "usr/local/lib*/python3*/*-packages",
    "opt/*/lib*/python3*/*-packages",
)
METADATA = ("*.dist-info/METADATA", "*.egg-info/PKG-INFO", "*.egg-info")

LICENSES = """
    0BSD AGPL-3.0-only AGPL-3.0-or-later Apache-2.0 Artistic-2.0 BSD-2-Clause BSD-3-Clause BSL-1.0
    CC-BY-4.0 CC0-1.0 CNRI-Python EPL-2.0 GPL-2.0-only GPL-2.0-or-later GPL-3.0-only
    GPL-3.0-or-later HPND ISC LGPL-2.1-only LGPL-2.1-or-later LGPL-3.0-only LGPL-3.0-or-later MIT
    MIT-0 MIT-CMU MPL-2.0 NCSA OFL-1.1 PostgreSQL PSF-2.0 Python-2.0 Python-2.0.1 Unicode-3.0
    Unicode-DFS-2016 Unlicense WTFPL X11 Zlib ZPL-2.1
"""
EXCEPTIONS = "Classpath-exception-2.0 GCC-exception-3.1 LLVM-exception"
# The kind of each word in an expression, as one character: licenses, exceptions, the rest.
SIGNS = {
    **dict.fromkeys(LICENSES.split(), "L"),
    **dict.fromkeys(EXCEPTIONS.split(), "E"),
    **{"AND": "&", "OR": "&", "WITH": "+", "(": "(", ")": ")"},
}
SPELLING = {word.lower(): word for word in SIGNS}
# License fields, and last parts of license classifiers, that mean one license only.
LICENSE_NAMES = {
    "apache 2.0": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "bsd 2-clause license": "BSD-2-Clause",
    "bsd 3-clause license": "BSD-3-Clause",
    "gnu general public license v2 or later (gplv2+)": "GPL-2.0-or-later",
    "gnu general public license v3 or later (gplv3+)": "GPL-3.0-or-later",
    "gnu lesser general public license v3 or later (lgplv3+)": "LGPL-3.0-or-later",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "the unlicense (unlicense)": "Unlicense",
}


@dataclass(frozen=True)
class Item:
    """One package of the document, which leaves out empty fields."""

    kind: str
    name: str
    version: str = ""
    purpose: str = ""
    location: str = UNKNOWN
    sha256: str = ""
    purl: str = ""
    supplier: str = ""
    license: str = UNKNOWN
    license_words: str = ""
    source: str = ""

    @property
    def id(self) -> str:
        """A unique, reproducible identifier, of characters that SPDX allows."""
        digest = hashlib.sha256(repr(self).encode()).hexdigest()[:12]
        return f"SPDXRef-{self.kind}-{re.sub(r'[^A-Za-z0-9.]+', '-', self.name)}-{digest}"

    def spdx(self) -> dict[str, object]:
        refs = [
            {
                "referenceCategory": "PACKAGE-MANAGER",
                "referenceType": "purl",
                "referenceLocator": self.purl,
            }
        ]
        optional = {
            "versionInfo": self.version,
            "primaryPackagePurpose": self.purpose,
            "checksums": self.sha256 and [{"algorithm": "SHA256", "checksumValue": self.sha256}],
            "externalRefs": self.purl and refs,
            "supplier": self.supplier,
            "licenseComments": self.license_words and f"metadata says: {self.license_words}",
            "sourceInfo": self.source,
        }
        return {
            "SPDXID": self.id,
            "name": self.name,
            "downloadLocation": self.location,
            "filesAnalyzed": False,
            "licenseDeclared": self.license,
        } | {key: value for key, value in optional.items() if value}


def clean(text: str) -> str:
    """Return the text as one printable line, safe for readers of JSON and for terminals."""
    line = " ".join(text.split())
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in line)


def normalize(name: str) -> str:
    """Return a Python package's name as indexes write it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def purl(kind: str, path: str, version: str, **qualifiers: str) -> str:
    """Return a package URL without its empty parts."""
    pairs = [f"{key}={quote(value, ':')}" for key, value in sorted(qualifiers.items()) if value]
    return (
        f"pkg:{kind}/{quote(path)}"
        + (f"@{quote(version, ':')}" if version else "")
        + (f"?{'&'.join(pairs)}" if pairs else "")
    )


def expression(text: str) -> str:
    """Return a text as an SPDX license expression, spelled as in SPDX's list; else an empty string.

    A license outside `LICENSES` makes a text no expression: SPDX's full list is not available here.
    """
    text = LICENSE_NAMES.get(text.lower(), text)
    words = [SPELLING.get(word.lower(), word) for word in re.findall(r"[()]|[^\s()]+", text)]
    shape = "".join(SIGNS.get(word, "?") for word in words).replace("L+E", "L")
    if "?" in shape or len(shape) > 200:
        return ""
    while (less := re.sub(r"\(L\)|L&L", "L", shape)) != shape:
        shape = less
    return " ".join(words).replace("( ", "(").replace(" )", ")") if shape == "L" else ""


def read(path: Path) -> str:
    """Return a text file with invalid UTF-8 replaced, or an empty string if there is no file."""
    try:
        return path.read_bytes().decode("utf-8", "replace").replace("\r\n", "\n")
    except (FileNotFoundError, NotADirectoryError):
        return ""


def headers(text: str) -> dict[str, list[str]]:
    """Return the values of the `Key: value` lines at the head of a text, by key in lower case."""
    found: dict[str, list[str]] = {}
    for line in re.sub(r"\n[ \t]+", " ", text.partition("\n\n")[0]).split("\n"):
        key, colon, value = line.partition(":")
        if colon:
            found.setdefault(key.lower(), []).append(clean(value))
    return found


def read_system(root: Path) -> dict[str, str]:
    """Return the fields of os-release."""
    text = read(root / "etc/os-release") or read(root / "usr/lib/os-release")
    pairs = (line.partition("=") for line in text.split("\n"))
    return {key.strip(): clean(value.strip().strip("\"'")) for key, _, value in pairs}


def debian_packages(root: Path, system: Mapping[str, str]) -> Iterator[Item]:
    """Yield all packages that dpkg has unpacked, and those of images without dpkg (status.d)."""
    dpkg = root / "var/lib/dpkg"
    for stanza in re.split(r"\n\n+", read(dpkg / "status")):
        fields = headers(stanza)
        if fields.get("status", [""])[0].rpartition(" ")[2] in UNPACKED:
            yield from debian_package(fields, system)
    for path in sorted(dpkg.glob("status.d/*")):
        if path.suffix != ".md5sums":
            yield from debian_package(headers(read(path)), system)


def debian_package(fields: Mapping[str, list[str]], system: Mapping[str, str]) -> Iterator[Item]:
    """Yield the package of a control stanza, if it has a name and a version."""
    name, version, arch, source, maintainer = (
        fields.get(key, [""])[0]
        for key in ("package", "version", "architecture", "source", "maintainer")
    )
    if name and version:
        vendor = system.get("ID", "")
        distro = "-".join(filter(None, (vendor, system.get("VERSION_ID"))))
        source_name, _, source_version = source.partition(" ")
        yield Item(
            "deb",
            name,
            version,
            purl=vendor and purl("deb", f"{vendor}/{name}", version, arch=arch, distro=distro),
            supplier=supplier(maintainer),
            source=f"built from the source package {source_name or name} "
            f"{source_version.strip('()') or version}",
        )


def supplier(maintainer: str) -> str:
    """Return `NAME <EMAIL>` as SPDX writes it.

    The field does not say whether the maintainer is a person or a group; most are groups.
    """
    name, _, email = re.sub("[()]", " ", maintainer).partition("<")
    email = email.rstrip("> ")
    address = f" ({email})" if email else ""
    return f"Organization: {name.strip()}{address}" if name.strip() else UNKNOWN


def python_packages(root: Path, sums: Mapping[tuple[str, str], str]) -> Iterator[Item]:
    """Yield all Python distributions, each with its file's checksum if the lock allows only one.

    `importlib.metadata` is not used: one file that is not UTF-8 would make it fail.
    """
    for path in metadata_files(root):
        fields = headers(read(path))
        name, version = (fields.get(key, [""])[0] for key in ("name", "version"))
        if name and version:
            # Debian's own distributions are in this folder; they do not come from an index.
            debian = path.is_relative_to(root / "usr/lib/python3/dist-packages")
            declared, words = declared_license(fields)
            yield Item(
                "python",
                name,
                version,
                sha256="" if debian else sums.get((normalize(name), version), ""),
                purl=purl("pypi", normalize(name), version),
                license=declared,
                license_words=words,
                source=clean(f"metadata in /{path.relative_to(root)}"),
            )


def metadata_files(root: Path) -> Iterator[Path]:
    """Yield metadata files of distributions on this interpreter's path or in another real root."""
    if root == Path("/"):
        folders = [Path(entry).absolute() for entry in sys.path if entry]
    else:
        folders = [folder for pattern in PYTHON_FOLDERS for folder in root.glob(pattern)]
    folders = [folder for folder in folders if folder.is_dir()]
    # lib64 may be a link to lib, and a link may lead out of the root: take each folder inside once.
    places = {folder.resolve(): folder for folder in sorted(folders, reverse=True)}
    for place in sorted(places):
        if place.is_relative_to(root):
            for pattern in METADATA:
                files = sorted(places[place].glob(pattern))
                yield from (path for path in files if path.is_file())


def declared_license(fields: Mapping[str, list[str]]) -> tuple[str, str]:
    """Return the SPDX expression that metadata declares, and its own words if they differ."""
    classifiers = {
        value.rpartition(" :: ")[2]
        for value in fields.get("classifier", ())
        if value.startswith("License :: ")
    } - {"OSI Approved", "DFSG approved"}
    said = [fields.get(key, [""])[0] for key in ("license-expression", "license")]
    said += classifiers if len(classifiers) == 1 else ()
    words = next(
        (one for one in said if one not in ("", "UNKNOWN")), ", ".join(sorted(classifiers))
    )
    declared = next(filter(None, map(expression, said)), UNKNOWN)
    return declared, words[:200] if words != declared else ""
