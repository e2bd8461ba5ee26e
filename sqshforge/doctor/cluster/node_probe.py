"""The probe that runs on each node of a cluster for `sqshforge doctor --cluster`.

The text of this file is sent to the nodes as an argument of srun, and runs there with any Python
from 3.6 on, so it imports nothing of the project. It writes no files, needs no root, and gives up
on every program and file system that does not answer. It prints one JSON object, in lines short
enough for srun to pass on whole.
"""

import functools
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path("/")
MARK = "sqshforge-doctor"  # begins each line that is meant for the doctor
PIECE = 700  # characters of the object per line; Slurm passes on 1,024 bytes at a time
ANSWER = 15.0  # seconds that one program may take
HEAD = 64 << 20  # bytes of an image to read
BLOCK = 1 << 20
APPEARS = 5.0  # seconds that a new file in a shared folder has to appear
LONGEST = 1 << 20  # most bytes of a configuration file or a plugin to read
RUNNING = []  # type: list[subprocess.Popen] # the programs that were asked
# Where slurm.conf is: from packages, as handed out by slurmctld, on AWS's clusters.
SLURM = ("/etc/slurm", "/run/slurm/conf", "/opt/slurm/etc")
# Kernel settings that may forbid user namespaces.
SWITCHES = (
    "user.max_user_namespaces",
    "kernel.unprivileged_userns_clone",
    "kernel.apparmor_restrict_unprivileged_userns",
)
# Prints where enroot.conf and the files in enroot.conf.d put the folders; variables that are set
# win, as in enroot. The values are shell words, which enroot has the shell expand in the same way.
ENROOT_FOLDERS = r"""
for file in "$@"; do
    [[ -r $file ]] || continue
    while IFS=$' \t=' read -r name value; do
        [[ $name =~ ^ENROOT_[A-Z_]+$ && -z ${!name:-} ]] || continue
        value=$(set -u; eval "echo $value" 2> /dev/null) || value=
        [[ -z $value ]] || export "$name=$value"
    done < "$file"
done
home=${HOME:-$(echo ~)}
printf '%s\n' "${ENROOT_RUNTIME_PATH:-${XDG_RUNTIME_DIR:-/run}/enroot}" \
    "${ENROOT_CACHE_PATH:-${XDG_CACHE_HOME:-$home/.cache}/enroot}" \
    "${ENROOT_DATA_PATH:-${XDG_DATA_HOME:-$home/.local/share}/enroot}" \
    "${ENROOT_TEMP_PATH:-${TMPDIR:-/tmp}}"
"""
FOLDERS = ("ENROOT_RUNTIME_PATH", "ENROOT_CACHE_PATH", "ENROOT_DATA_PATH", "ENROOT_TEMP_PATH")


def main(words: str) -> None:
    """Examine this node, report what was found, and then the time when it is asked for."""
    asked = json.loads(words)
    limit = asked["seconds"] / 3
    all_nodes = (pyxis, enroot, fuse, programs, namespaces, nvidia, efa, needrestart)
    checks = {one.__name__: one for one in all_nodes}
    for number, path in enumerate(asked["markers"]):
        checks[f"marker {number}"] = functools.partial(marker, Path(path))
    found, faults = bounded(checks, limit)
    if asked["image"]:
        # Alone, so that the other checks do not slow the timed read down.
        read, slow = bounded({"image": lambda: image(Path(asked["image"]), limit * 0.8)}, limit)
        found.update(read)
        faults.update(slow)
    for process in RUNNING:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    found["markers"] = [
        found.pop(f"marker {number}", {"fault": faults.pop(f"marker {number}", "")})
        for number in range(len(asked["markers"]))
    ]
    found["faults"] = [{"check": name, "text": text} for name, text in faults.items()]
    found.update(
        node=name_of_node(),
        nodes=os.environ.get("SLURM_JOB_NODELIST", ""),
        uid=os.getuid(),
        python=".".join(str(part) for part in sys.version_info[:3]),
        kernel=os.uname().release,
        installer=next((one for one in ("apt-get", "dnf") if shutil.which(one)), ""),
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[1],  # -1 for no limit
    )
    pieces = re.findall(f".{{1,{PIECE}}}", json.dumps(found))
    for number, piece in enumerate(pieces, 1):
        tell(f"{number}/{len(pieces)} {piece}")
    question, _ = bounded({"clock": sys.stdin.buffer.readline}, asked["seconds"])
    if question.get("clock"):  # empty at the end of input
        tell(f"clock {time.time():.6f}")
    os._exit(0)  # a normal exit might wait for threads that hang on a file system


def tell(text: str) -> None:
    os.write(1, f"{MARK} {name_of_node()} {text}\n".encode())


def name_of_node() -> str:
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]


def bounded(checks: "dict", seconds: float) -> "tuple[dict, dict]":
    """Run checks concurrently; return the results, and the faults of those without one in time."""
    found, faults = {}, {}

    def run(name: str) -> None:
        try:
            found[name] = checks[name]()
        except OSError as error:
            faults[name] = error.strerror or str(error)
        except Exception as error:
            faults[name] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in checks]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    done = dict(found)
    late = f"no answer within {seconds:.0f} s"
    return done, {name: faults.get(name, late) for name in checks if name not in done}


def ask(words: "list", env: "dict | None" = None) -> "tuple[int, str]":
    """Return a program's exit code and output; 127 if it cannot start, 124 without an answer."""
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
    except OSError as error:
        return 127, error.strerror or str(error)
    RUNNING.append(process)
    try:
        said, _ = process.communicate(timeout=ANSWER)
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {ANSWER:.0f} s"
    return process.returncode, said.decode(errors="replace")


def text_of(path: Path) -> str:
    """Return the beginning of a file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(LONGEST).decode(errors="replace")
    except OSError:
        return ""


def matching(pattern: Path) -> "list[Path]":
    """Return the files that match an absolute pattern, sorted."""
    return sorted(Path("/").glob(str(pattern)[1:]))


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]


def found_in(text: str, pattern: str) -> str:
    """Return what a pattern's first group matches in a text; empty without a match."""
    match = re.search(pattern, text)
    return match.group(1) if match else ""


def pyxis() -> "dict":
    """Report whether srun knows containers, and what plugstack.conf says about the plugin."""
    code, said = ask(["srun", "--help"])
    plugin, words = plugstack_line(plugstack_file())
    return {
        "known": "--container-image" in said,
        "fault": last_line(said) if code not in (0, 127) else "",
        "plugin": plugin,
        # One of the plugin's messages has it. A name without a path is in Slurm's plugin folder.
        "version": found_in(
            text_of(Path(plugin)) if plugin else "", r"version v(\d+\.\d+[\w.+-]*)"
        ),
        "squashfuse": any(f"use_squashfuse={yes}" in words for yes in ("1", "true", "yes", "y")),
    }


def plugstack_file() -> Path:
    """Return the path of Slurm's list of plugins: named by slurm.conf, or beside it."""
    given = os.environ.get("SLURM_CONF")
    places = [Path(given)] if given else [Path(one, "slurm.conf") for one in SLURM]
    place = next((one for one in places if one.is_file()), places[0])
    named = found_in(text_of(place), r"(?im)^\s*PlugStackConfig\s*=\s*(\S+)")
    return place.parent / (named or "plugstack.conf")


def plugstack_line(path: Path, depth: int = 0) -> "tuple[str, list]":
    """Find pyxis in a list of plugins and those it includes; return its path and settings."""
    for line in text_of(path).splitlines():
        words = line.partition("#")[0].split()
        if len(words) > 1 and words[0] == "include" and depth < 5:
            for one in matching(path.parent / words[1]):
                plugin, settings = plugstack_line(one, depth + 1)
                if plugin:
                    return plugin, settings
        elif len(words) > 1 and words[0] in ("required", "optional") and "pyxis" in words[1]:
            return words[1], words[2:]
    return "", []


def enroot() -> "dict":
    """Report which enroot there is, and where its folders are."""
    path = shutil.which("enroot")
    if path is None:
        return {"path": ""}
    # It is a shell script whose text has its configuration folder.
    script = text_of(Path(path))
    settings = Path(found_in(script, r'"(/[^"\n]*)/enroot\.conf"') or "/etc/enroot")
    files = [settings / "enroot.conf", *matching(settings / "enroot.conf.d/*.conf")]
    there = dict.fromkeys(FOLDERS[:3], "/")  # so that this call creates nothing
    code, said = ask([path, "version"], dict(os.environ, **there))
    bad, folders = ask(["bash", "-c", ENROOT_FOLDERS, "bash", *map(str, files)])
    places = [] if bad else zip(FOLDERS, folders.split("\n"))  # noqa: B905
    return {
        "path": path,
        "version": "" if code else last_line(said),
        "fault": last_line(said) if code else last_line(folders) if bad else "",
        "settings": str(settings),
        "hook": os.access(str(settings / "hooks.d/98-nvidia.sh"), os.X_OK),
        "folders": [dict(place(Path(path)), name=name) for name, path in places],
    }


def place(path: Path) -> "dict":
    """Report whether a folder is writable or can be created, and on which file system it is."""
    above = next(one for one in (path, *path.parents) if os.path.lexists(str(one)))
    try:
        room = os.statvfs(str(above))
    except OSError:  # a broken link, or a file system that is gone
        return {"path": str(path), "above": str(above)}
    return {
        "path": str(path),
        "there": above == path,
        "above": str(above),
        "usable": above.is_dir() and os.access(str(above), os.W_OK | os.X_OK),
        "kind": kind_of_file_system(os.path.realpath(str(above))),
        "free": room.f_bavail * room.f_frsize,
    }


def kind_of_file_system(path: str) -> str:
    """Return the type of the file system that a path is on, such as ext4, nfs4, tmpfs."""
    best, kind = "", ""
    for line in text_of(Path("/proc/self/mountinfo")).splitlines():
        fields = line.split(" ")
        point = fields[4].replace("\\040", " ").rstrip("/")
        if f"{path}/".startswith(f"{point}/") and len(point) >= len(best):
            best, kind = point, fields[fields.index("-") + 1]
    return kind


def fuse() -> "dict":
    """Report whether /dev/fuse exists and is open to this user, by opening it."""
    device = Path("/dev/fuse")
    try:
        os.close(os.open(str(device), os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        return {"there": False}
    except OSError as error:
        mode = stat.S_IMODE(device.stat().st_mode)
        return {"there": True, "mode": f"{mode:04o}", "fault": error.strerror}
    return {"there": True, "open": True}


def programs() -> "dict":
    """Report the programs that start an image, and whether the kernel mounts squash files."""
    modules = Path("/lib/modules", os.uname().release)
    known = text_of(modules / "modules.dep") + text_of(modules / "modules.builtin")
    code, said = ask(["unsquashfs", "-version"])
    return {
        "squashfuse": shutil.which("squashfuse") or "",
        "fuse_overlayfs": shutil.which("fuse-overlayfs") or "",
        "unsquashfs": ""
        if code == 127
        else found_in(said, r"version (\d+\.\d+[\w.]*)") or "unknown",
        "kernel_squashfs": "\tsquashfs\n" in text_of(Path("/proc/filesystems"))
        or "/squashfs.ko" in known,
    }


def namespaces() -> "dict":
    """Report whether this user may make a user namespace and mount in it, by trying two ways.

    Even if AppArmor forbids them, enroot's package has a profile for its own program.
    """
    beside = shutil.which("enroot-nsenter")
    code, said = ask(["unshare", "--user", "--map-root-user", "--mount", "true"])
    values = {name: text_of(Path("/proc/sys", name.replace(".", "/"))).strip() for name in SWITCHES}
    numbers = [(name, int(value)) for name, value in values.items() if value.isdigit()]
    return {
        "works": code == 0,
        "enroot": bool(beside) and ask([beside, "--user", "--mount", "true"])[0] == 0,
        "fault": last_line(said) if code else "",
        "settings": [{"name": name, "value": value} for name, value in numbers],
    }


def pci(root: Path, vendor: str, **beginnings: str) -> int:
    """Count a vendor's cards whose files (device, class) begin with the given text."""
    cards = [
        one
        for one in matching(root / "sys/bus/pci/devices/*")
        if text_of(one / "vendor").strip() == vendor
    ]
    return sum(
        all(text_of(card / name).startswith(text) for name, text in beginnings.items())
        for card in cards
    )


def nvidia(root: Path = ROOT) -> "dict":
    """Report GPUs on the PCI bus, the driver's devices, and the tool for containers."""
    cards = pci(root, "0x10de", **{"class": "0x03"})
    devices = len(matching(root / "dev/nvidia[0-9]*"))
    searched = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # as enroot's hook does
    path = shutil.which("nvidia-container-cli", path=searched) or ""
    said = ask([path, "--version"])[1] if path and (cards or devices) else ""
    version = found_in(said, r"version:\s*(\d[\w.+~-]*)")
    return {"cards": cards, "devices": devices, "cli": path, "version": version}


def efa(root: Path = ROOT) -> "dict":
    """Report EFA cards on the PCI bus, with a driver, and as devices, and the node's libfabric."""
    adapters = matching(root / "sys/class/infiniband/*")
    driven = sum(text_of(one / "device/vendor").strip() == "0x1d0f" for one in adapters)
    cards = pci(root, "0x1d0f", device="0xefa")
    path = str(root / "opt/amazon/efa/bin/fi_info")
    path = path if os.access(path, os.X_OK) else shutil.which("fi_info") or ""
    said = ask([path, "--version"])[1] if path and (cards or driven) else ""
    return {
        "cards": cards,
        "driven": driven,
        "devices": len(matching(root / "dev/infiniband/uverbs*")),
        "adapters": len(adapters),
        "libfabric": found_in(said, r"libfabric:\s*(\d[\w.+~-]*)"),
    }


def needrestart(root: Path = ROOT) -> "dict":
    """Report how needrestart restarts daemons after library updates, and if Slurm's are exempt."""
    settings = root / "etc/needrestart"
    files = [settings / "needrestart.conf", *matching(settings / "conf.d/*.conf")]
    text = re.sub(r"(?m)^\s*#.*", "", "\n".join(text_of(one) for one in files))
    modes = re.findall(r"\$nrconf\{restart\}\s*=\s*['\"]?(\w)", text)
    hooks = [text_of(one) for one in matching(root / "etc/apt/apt.conf.d/*needrestart*")]
    return {
        "there": files[0].exists() or (root / "usr/sbin/needrestart").exists(),
        "mode": modes[-1] if modes else "",
        # Ubuntu's own mode, from 24.04 on: apt restarts daemons without asking.
        "ubuntu": any(re.search(r"(?m)^(?!\s*(?:#|//)).*-m u\b", hook) for hook in hooks),
        "exempt": bool(re.search(r"override_rc\}?\s*(=|\{)[^;]*slurm", text)),
    }


def marker(path: Path) -> "dict":
    """Report the digest of a file that was just made in a shared folder."""
    deadline = time.monotonic() + APPEARS
    while True:
        try:
            with path.open("rb") as file:
                return {"digest": hashlib.sha256(file.read(BLOCK)).hexdigest()}
        except OSError as error:
            if time.monotonic() > deadline:
                return {"fault": error.strerror}
        time.sleep(0.2)


def image(path: Path, seconds: float) -> "dict":
    """Report the digest of an image's first bytes, and how long they took to read."""
    digest, read, taken = hashlib.sha256(), 0, 0.0
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        while read < HEAD and taken < seconds:
            began = time.monotonic()
            block = file.read(min(BLOCK, HEAD - read))
            taken += time.monotonic() - began
            if not block:
                break
            digest.update(block)
            read += len(block)
    return {"size": size, "read": read, "seconds": taken, "digest": digest.hexdigest()}


if __name__ == "__main__":
    main(sys.argv[-1])
