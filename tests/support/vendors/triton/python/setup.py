"""A stand-in for Triton 2.2.0's setup.py that looks for everything where the real one does."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

for program in ("ptxas", "cuobjdump", "nvdisasm"):
    said = subprocess.check_output([f"triton/third_party/cuda/bin/{program}", "--version"])
    assert said == b"V12.3.52\n", said
llvm, pybind11 = (Path(os.environ[f"{one}_SYSPATH"]) for one in ("LLVM", "PYBIND11"))
assert (llvm / "include/llvm/Config.h").is_file()
assert (llvm / "lib/cmake/mlir/MLIRConfig.cmake").is_file()
assert (pybind11 / "include/pybind11/pybind11.h").is_file()
assert os.environ["HOME"] == "/build/home"
assert int(os.environ["MAX_JOBS"]) > 0
subprocess.check_call([sys.executable, "../offline.py", "triton"])

work = Path("build/cmake")
work.mkdir(parents=True, exist_ok=True)
assert b"cmake version" in subprocess.check_output(["cmake", "--version"])
subprocess.check_call(
    ["cmake", Path("..").resolve(), "-G", "Unix Makefiles", "-DCMAKE_MAKE_PROGRAM=/bin/true"],
    cwd=work,
)
subprocess.check_call(["cmake", "--build", ".", "-j1"], cwd=work)
assert (work / "googletest.txt").read_text() == "/tmp/googletest"

assert sys.argv[1:3] == ["bdist_wheel", "--dist-dir"]
FACTS = "triton-2.2.0.dist-info"
with zipfile.ZipFile(Path(sys.argv[3], "triton-2.2.0-py3-none-any.whl"), "w") as wheel:
    for path in Path("triton").rglob("*.py"):
        wheel.write(path)
    wheel.writestr(f"{FACTS}/METADATA", "Metadata-Version: 2.1\nName: triton\nVersion: 2.2.0\n")
    wheel.writestr(
        f"{FACTS}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    names = [*wheel.namelist(), f"{FACTS}/RECORD"]
    wheel.writestr(f"{FACTS}/RECORD", "".join(f"{name},,\n" for name in names))
