"""Every launcher trains its system, tiny, on two nodes from its sqsh; how the image gets there.

No image that can be built from this machine's packages has Composer: its launcher uses the image's
training code, and the interpreter of the environment that `make test-composer` uses.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.site import TRIAL_FLAGS, Site

SYSTEMS = ("mamba_fsdp", "mamba2_neuron", "llama_fsdp", "mixtral_fsdp", "llama_smp")


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_trial(site: Site, system: str) -> None:
    job = site.submit(system, *TRIAL_FLAGS.get(system, ()), launcher=system, TRIAL="1", STEPS="40")
    said = site.complete(job)
    assert "1: training.launch: node 1 of 2: 1 process" in said
    losses = site.losses(system)
    assert [step for step, _ in losses] == list(range(1, 41))
    if system != "llama_smp":  # whose data is random
        assert losses[-1][1] < 0.8 * losses[0][1]


def test_composer(site: Site) -> None:
    environment = site.root / ".venvcomposer"
    assert environment.is_dir(), "make test-cluster sets it up"
    place = site.place("composer")
    python = (environment / "bin" / "python").resolve()
    folders = [environment, place]
    if python.parents[1] != Path("/usr"):  # otherwise the image has it
        folders.append(python.parents[1])
    mounts = [f"{folder}:{folder}" for folder in folders]
    job = site.submit(
        "composer",
        launcher="mamba_composer",
        PYTHON=str(environment / "bin" / "python"),
        MOUNTS=",".join(mounts),
        TRIAL="1",
    )
    said = site.complete(job)
    assert "done: 40 steps" in said
    losses = site.losses("composer")
    assert len(losses) == 40 and losses[-1][1] < 0.8 * losses[0][1]


SHORT = ("--num_steps=2", "--report_interval=1")


def test_the_image_is_brought_to_each_node_once(site: Site) -> None:
    disk = str(site.slurm.local / "images")
    for by in ("sbcast", "copy"):
        env: Any = {"TRIAL": "1", "STAGE": f"{disk}-{by}", "STAGE_BY": by}
        first = site.submit(f"staged-{by}", *SHORT, **env)
        said = site.complete(first)
        assert f"{disk}-{by}/" in said.partition("by sqshforge")[0].splitlines()[-1]
        assert said.count("there already") == 0
        again = site.submit(f"staged-{by}", *SHORT, **env, PREFLIGHT="0")
        assert site.complete(again).count("there already") == 2
    assert not Path(f"{disk}-sbcast").exists(), "it is on the nodes' own disks"


def test_an_edit_needs_no_new_image(site: Site, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(site.root / "training", copy / "training")
    loop = copy / "training" / "mamba_fsdp.py"
    loop.write_text(loop.read_text() + "\nprint('edited here', flush=True)\n")
    job = site.submit("dev", *SHORT, TRIAL="1", DEV=str(copy))
    assert "edited here" in site.complete(job)


def test_an_image_that_nobody_signed(site: Site, tmp_path: Path) -> None:
    signers = tmp_path / "signers"
    signers.write_text("")
    job = site.submit("unsigned", *SHORT, TRIAL="1", SIGNERS=str(signers))
    assert site.slurm.wait(job) == "FAILED"
    assert "signature" in site.slurm.output(job) and not site.place("unsigned/checkpoints").exists()


def test_print_env_on_a_node(site: Site) -> None:
    program = Path(sys.executable).with_name("sqshforge")
    words = f"{program} run {site.image} -- python3 -m training.launch --print-env"
    job = site.slurm.submit(script=f"#!/bin/bash\nsrun {words}\n", folder=site.folder)
    assert "training.launch: node 0 of 1" in site.complete(job)
