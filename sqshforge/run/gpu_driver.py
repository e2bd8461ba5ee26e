"""Bring the host's NVIDIA driver into a container, as enroot's hook 98-nvidia does.

An image has CUDA, but never the driver's own libraries, which must match the loaded kernel module.
NVIDIA's nvidia-container-cli mounts them into a root; the variables NVIDIA_* select the devices and
the parts of the driver (docs of the NVIDIA Container Toolkit, "Environment variables").
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from sqshforge.errors import WorkError
from sqshforge.host.programs import Programs

CLI = "nvidia-container-cli"
CONTROL = Path("/dev/nvidiactl")  # exists once the driver is loaded
PARTS = ("compute", "compat32", "display", "graphics", "utility", "video")
FIX = "install it (NVIDIA's package libnvidia-container-tools), or enroot with its NVIDIA hook"


def bring_driver(root: Path, environment: Mapping[str, str], programs: Programs) -> None:
    """Mount the driver's libraries and programs into a root, if its environment asks for devices.

    Without a driver on the host nothing is done; without nvidia-container-cli a warning is printed,
    and the container starts without GPUs. Raises `WorkError` if nvidia-container-cli fails, as it
    does if the image requires a newer driver.
    """
    devices = environment.get("NVIDIA_VISIBLE_DEVICES", "void")
    if devices in ("", "void") or not CONTROL.exists():
        return
    cli = programs.which(CLI)
    if cli is None:
        print(
            f"warning: no GPU is seen in the container: {CLI} is not installed\n  fix:   {FIX}",
            file=sys.stderr,
        )
        return
    done = programs.attempt([cli, "--user", "configure", *_options(environment, programs), root])
    if done.code != 0:
        reason = (done.err.strip().splitlines() or [f"exit code {done.code}"])[-1]
        raise WorkError(
            f"the NVIDIA driver cannot be brought into the container: {reason}",
            where=CLI,
            fix="nvidia-smi says whether the driver works here; "
            "--env NVIDIA_VISIBLE_DEVICES=void starts without GPUs",
        )


def _options(environment: Mapping[str, str], programs: Programs) -> list[str]:
    """The options of `configure` for the variables NVIDIA_*.

    Raises `WorkError` for an unknown part of the driver.
    """
    ldconfig = programs.which("ldconfig.real") or programs.which("ldconfig") or "/sbin/ldconfig"
    options = ["--no-cgroups", f"--ldconfig=@{ldconfig}"]
    devices = environment["NVIDIA_VISIBLE_DEVICES"]
    if devices != "none":
        options.append(f"--device={devices}")
    for kind in ("config", "monitor"):
        if mig := environment.get(f"NVIDIA_MIG_{kind.upper()}_DEVICES"):
            options.append(f"--mig-{kind}={mig}")
    asked = environment.get("NVIDIA_DRIVER_CAPABILITIES") or "utility"
    parts = PARTS if "all" in asked.split(",") else [part for part in asked.split(",") if part]
    for part in parts:
        if part not in PARTS:
            raise WorkError(
                f"NVIDIA_DRIVER_CAPABILITIES names an unknown part of the driver: {part!r}",
                fix=f"take all, or some of {','.join(PARTS)}",
            )
        options.append(f"--{part}")
    if not environment.get("NVIDIA_DISABLE_REQUIRE"):
        options += [
            f"--require={value}"
            for name, value in sorted(environment.items())
            if name.startswith("NVIDIA_REQUIRE_")
        ]
    return options
