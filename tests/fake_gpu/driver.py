"""A stub of the GPU's driver, `libcuda.so.1`, which libraries in SGLang's wheels want loaded."""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
import sysconfig
from pathlib import Path

SITE = Path(sysconfig.get_path("purelib"))
WHEELS = ("sgl_kernel/**/*.so", "deep_gemm/**/*.so")
FOLDER = Path.home() / ".cache/sglang-dflash/fake_gpu"
# Symbols of these libraries begin alike, and are not the driver's.
OTHERS = re.compile(r"cu(da[A-Z]|blas|fft|rand|sparse|solver|dnn|pti)")
NO_DEVICE = 100


def load_stub() -> None:
    """Load it before anything asks for the real one; made once per set of wheels.

    Raises:
        subprocess.CalledProcessError, FileNotFoundError: no C compiler.
    """
    libraries = sorted(path for pattern in WHEELS for path in SITE.glob(pattern))
    wheels = ";".join(f"{path.name} {path.stat().st_size}" for path in libraries)
    stub = FOLDER / hashlib.sha256(wheels.encode()).hexdigest()[:16] / "libcuda.so.1"
    if not stub.exists():
        make_stub(libraries, stub)
    ctypes.CDLL(str(stub), mode=ctypes.RTLD_GLOBAL)


def make_stub(libraries: list[Path], stub: Path) -> None:
    """A library whose functions all return CUDA_ERROR_NO_DEVICE."""
    names: set[str] = set()
    for library in libraries:
        command = ["nm", "-D", "--undefined-only", str(library)]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        names |= set(re.findall(r" U (cu[A-Z]\w+)$", listed, re.MULTILINE))
    stub.parent.mkdir(parents=True, exist_ok=True)
    source = "".join(
        f"int {name}(void) {{ return {NO_DEVICE}; }}\n"
        for name in sorted(names)
        if not OTHERS.match(name)
    )
    flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-"]
    unfinished = stub.with_suffix(".unfinished")
    subprocess.run(["cc", *flags, "-o", str(unfinished)], input=source, text=True, check=True)
    unfinished.rename(stub)
