"""An image's config, in every form that engines write."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sqshforge.errors import WorkError
from sqshforge.image import address as source
from sqshforge.image import enroot
from sqshforge.image.config import Step, layers_below, steps, understanding
from sqshforge.squash.mksquashfs import Options
from sqshforge.squash.request import PackRequest


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
# What `docker image inspect` of 20.10 prints in addition; newer ones leave most of it out.
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
    "config",
    [
        {"Cmd": "ls -l"},
        {"Env": {"A": "b"}},
        {"Labels": ["a=b"]},
        {"Volumes": 7},
        {"Volumes": ["/a"]},
        {"Volumes": "/a"},
        {"Env": ["A=half a character \ud800"]},
        {"Env": ["A=\0"]},
        {"Entrypoint": ["a\0"]},
        {"Cmd": ["a\0"]},
        {"WorkingDir": "/a\0"},
        {"Volumes": {"/a\0": {}}},
        {"Labels": {"a": "\0"}},
    ],
)
def test_a_config_of_another_shape_is_an_error(config: dict[str, Any]) -> None:
    with pytest.raises(WorkError, match=r"is invalid|refused"):
        parsed(config)


@pytest.mark.parametrize("letter", [*"\t\n\r\x0b\x0c\x1b\x1e\x7f\x85\u2028\u2029"])
def test_a_volume_with_a_control_character_is_refused(letter: str) -> None:
    """Some readers of /etc/fstab take it for the end of a line or of a field."""
    with pytest.raises(WorkError, match="refused") as caught:
        parsed({"Volumes": {f"/a{letter}/x none bind": {}}})
    assert all(line.isprintable() for line in caught.value.lines())


def test_volumes_of_other_letters_are_taken() -> None:
    assert parsed({"Volumes": {"/data disk": {}, "/größe": {}}}).volumes == ("/data disk", "/größe")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(), below, max_size=3),
    max_leaves=6,
)
WORDS = st.none() | st.lists(st.text(), max_size=4)
CONFIGS: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {},
    optional={
        "Env": WORDS | VALUES,
        "Entrypoint": WORDS | VALUES,
        "Cmd": WORDS | VALUES,
        "WorkingDir": st.text() | VALUES,
        "Volumes": st.dictionaries(st.text(), st.builds(dict), max_size=3) | VALUES,
        "Labels": st.dictionaries(st.text(), st.text() | VALUES, max_size=3) | VALUES,
    },
)
TIMES = st.sampled_from(["", "1970-01-01T00:00:10Z"]) | st.datetimes().map(str) | st.text()
HISTORY = st.lists(
    st.fixed_dictionaries({}, optional={"created": TIMES, "created_by": st.text()}), max_size=3
)


@settings(deadline=None, max_examples=300)
@given(config=CONFIGS, created=TIMES | VALUES, history=HISTORY | VALUES)
def test_any_config_gives_files_or_one_error(config: Any, created: Any, history: Any) -> None:
    try:
        with understanding("x"):
            found = source.parse_config(
                config,
                reference="x",
                digest=None,
                created=created,
                size=1,
                history=steps(history),
            )
    except WorkError as error:
        assert all(line.isprintable() for line in error.lines())
        return
    files = enroot.files(found)
    assert files["etc/environment"].decode().splitlines() == [
        one for one in found.env if one.partition("=")[0] not in enroot.left_out(found)
    ]
    assert len(files["etc/fstab"].decode().splitlines()) == len(found.volumes)
    request = PackRequest.of(found, Options.of("shared"), "mksquashfs")
    assert request.key.startswith("sha256:")
    assert request.base_key(["sha256:0"]) != request.key


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
        ("2106-02-07T06:28:15Z", 2**32 - 1),  # the latest that a squash file can hold
        ("2106-02-07T06:28:16Z", 2**32 - 1),
        ("9999-12-31T23:59:59-23:59", 2**32 - 1),
    ],
)
def test_times_with_any_decimals_and_zone(text: str, seconds: int) -> None:
    assert parsed({}, created=text).created == seconds


def test_a_time_that_is_none_is_an_error() -> None:
    with pytest.raises(WorkError, match="is invalid"):
        parsed({}, created="yesterday")


@pytest.mark.parametrize(
    ("instruction", "is_of_base"),
    [
        ("/bin/sh -c #(nop) ", False),  # buildah's, for a Dockerfile with only FROM
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


@pytest.mark.parametrize(
    ("times", "newest"),
    [
        (["", ""], None),
        (["0001-01-01T00:00:00Z"], None),  # docker's for a step without a time
        (["0001-01-01T00:00:00+00:00", "1970-01-01T00:00:20Z"], 20),
        (["1970-01-01T00:00:20Z", ""], None),  # its files may be newer
        (["1970-01-01T00:00:00Z"], 0),
        ([], None),
    ],
)
def test_a_history_without_times_says_nothing_of_the_base(
    times: list[str], newest: int | None
) -> None:
    history = [*(Step(one, "RUN true") for one in times), Step("1970-01-01T00:00:30Z", "LABEL a=b")]
    found = source.parse_config({}, reference="x", digest=None, created="", size=1, history=history)
    assert found.base_created == newest


ADDED = "ADD rootfs.tar / # buildkit"
BELOW = [
    # BuildKit's words
    ([ADDED, "WORKDIR /sqshforge", "COPY a /sqshforge/a # buildkit", "LABEL a=b"], 3, 1),
    ([ADDED, "RUN /bin/sh -c apt-get update # buildkit", "COPY a b /sqshforge/ # buildkit"], 3, 2),
    ([ADDED, "COPY <<EOF /sqshforge/a # buildkit", 'CMD ["x"]'], 2, 1),
    # the words of docker's older builder, and of buildah
    (["/bin/sh -c #(nop) ADD file:1 in / ", "/bin/sh -c #(nop) COPY dir:2 in /sqshforge "], 2, 1),
    (["/bin/sh -c #(nop) ADD file:1 in /", "/bin/sh -c #(nop) WORKDIR /sqshforge"], 2, 1),
    # an imported base says nothing
    (["", "COPY a /sqshforge # buildkit"], 2, 1),
    # a step without a layer is assumed to have made one
    ([ADDED, "RUN true", "COPY a /sqshforge/a", "COPY b /sqshforge/b"], 3, 2),
    # it may change anything
    ([ADDED, "RUN /bin/sh -c cp a /sqshforge && useradd b # buildkit"], 2, 0),
    ([ADDED, "COPY /sqshforge /usr # buildkit"], 2, 0),
    ([ADDED, "COPY a /sqshforge/../etc # buildkit"], 2, 0),
    ([ADDED, "COPY a /sqshforge2 # buildkit"], 2, 0),
    ([ADDED, "WORKDIR /sqshforge-more"], 2, 0),
    ([ADDED, "COPY a /sqshforge/a", "RUN touch /b"], 3, 0),
    # fewer steps than layers, or no layers below
    (["COPY a /sqshforge/a", "WORKDIR /sqshforge"], 6, 0),
    ([ADDED, "COPY a /sqshforge/a", "WORKDIR /sqshforge"], 6, 0),
    (["COPY a /sqshforge/a"], 1, 0),
    ([], 3, 0),
]


@pytest.mark.parametrize(("instructions", "count", "below"), BELOW)
def test_what_a_history_says_of_the_layers(instructions: list[str], count: int, below: int) -> None:
    assert layers_below([Step("", one) for one in instructions], count) == below
