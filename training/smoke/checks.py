"""The checks of an image: what is installed, its devices, its launchers, and training."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from training.errors import TrainingError
from training.smoke.rehearsal import Rehearsal
from training.smoke.triton_cache import check_patch, hammer_cache

ON_GPU = """
import sys, torch
if not torch.cuda.is_available():
    sys.exit("this node has a GPU and torch sees none: does the container have the driver "
             "(NVIDIA_VISIBLE_DEVICES, enroot's hook, nvidia-container-cli)?")
assert torch.ones(64, 64, device="cuda").matmul(torch.ones(64, 64, device="cuda"))[0, 0] == 64
print(torch.cuda.get_device_name())
"""
RUNTIME = "sqshforge-run.pyz"  # with which a launcher starts the image if nothing else can


@dataclass
class Check:
    """One line of the result; `figures` has what was measured."""

    name: str
    ok: bool = False
    seconds: float = 0.0
    detail: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """A check that is to be run."""

    name: str
    run: Callable[[Check], None]  # notes what it finds; raises if that is wrong
    weight: float = 0.1  # about the seconds that it takes on two processors: its share of the whole


def plan(meta: Path, lock: dict[str, Any], recipe: dict[str, Any], folder: Path) -> Iterator[Step]:
    """List the checks of an image, by its lock and recipe; training writes into `folder`."""
    yield Step("versions", _detail(check_versions, lock))
    if recipe.get("accelerator") == "cuda":
        yield Step("GPU", _detail(check_gpu), 3.0)
    smoke = recipe.get("smoke") or {}
    on_device = smoke.get("gpu_imports", ())
    for module in (*smoke.get("imports", ()), *compiled(lock)):
        yield _import(module)
    for module in on_device if has_accelerator() else ():
        yield _import(module)
    if on_device and not has_accelerator():
        left_out = f"not tried, there is none here: {', '.join(on_device)}"
        yield Step("imports on a device", _detail(lambda: left_out))
    if "mamba_ssm" in compiled(lock) and has_accelerator():
        yield Step("kernels", _detail(_run, [sys.executable, "-m", "training.smoke.kernels"]), 20.0)
    for patch in lock.get("patches") or ():
        if patch["of"] == "triton":
            of_patch = _detail(check_patch, patch["path"], patch["after"])
            yield Step(f"patch {patch['file']}", of_patch)
            yield Step("triton cache", _detail(hammer_cache), 5.0)
    for name in recipe.get("launchers", ()):
        path = meta.parent / "launch" / f"{name}.sbatch"
        yield Step(f"launcher {name}", _detail(check_launcher, path))
    if recipe.get("launchers"):
        yield Step("runtime", _detail(check_runtime, meta.parent / "launch" / RUNTIME))
    if train := smoke.get("train"):
        rehearsal = Rehearsal(train, folder)

        def trains(result: Check) -> None:
            result.figures = rehearsal.train()
            result.detail = rehearsal.verdict(result.figures)

        def resumes(result: Check) -> None:
            result.figures = rehearsal.resume(exact=not has_accelerator())
            within = f" to {off:.1%}" if (off := result.figures["difference"]) else ""
            steps = f"steps {result.figures['from']} to {result.figures['to']}"
            result.detail = f"{steps} repeat{within}"

        yield Step("train", trains, 14.0)
        yield Step("resume", resumes, 7.0)


def _detail(check: Callable[..., str], *given: Any) -> Callable[[Check], None]:
    """Make the text that a check returns the detail of its result."""

    def run(result: Check) -> None:
        result.detail = check(*given)

    return run


def _import(module: str) -> Step:
    command = [sys.executable, "-c", f"import {module}"]

    def run(result: Check) -> None:
        _run(command)

    return Step(f"import {module}", run, 0.8)


def check_versions(lock: dict[str, Any]) -> str:
    """Compare the locked Python and packages with those installed. Raises TrainingError."""
    python = lock.get("python") or {}
    wrong = []
    wanted = str(python.get("version", ""))
    if (
        not wanted
        or wanted.split(".") != platform.python_version().split(".")[: wanted.count(".") + 1]
    ):
        wrong.append(f"python {wanted or '(none)'} is locked, {platform.python_version()} runs")
    bound = [one for index in python.get("bound") or () for one in index["packages"]]
    packages = [*(python.get("packages") or ()), *(python.get("built") or ()), *bound]
    for package in packages:
        name, version = package["name"], package["version"]
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{name} {version} is locked and not installed")
            continue
        if found != version and not (_is_open(package) and found.startswith(f"{version}+")):
            wrong.append(f"{name} {version} is locked, {found} is installed")
    if wrong:
        raise TrainingError("; ".join(wrong))
    return f"Python {platform.python_version()}, {len(packages)} packages as locked"


def _is_open(package: dict[str, Any]) -> bool:
    """Whether no file of a package is locked, because its index did not answer.

    The index then chose the build of the version: 2.16+4a9b2326 for 2.16.
    """
    return "hashes" in package and not package["hashes"]


def compiled(lock: dict[str, Any]) -> list[str]:
    """The modules of packages that were compiled for the image; they load without a device."""
    built = (lock.get("python") or {}).get("built") or ()
    return [package["name"].replace("-", "_") for package in built]


def has_accelerator() -> bool:
    """Whether an NVIDIA or a Neuron device can be seen."""
    return bool(nvidia_devices()) or any(Path("/dev").glob("neuron[0-9]*"))


def check_gpu() -> str:
    """Compute on a GPU of this node, if it has one. Raises TrainingError if torch sees none."""
    devices = nvidia_devices()
    if not devices:
        return "not tried: this node has none"
    name = _run([sys.executable, "-c", ON_GPU])
    return f"{name}, one of {len(devices)}"


def nvidia_devices() -> list[Path]:
    """Find the device files of the node's NVIDIA GPUs, with or without the driver's libraries."""
    return sorted(Path("/dev").glob("nvidia[0-9]*"))


def check_launcher(path: Path) -> str:
    """Have bash parse a launcher without running it. Raises TrainingError."""
    if not path.is_file():
        raise TrainingError(f"{path} is missing")
    _run(["bash", "-n", str(path)])
    return str(path)


def check_runtime(path: Path) -> str:
    """Start the runtime that the launchers take from the image. Raises TrainingError."""
    _run([sys.executable, "-I", "-S", str(path), "--help"])
    return str(path)


def _run(command: list[str]) -> str:
    """Run a command; return the last line that it printed. Raises TrainingError with its error."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise TrainingError(said[-1] if said else f"exit code {done.returncode}")
    return (done.stdout.strip().splitlines() or [""])[-1]
