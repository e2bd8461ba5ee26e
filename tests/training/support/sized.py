"""The entry point with a model of any sizes, `--model_name=sized`; SIZED has them as JSON."""

from __future__ import annotations

import json
import os
import sys

from training import models
from training.entrypoint import enter, leave
from training.mamba_fsdp import configure

if __name__ == "__main__":
    sizes = json.loads(os.environ["SIZED"])
    models.PRESETS["sized"] = models.FAMILIES[sizes.pop("family")](**sizes)
    leave(enter(configure, sys.argv[1:]))
