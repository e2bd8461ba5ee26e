"""AWS's registry: how its hosts are recognized, and the permissions that a pull needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sqshforge.build import ecr
from sqshforge.errors import RequestError
from tests.support.ecr_server import HOST, SMP


@pytest.mark.parametrize(
    ("host", "account", "region"),
    [
        (HOST, "658645717510", "us-west-2"),
        ("111122223333.dkr.ecr.cn-north-1.amazonaws.com.cn", "111122223333", "cn-north-1"),
        ("111122223333.dkr.ecr-fips.us-gov-west-1.amazonaws.com", "111122223333", "us-gov-west-1"),
    ],
)
@pytest.mark.parametrize("end", ["", ":2.4.1-gpu", "@sha256:" + "a" * 64, ":1@sha256:" + "a" * 64])
@pytest.mark.parametrize("name", ["smp", "team/smp"])
def test_a_private_image_is_reported_by_its_host(
    host: str, account: str, region: str, end: str, name: str
) -> None:
    expected = ecr.Repository(account=account, region=region, host=host, name=name)
    assert ecr.parse(f"{host}/{name}{end}") == expected


@pytest.mark.parametrize(
    "reference",
    [
        "debian:bookworm-slim",
        "public.ecr.aws/neuron/pytorch-training-neuronx:2.1.2",
        f"mirror.test/{HOST}/smp:1",
        f"{HOST}.test/smp:1",
        HOST,
        f"{HOST}/",
        "658645717510.dkr.ecr.--region.amazonaws.com/smp",
        "",
    ],
)
def test_what_is_no_private_image_is_left_alone(reference: str) -> None:
    assert ecr.parse(reference) is None


@pytest.mark.parametrize(
    "account", ["", "65864571751", "6586457175100", "{account}", "65864571751\u0660"]
)
def test_an_account_that_is_none_is_reported(account: str) -> None:
    reference = f"{account}.dkr.ecr.us-west-2.amazonaws.com/smp:1"
    with pytest.raises(RequestError, match="12 digits") as caught:
        ecr.parse(reference)
    assert caught.value.where == reference


def test_the_policy_allows_what_is_named_and_no_more(root: Path) -> None:
    policy = json.loads((root / "docs" / "images" / "iam" / "ecr-pull.json").read_text())
    login, pull = policy["Statement"]
    assert policy["Version"] == "2012-10-17"
    assert (login["Effect"], pull["Effect"]) == ("Allow", "Allow")
    assert (login["Action"], login["Resource"]) == (ecr.ACTIONS[0], "*")
    assert tuple(pull["Action"]) == ecr.ACTIONS[1:]
    assert pull["Resource"] == f"arn:aws:ecr:*:{SMP.account}:repository/{SMP.name}"


def test_the_page_names_every_permission(root: Path) -> None:
    page = (root / "docs" / "images" / "ecr.md").read_text()
    assert [action for action in ecr.ACTIONS if f"`{action}`" not in page] == []
