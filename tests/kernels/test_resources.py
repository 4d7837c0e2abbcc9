"""All kernels, compiled for the GPU generations that SGLang serves, at all published shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_dflash.serving.gpu.backends import FP8_CAPABILITY
from tests.kernels import compile_kernels
from tests.kernels.support import run

TABLE = json.loads(Path(__file__).with_name("registers.json").read_text())
# Bytes of shared memory per program. GPUs of capability 8.6 and 8.9 run what is compiled for 8.0.
SHARED = {"80": 101376, "90": 232448, "100": 232448, "120": 101376}
# Float32 queries are multiplied without tensor cores. They are for checks, and may spill.
MAY_SPILL = "block_attention fp32-fp32"


def test_a_server_launches_every_kernel_and_compiles_none_while_it_serves() -> None:
    """After its start: for batches and prompts of any size."""
    found = json.loads(run("-m", "tests.kernels.served_launches"))
    assert found["launched"] == found["kernels"]
    assert found["late"] == []


def test_the_table_has_every_published_shape() -> None:
    assert set(TABLE) == set(compile_kernels.cases())


def test_the_table_allows_every_generation() -> None:
    """Nothing spills, and shared memory fits."""
    for name, row in TABLE.items():
        assert set(row) in ({"80", "90", "100", "120"}, {"90", "100", "120"}), name
        assert ("80" in row) == ("fp8e4nv" not in name), name
        for capability, used in row.items():
            assert used["shared"] <= SHARED[capability], (name, capability)
            assert used["registers"] <= 255, (name, capability)
            # Sixteen warps of a fold share a multiprocessor.
            assert used["registers"] <= 128 or name != "gated_delta_fold", capability
            assert not used["spilled"] or name.startswith(MAY_SPILL), (name, capability)


@pytest.mark.compile
@pytest.mark.parametrize("capability", SHARED)
def test_compiled_kernels_are_those_of_the_table(capability: str) -> None:
    """If a kernel, a published shape or Triton changed: look at what changed, and write the table
    by `python -m tests.kernels.compile_kernels --write`."""
    expected = {
        name: {capability: row[capability]} for name, row in TABLE.items() if capability in row
    }
    found = json.loads(run("-m", "tests.kernels.compile_kernels", capability))
    assert {name: row for name, row in found.items() if row} == expected


E4M3 = """
import sys
from tests.kernels.compile_kernels import cases, resources
every = cases()
attention = "block_attention bf16-fp8e4nv b16 g4 d128 full-0 splits8"
for name in (attention, "write_context fp8e4nv g8 d128"):
    try:
        print(resources(every[name], int(sys.argv[1]))["spilled"])
    except Exception as error:
        print("fp8e4nv not supported in this architecture" in str(error))
"""


@pytest.mark.compile
@pytest.mark.parametrize(("capability", "printed"), [(80, "True"), (86, "True"), (89, "0")])
def test_e4m3_compiles_where_it_is_served(capability: int, printed: str) -> None:
    """Draft K/V of that dtype is refused before `FP8_CAPABILITY`."""
    assert (capability >= 10 * FP8_CAPABILITY[0] + FP8_CAPABILITY[1]) == (printed == "0")
    assert run("-c", E4M3, str(capability)).split() == [printed] * 2
