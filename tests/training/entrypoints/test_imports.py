"""The modules that an entry point and a run import: each start waits for all of them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.training.support.runs import ROOT

pytestmark = pytest.mark.processes

# Every entry point that trains, and the command line of one of them.
CONFIGURED = """
from training import launch, llama_fsdp, llama_smp, mamba2_neuron, mamba_composer, mamba_fsdp
mamba_fsdp.configure(["--dataset_path=synthetic", "--save_ckpt_path=/nowhere", "--num_steps=1"])
"""
BUILT = "import training.trainer.run"  # what every run has
# What only some runs need, for loggers, data or a system: each takes a tenth of a second or more.
OF_SOME = {
    *("composer", "datasets", "fsspec", "matplotlib", "neuronx_distributed", "pandas", "s3fs"),
    *("tensorboard", "tokenizers", "torch_xla", "torch._dynamo", "transformers", "triton", "wandb"),
}


def loaded(code: str) -> set[str]:
    """Return the modules that a fresh process has imported after running some code."""
    code += "\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout))


def test_a_configuration_takes_nothing_but_yaml() -> None:
    found = {name.partition(".")[0] for name in loaded(CONFIGURED) - loaded("")}
    ours = {"training", "__mp_main__"}  # the second is multiprocessing's name for the program
    assert found - sys.stdlib_module_names <= {*ours, "yaml", "_yaml"}


def test_what_some_runs_take_is_loaded_by_them_alone() -> None:
    found = loaded(BUILT)
    assert "torch" in found
    # torch 2.2's checkpoints import torch._dynamo themselves.
    assert (found - loaded("import torch.distributed.checkpoint")) & OF_SOME == set()


def test_a_bad_request_needs_no_torch_and_shows_no_traceback() -> None:
    code = "import sys; sys.modules['torch'] = None; import runpy; sys.argv = ['x', '--nope=1'];"
    code += "runpy.run_module('training.llama_smp', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "error: --nope: there is no such flag\n")
