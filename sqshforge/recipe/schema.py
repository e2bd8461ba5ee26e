"""The model of a whole recipe, and the rules between its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from sqshforge import platforms
from sqshforge.platforms import Platform
from sqshforge.recipe.parts import (
    AptSource,
    Archive,
    Base,
    Cuda,
    Part,
    Python,
    Smoke,
    Source,
    Triton,
)
from sqshforge.recipe.words import (
    NAME,
    PATCH,
    VARIABLE,
    Line,
    Name,
    Package,
    PlatformName,
    normalize,
    put_in,
    split_image,
)

SAME_EVERYWHERE = ("target", "extends", "template", "platforms", "per_platform")


class Recipe(Part):
    """One image, from its base to its smoke test."""

    target: str = Field(pattern=NAME, description="the recipe's name and the file's stem")
    extends: str | None = Field(
        default=None, pattern=NAME, description="the target whose recipe this one changes"
    )
    template: Name | None = Field(
        default=None, description="stem of the file in images/; default: the target's name"
    )
    title: Line = Field(min_length=1, description="one line that describes the image")
    accelerator: Literal["cpu", "cuda", "neuron"] = Field(
        description="the hardware that the image computes on"
    )
    platforms: tuple[PlatformName, ...] = Field(
        default=("linux/amd64",), min_length=1, description="platforms that images are made for"
    )
    per_platform: Mapping[PlatformName, Mapping[str, Any]] = Field(
        default_factory=dict,
        description="keys of the recipe that differ on that platform, merged as by `extends`",
    )
    parameters: Mapping[Annotated[str, Field(pattern=VARIABLE)], str] = Field(
        default_factory=dict,
        description="values for {NAME} in images, python.version, env and smoke.train.dataset; "
        "--set NAME=VALUE",
    )
    base: Base
    apt: tuple[Package, ...] = Field(default=(), description="Debian packages in the image")
    apt_sources: Mapping[Name, AptSource] = Field(
        default_factory=dict, description="vendors' archives of Debian packages"
    )
    apt_build: tuple[Package, ...] = Field(
        default=(), description="Debian packages in the stages that compile"
    )
    cuda: Cuda | None = None
    python: Python
    triton: Triton | None = None
    sources: Mapping[Name, Source] = Field(
        default_factory=dict, description="git repositories to compile"
    )
    archives: Mapping[Name, Archive] = Field(default_factory=dict, description="files to download")
    patches: Mapping[Name, tuple[Annotated[str, Field(pattern=PATCH)], ...]] = Field(
        default_factory=dict,
        description="files in patches/ for triton, a source or a package in python.built",
    )
    env: Mapping[Annotated[str, Field(pattern=VARIABLE)], Line] = Field(
        default_factory=dict, description="environment variables of the image"
    )
    launchers: tuple[Annotated[str, Field(pattern=r"^[a-z0-9_]+$")], ...] = Field(
        default=(), description="names in launch/, without .sbatch"
    )
    smoke: Smoke = Smoke()
    disk_gb: float = Field(
        gt=0, description="space that a first build takes in the engine's storage"
    )

    @field_validator("per_platform")
    @classmethod
    def _differs_in_content(cls, value: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
        for name, keys in value.items():
            for key in SAME_EVERYWHERE:
                if key in keys:
                    raise ValueError(f"{name}.{key}: is the same on every platform")
        return value

    @model_validator(mode="after")
    def _parts_fit(self) -> Recipe:
        for name in self.per_platform:
            if name not in self.platforms:
                raise ValueError(f"per_platform has {name}, which is not in platforms")
        lacking = self._lacking_for_triton()
        if lacking:
            raise ValueError(
                f"triton from source needs {', '.join(lacking)}: "
                "docs/background/triton.md has them all"
            )
        known = {*self.sources, *(normalize(one.package) for one in self.python.built)}
        known |= {"triton"} if self.triton else set()
        strangers = sorted(set(self.patches) - known)
        if strangers:
            raise ValueError(
                f"patches for {', '.join(strangers)}, which is neither triton, nor in sources, "
                "nor in python.built"
            )
        files = Counter(one.file for one in self.archives.values())
        for key, archive in self.archives.items():
            if not archive.file:
                raise ValueError(f"archives.{key}: its address ends in no file's name")
            if files[archive.file] > 1:  # they share one folder
                raise ValueError(f"archives.{key}: another archive is named {archive.file}, too")
        for wanted, there, what in self._named():
            if wanted not in there:
                raise ValueError(f"{what} names {wanted}, which is not there")
        if self.python.built and self.cuda is None:
            raise ValueError("python.built needs cuda.architectures to compile for")
        for image in self.images:
            self.addresses(self.tagged(image))
        return self

    def _lacking_for_triton(self) -> list[str]:
        """List the inputs of Triton's build from source that the recipe does not name."""
        if not self.triton_from_source:
            return []
        builders = {normalize(one) for one in self.python.builders}
        return [
            *(f"sources.{one}" for one in Triton.SOURCES if one not in self.sources),
            *(f"archives.{one}" for one in Triton.ARCHIVES if one not in self.archives),
            *(f"{one} in python.builders" for one in (Triton.BUILDER,) if one not in builders),
        ]

    @property
    def triton_from_source(self) -> bool:
        """Whether Triton is compiled from source."""
        return self.triton is not None and self.triton.origin == "source"

    def builds_with(self, name: str) -> bool:
        """Whether a build uses the source or archive of this name.

        The inputs of Triton's build from source stay in a recipe that uses Triton's wheel.
        """
        of_triton = name in (*Triton.SOURCES, *Triton.ARCHIVES)
        return not of_triton or self.triton is None or self.triton_from_source

    def _named(self) -> list[tuple[str, Mapping[str, Part], str]]:
        """List references in the recipe: name, the mapping that must have it, referring key."""
        built = [one for one in self.python.built if one.source]
        return [
            *((one.source or "", self.sources, "python.built.source") for one in built),
            *((one.key, self.archives, "apt_sources.key") for one in self.apt_sources.values()),
        ]

    @property
    def platform(self) -> Platform:
        """The platform of the image; a recipe from `load` has only this one."""
        return platforms.ALL[self.platforms[0]]

    @property
    def name(self) -> str:
        """The target, with a suffix for a platform other than the default."""
        return f"{self.target}{self.platform.suffix}"

    @property
    def site(self) -> str:
        """The folder of the image's Python packages."""
        return self.python.site.replace("{version}", self.python.version)

    @property
    def images(self) -> tuple[str, ...]:
        """The images that a build starts from, without duplicates."""
        return tuple(dict.fromkeys(filter(None, (self.base.image, self.base.compiler))))

    def address(self, image: str) -> str:
        """Substitute the parameters in an image's address; `ValueError` for undefined ones."""
        return put_in(image, self.parameters)

    def tagged(self, image: str) -> str:
        """Return an image as locks name it: parameters substituted in its tag, not its repository.

        Another region or account serves the same image, but another tag is another image.
        """
        name, tag = split_image(image)
        address = self.address(image)
        own = split_image(address)[1]
        return f"{name}{own}" if put_in(tag, self.parameters) == own else address

    def addresses(self, image: str) -> tuple[str, ...]:
        """Return all addresses of an image, parameters substituted, in the order they are tried."""
        return tuple(self.address(one) for one in self.base.addresses(image))

    def packages(self) -> list[str]:
        """Return all requirements that the image's Python must satisfy, including Triton."""
        own = [f"triton=={self.triton.version}"] if self.triton else []
        built = [one.package for one in self.python.built]
        return [*self.python.packages, *own, *built]
