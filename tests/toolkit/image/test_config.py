"""An image's config, in every shape that engines give it."""

from __future__ import annotations

from typing import Any

import pytest

from sqshforge.errors import WorkError
from sqshforge.image import address as source
from sqshforge.image.config import Step


def parsed(config: dict[str, Any], created: str = "") -> Any:
    return source.parse_config(config, reference="x", digest=None, created=created, size=1)


FULL: dict[str, Any] = {
    "Env": ["PATH=/bin", "A=b = c"],
    "Entrypoint": ["/bin/say"],
    "Cmd": ["it's", ""],
    "WorkingDir": "/work",
    "Volumes": {"/b": {}, "/a": {}},
    "Labels": {"z": "1", "a": "2\n3"},
}
# What `docker image inspect` of 20.10 prints besides; newer ones leave most of it out.
OLD = {
    "Hostname": "",
    "Domainname": "",
    "User": "",
    "AttachStdin": False,
    "Tty": False,
    "Image": "sha256:0",
    "OnBuild": None,
}


@pytest.mark.parametrize("more", [OLD, {}, {"ExposedPorts": {"80/tcp": {}}, "ArgsEscaped": True}])
def test_docker_old_and_new_and_oci_say_the_same(more: dict[str, Any]) -> None:
    config = parsed({**more, **FULL})
    assert config.env == ("PATH=/bin", "A=b = c")
    assert (config.entrypoint, config.cmd, config.workdir) == (("/bin/say",), ("it's", ""), "/work")
    assert config.volumes == ("/a", "/b")
    assert config.labels == (("a", "2\n3"), ("z", "1"))


@pytest.mark.parametrize("config", [{}, dict.fromkeys(FULL), {"WorkingDir": "", "Volumes": {}}])
def test_absent_and_null_keys_are_empty(config: dict[str, Any]) -> None:
    found = parsed(config)
    assert (found.env, found.entrypoint, found.cmd) == ((), (), ())
    assert (found.workdir, found.volumes, found.labels) == ("", (), ())


@pytest.mark.parametrize(
    "config", [{"Cmd": "ls -l"}, {"Env": {"A": "b"}}, {"Labels": ["a=b"]}, {"Volumes": 7}]
)
def test_a_config_of_another_shape_is_an_error(config: dict[str, Any]) -> None:
    with pytest.raises(WorkError, match="cannot be understood"):
        parsed(config)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("", 0),
        ("1970-01-01T00:00:10Z", 10),
        ("2024-02-29T12:00:00Z", 1709208000),
        ("2024-02-29T12:00:00.123456789Z", 1709208000),
        ("2024-02-29T14:00:00.1+02:00", 1709208000),
        ("2024-02-29T07:00:00-05:00", 1709208000),
        ("0001-01-01T00:00:00Z", 0),
    ],
)
def test_times_with_any_decimals_and_zone(text: str, seconds: int) -> None:
    assert parsed({}, created=text).created == seconds


def test_a_time_that_is_none_is_an_error() -> None:
    with pytest.raises(WorkError, match="cannot be understood"):
        parsed({}, created="yesterday")


@pytest.mark.parametrize(
    ("instruction", "is_of_base"),
    [
        ("/bin/sh -c #(nop) ", False),  # buildah's, of a Dockerfile that is a FROM alone
        ("/bin/sh -c #(nop)", False),
        ("/bin/sh -c #(nop) LABEL a=b", False),
        ("LABEL a=b", False),
        ("COPY training/ /sqshforge/training/ # buildkit", False),
        ("/bin/sh -c #(nop) COPY dir:12 in /sqshforge ", False),
        ("COPY x /sqshforge", False),
        ("COPY x /sqshforge-else/", True),
        ("/bin/sh -c #(nop) COPY dir:12 in /opt ", True),
        ("RUN true", True),
    ],
)
def test_which_steps_leave_all_but_our_folder_as_it_is(instruction: str, is_of_base: bool) -> None:
    history = [Step("1970-01-01T00:00:10Z", "RUN true"), Step("1970-01-01T00:00:20Z", instruction)]
    found = source.parse_config({}, reference="x", digest=None, created="", size=1, history=history)
    assert found.base_created == (20 if is_of_base else 10)
