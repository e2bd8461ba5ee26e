"""A Dockerfile's bind mounts as volumes, for buildah before 1.24."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sqshforge.engine.buildah import Buildah, with_volumes
from sqshforge.errors import MissingError
from sqshforge.host.programs import Programs
from tests.toolkit.build.test_dockerfile import TARGETS

GOLDEN = Path(__file__).parents[2] / "golden"
BY_VOLUMES = ("cpu-mamba", "neuron-mamba2", "neuron29-mamba2", "smp-llama")


def test_the_folders_that_cpu_mamba_mounts_become_volumes() -> None:
    text = (GOLDEN / "cpu-mamba.Dockerfile").read_text()
    plain = with_volumes(text)
    assert plain is not None
    assert plain.volumes == {
        "/run/apt": "apt",
        "/run/inside": "inside",
        "/run/requirements": "requirements",
        "/run/wheels": "wheels",
    }
    assert set(re.findall(r"--mount=type=(\w+)", plain.dockerfile)) == {"secret"}
    # Nothing else has changed: the rest of the text only lacks whole flags.
    words = [word for word in text.split() if not word.startswith("--mount=type=bind")]
    assert [one for one in plain.dockerfile.split() if one != "\\"] == [
        one for one in words if one != "\\"
    ]


@pytest.mark.parametrize(
    "line",
    [
        "RUN --mount=type=bind,from=other,source=/a,target=/b true",
        "RUN --mount=type=cache,id=x,target=/build true",
        "RUN --mount=type=bind,source=a,target=/b x\nRUN --mount=type=bind,source=c,target=/b x",
    ],
)
def test_what_volumes_cannot_do_is_refused(line: str) -> None:
    assert with_volumes(f"FROM scratch\n{line}\n") is None


class Old(Programs):
    """A buildah of Ubuntu 22.04's version, which is the only thing to ask it for."""

    def capture(self, argv, **options):  # type: ignore[no-untyped-def]
        if argv[1] == "--version":
            return "buildah version 1.23.1 (image-spec 1.0.1, runtime-spec 1.0.2-dev)\n"
        return super().capture(argv, **options)


@pytest.mark.processes
@pytest.mark.parametrize("target", TARGETS)
def test_an_old_buildah_says_before_the_build_which_images_it_cannot_build(target: str) -> None:
    text = (GOLDEN / f"{target}.Dockerfile").read_text()
    buildah = Buildah(Programs().require("buildah"), Old())
    if target in BY_VOLUMES:
        assert buildah.check(text) == []
        return
    with pytest.raises(MissingError) as caught:
        buildah.check(text)
    assert "buildah 1.23 cannot build this image" in caught.value.what
    assert "apt-get install docker.io docker-buildx; ENGINE=docker" in caught.value.fix


@pytest.mark.processes
def test_an_old_buildah_names_the_package_manager_that_is_there() -> None:
    class Fedora(Old):
        def which(self, program: str) -> Path | None:
            return {"dnf": Path("/usr/bin/dnf")}.get(program)

    target = next(one for one in TARGETS if one not in BY_VOLUMES)
    buildah = Buildah(Programs().require("buildah"), Fedora())
    with pytest.raises(MissingError) as caught:
        buildah.check((GOLDEN / f"{target}.Dockerfile").read_text())
    assert "dnf install docker docker-buildx" in caught.value.fix
    assert "apt-get" not in caught.value.fix


@pytest.mark.processes
def test_this_machine_s_buildah_builds_all() -> None:
    buildah = Buildah.find(Programs())
    for target in TARGETS:
        assert buildah.check((GOLDEN / f"{target}.Dockerfile").read_text()) == []
