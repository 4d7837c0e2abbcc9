"""Compile the fold kernel for GPUs that need not be here, and print its resources line by line.

    python -m tests.kernels.compile_fold CAPABILITY...

A process of its own, because TRITON_INTERPRET must not be set when the kernel is defined.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from dflash_kernels.gated_delta_fold import BLOCK_V, fold_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Qwen3.5-27B's heads, without a convolution bias.
CONSTANTS = {"H": 16, "HV": 48, "K": 128, "V": 128, "W": 4, "BLOCK_K": 128, "HAS_BIAS": False}
POINTERS = {
    "p_states": "*fp32",
    "p_rows": "*i64",
    "p_source": "*i64",
    "p_target": "*i64",
    "p_lengths": "*i64",
    "p_a_log": "*fp32",
}


def resources(capability: int) -> str:
    """A line of `REG:n STACK:n ...` for the kernel on compute capability `capability`."""
    kernel = fold_kernel.fn
    constants = {**CONSTANTS, "BLOCK_V": BLOCK_V, "p_bias": None}
    signature: dict[str, str] = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name.startswith("p_"):
            signature[name] = POINTERS.get(name, "*bf16")
        else:
            signature[name] = {"EPS": "fp32", "C": "i32"}.get(name, "i64")
    source = ASTSource(kernel, signature, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return next(line.strip() for line in out.splitlines() if "REG:" in line)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(resources(int(argument)))
