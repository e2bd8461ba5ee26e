"""The entry point for SMP v2: zipped_data, which chooses the files of a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.errors import RequestError
from training.llama_smp import configure


@pytest.mark.parametrize(
    ("files", "read", "shown"),
    [
        (["a.json"], "*.json", "zipped_data: 0, as {} has *.json files and no *.json.gz"),
        (["a.json.gz"], "*.json.gz", ""),
        (["a.json", "a.json.gz"], "*.json.gz", ""),
        ([], "*.json.gz", ""),
    ],
)
def test_what_is_not_said_of_zipped_data_is_seen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, files: list[str], read: str, shown: str
) -> None:
    """A flag takes precedence; both kinds in a folder may be the same data twice."""
    for name in files:
        (tmp_path / name).touch()
    given = ("--checkpoint_dir=/x", f"--training_dir={tmp_path}")
    with caplog.at_level("INFO", "training"):
        assert configure(given).data.dataset_path == f"lines:{tmp_path}/{read}"
    notes = [line for line in caplog.messages if line.startswith("zipped_data")]
    assert notes == ([shown.format(tmp_path)] if shown else [])
    data = configure((*given, "--zipped_data=1")).data
    assert data.dataset_path == f"lines:{tmp_path}/*.json.gz"


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        (("--training_dir=/d", "--dataset_type=hf"), "only dataset_type=gpt_jsonl uses it"),
        (("--training_dir=packed:/x.npy",), "packed:/x.npy is not a folder whose files it chooses"),
        (("--training_dir=/d/*.json.gz",), "/d/*.json.gz is not a folder whose files it chooses"),
        (
            ("--training_dir=/d/*.json.gz", "--test_dir=text:/x"),
            "/d/*.json.gz is not a folder whose files it chooses",
        ),
    ],
)
def test_zipped_data_that_would_have_no_effect(flags: tuple[str, ...], shown: str) -> None:
    with pytest.raises(RequestError) as error:
        configure(("--checkpoint_dir=/x", "--zipped_data=0", *flags))
    assert str(error.value) == f"--zipped_data: {shown}; fix: leave it out"


def test_zipped_data_of_one_folder_of_two() -> None:
    given = ("--training_dir=packed:/x.npy", "--test_dir=/t", "--zipped_data=0")
    data = configure(("--checkpoint_dir=/x", *given)).data
    assert (data.dataset_path, data.eval_dataset_path) == ("packed:/x.npy", "lines:/t/*.json")
