"""The parts of a recipe, as frozen models: every key is validated, and unknown keys are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from sqshforge.recipe.words import (
    GIT_ADDRESS,
    IMAGE_REFERENCE,
    NEED,
    PINNED_PACKAGE,
    REPOSITORY,
    Address,
    Architecture,
    Bound,
    ExactVersion,
    Installer,
    Name,
    Package,
    Requirement,
    normalize,
    split_image,
)


class Part(BaseModel):
    """A piece of a recipe: immutable, and unknown keys are faults."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Bootstrap(Part):
    """How mmdebstrap makes the base if no image registry answers."""

    suite: str = Field(pattern=r"^[a-z]+$", description="Debian or Ubuntu code name")
    packages: tuple[Package, ...] = Field(
        default=(), description="packages beyond the minimal system"
    )
    mirror: str | None = Field(
        default=None,
        pattern=r"^(https?|file|copy)://\S+$",
        description="archive to take packages from; default: the machine's own for this suite",
    )
    components: tuple[Annotated[str, Field(pattern=r"^[a-z-]+$")], ...] = Field(
        default=("main",), min_length=1, description="parts of mirror; default: main alone"
    )
    pockets: tuple[Annotated[str, Field(pattern=r"^[a-z]+(-[a-z]+)*$")], ...] = Field(
        default=(), description="suites of mirror, with updates; default: suite alone"
    )
    snapshot: str | None = Field(
        default=None,
        pattern=r"^[0-9]{8}T[0-9]{6}Z$",
        description="timestamp of the archive, substituted for {snapshot} in mirror",
    )

    @model_validator(mode="after")
    def _goes_with_its_mirror(self) -> Bootstrap:
        if (self.snapshot is not None) != ("{snapshot}" in (self.mirror or "")):
            raise ValueError(
                "snapshot and mirror go together: a snapshot needs a mirror with {snapshot} in it"
            )
        if self.mirror is None and (self.pockets or self.components != ("main",)):
            raise ValueError("components and pockets need a mirror, and none is given")
        return self


class Base(Part):
    """The base of the image: an image in a registry, or a system made from packages."""

    image: str = Field(
        pattern=IMAGE_REFERENCE,
        description="NAME:TAG in a registry; {parameters} in it are substituted",
    )
    compiler: str | None = Field(
        default=None,
        pattern=IMAGE_REFERENCE,
        description="image of the same family to compile in; default: the base itself",
    )
    mirrors: tuple[Annotated[str, Field(pattern=REPOSITORY)], ...] = Field(
        default=(),
        description="other names of their repository, without a tag, if it does not answer",
    )
    bootstrap: Bootstrap | None = Field(
        default=None, description="how to make the base without a registry"
    )

    @model_validator(mode="after")
    def _mirrors_are_of_one_repository(self) -> Base:
        if self.mirrors and self.compiler is not None:
            here, there = (split_image(one)[0] for one in (self.image, self.compiler))
            if here != there:
                raise ValueError(f"the mirrors serve different repositories: {here} and {there}")
        return self

    def addresses(self, image: str) -> tuple[str, ...]:
        """Return an image's addresses, in the order in which they are tried."""
        tag = split_image(image)[1]
        return (image, *(f"{repository}{tag}" for repository in self.mirrors))


class Built(Part):
    """A Python package that is compiled from its source distribution, in a stage of its own."""

    package: Requirement = Field(description="NAME==VERSION")
    needs: tuple[Annotated[str, Field(pattern=NEED)], ...] = Field(
        default=(), description="what it needs to run; its own metadata cannot be asked"
    )
    source: Name | None = Field(
        default=None,
        description="a name in sources, where its source distribution lacks the code to compile",
    )


class Index(Part):
    """A package index, the only one that may provide the packages bound to it."""

    url: Address = Field(description="address of the index")
    packages: tuple[Bound, ...] = Field(
        description="NAME==VERSION, or NAME for a dependency of others"
    )
    named_only: bool = Field(
        default=False,
        description="nothing but these is taken from it; default: it is asked for all names first",
    )

    def pins(self) -> tuple[str, ...]:
        """Return the packages that are installed by name; the others only come as dependencies."""
        return tuple(one for one in self.packages if "==" in one)


class Python(Part):
    """The Python packages, each pinned to one version; the lock adds their hashes."""

    version: str = Field(
        pattern=r"^(3\.[0-9]+|\{\w+\})$",
        description="minor version, such as '3.11', or {PARAMETER}",
    )
    installer: Installer = Field(description="runs in the build only")
    packages: tuple[Requirement, ...] = Field(
        description="NAME==VERSION; their dependencies are in the lock"
    )
    built: tuple[Built, ...] = Field(
        default=(), description="compiled from their source distributions, for the accelerator"
    )
    builders: tuple[Requirement, ...] = Field(
        default=(), description="packages needed to compile; they stay out of the image"
    )
    indexes: Mapping[Name, Index] = Field(
        default_factory=dict, description="indexes in addition to those that pip is configured with"
    )
    site: str = Field(
        default="/usr/local/lib/python{version}/dist-packages",
        pattern=r"^/\S+$",
        description="folder of packages; default: that of Debian's Python",
    )

    @field_validator("packages", "builders")
    @classmethod
    def _each_once(cls, packages: tuple[str, ...]) -> tuple[str, ...]:
        names = [normalize(package) for package in packages]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"named twice: {', '.join(twice)}")
        return packages

    @model_validator(mode="after")
    def _bound_packages_have_one_home(self) -> Python:
        elsewhere = {normalize(one) for one in (*self.packages, *self.builders)}
        both = sorted(elsewhere & self.bound())
        if both:
            raise ValueError(f"bound to an index and also in packages: {', '.join(both)}")
        return self

    def bound(self) -> set[str]:
        """Return the normalized names of all packages that only one index may provide."""
        return {normalize(one) for index in self.indexes.values() for one in index.packages}


class AptSource(Part):
    """A vendor's archive of Debian packages, its key, and the packages to install from it."""

    url: str = Field(pattern=r"^https?://\S+$", description="address of the archive")
    suite: str = Field(pattern=r"^[a-z]+$", description="code name in it, such as jammy")
    component: str = Field(default="main", pattern=r"^[a-z-]+$", description="part of the suite")
    key: Name = Field(description="a name in archives: the key that its packages are signed with")
    packages: tuple[Annotated[str, Field(pattern=PINNED_PACKAGE)], ...] = Field(
        description="NAME, or NAME=VERSION"
    )


class Source(Part):
    """A git repository at a tag or branch; the lock adds the commit."""

    git: str = Field(pattern=GIT_ADDRESS, description="address of the repository")
    ref: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", description="tag or branch")
    commit: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{40}$",
        description="the commit if known; else the lock finds it",
    )
    license: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9.+() -]+$",
        description="SPDX expression of its license files, for the bill of materials",
    )


class Archive(Part):
    """A file to download; the lock adds its sum."""

    url: Address = Field(description="address of the file")
    mirrors: tuple[Address, ...] = Field(
        default=(), description="other addresses of the same file, if url does not answer"
    )
    sha256: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{64}$",
        description="the sum if known; else the lock finds it",
    )

    @property
    def file(self) -> str:
        """The file's name: the last part of its URL."""
        return self.url.rpartition("/")[2]

    @property
    def addresses(self) -> tuple[str, ...]:
        """The file's addresses, in the order in which they are tried."""
        return (self.url, *self.mirrors)


class Triton(Part):
    """Triton with our patches: compiled from source, or its wheel with the same patches.

    Its build from source takes `SOURCES` and `ARCHIVES` of the recipe and `BUILDER`, which its own
    setup.py would download. Its wheel takes none of them.
    """

    SOURCES: ClassVar[tuple[str, ...]] = ("googletest", "triton")
    ARCHIVES: ClassVar[tuple[str, ...]] = ("cuobjdump", "llvm", "nvdisasm", "ptxas")
    BUILDER: ClassVar[str] = "pybind11"

    version: ExactVersion = Field(description="the version that torch requires")
    origin: Literal["source", "wheel"] = Field(
        alias="from", description="source: compiled from sources.triton; wheel: the official one"
    )


class Cuda(Part):
    """The GPUs that CUDA code is compiled for."""

    architectures: tuple[Architecture, ...] = Field(
        min_length=1, description="compute capability times ten: 90 is Hopper"
    )
    ptx: bool = Field(
        default=False,
        description="also the intermediate code of the last one, which later GPUs compile",
    )

    @property
    def codes(self) -> tuple[str, ...]:
        """The architectures as our patches' CUDA_ARCHITECTURES names them, such as 120+PTX."""
        *others, last = self.architectures
        return (*others, f"{last}+PTX" if self.ptx else last)


class SmokeTrain(Part):
    """The short training that proves an image: real text, and a loss that falls."""

    model_name: str = Field(description="a preset of the training package")
    dataset: str = Field(pattern=r"^text:/", description="text:GLOB inside the image")
    steps: int = Field(ge=60, description="optimizer steps")
    loss_ratio: float = Field(gt=0, lt=1, description="upper limit of last loss / first loss")


class Smoke(Part):
    """What the smoke test checks inside the image."""

    imports: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*$")], ...] = Field(
        default=(), description="modules to import, in addition to those of python.built"
    )
    gpu_imports: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*$")], ...] = Field(
        default=(), description="modules that load only on a machine with an accelerator"
    )
    train: SmokeTrain | None = None
