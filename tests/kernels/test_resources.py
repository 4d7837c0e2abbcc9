"""All kernels, compiled for the GPU generations that SGLang serves, at all published shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.kernel_traffic import READS_LOGITS
from experiments.traffic import INSTRUCTIONS_PER_BYTE
from sglang_dflash.serving.gpu.backends import FP8_CAPABILITY
from tests.kernels import compile_kernels
from tests.kernels.instructions import executed
from tests.kernels.support import run

TABLE = json.loads(Path(__file__).with_name("registers.json").read_text())
# Bytes of shared memory per program. GPUs of capability 8.6 and 8.9 run what is compiled for 8.0.
SHARED = {"80": 101376, "90": 232448, "100": 232448, "120": 101376}
# Float32 queries are multiplied without tensor cores. They are for checks, and may spill.
MAY_SPILL = "block_attention fp32-fp32"
# Bytes that a launch moves for a logit: the target's have 4, and penalties read and write them.
LOGIT_BYTES = {"largest_of_chunks sums=True": 4, "penalize": 8}


def test_a_server_launches_every_kernel_and_compiles_none_while_it_serves() -> None:
    """After its start none is compiled for batches and prompts of any size."""
    # Replay is SGLang's.
    pytest.importorskip("sglang")
    found = json.loads(run("-m", "tests.kernels.served_launches"))
    assert found["launched"] == found["kernels"]
    assert found["late"] == []
    # With splits and without, and their merge: each takes seconds, on every rank at once.
    assert found["attention"] and set(found["attention"].values()) <= {1, 2, 3}


def test_what_pythonpath_has_is_found_in_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_pythonpath.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run("-c", "import of_pythonpath, tests, dflash_kernels; print(1)") == "1\n"


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


def test_reading_logits_takes_longer_than_computing() -> None:
    """An H100 issues some 17 instructions while it reads a logit of 2 bytes. Noise takes more,
    which a greedy request does not compute."""
    read = {name: of for name, of in TABLE.items() if compile_kernels.cases()[name].logits}
    of_kernels = {compile_kernels.cases()[name].kernel.fn.__name__ for name in read}
    in_the_time = 2 * INSTRUCTIONS_PER_BYTE
    assert of_kernels | {"sample_whole_kernel"} == set(READS_LOGITS)
    for name, row in read.items():
        time = LOGIT_BYTES.get(name, 2) * INSTRUCTIONS_PER_BYTE
        for capability, used in row.items():
            assert used["at_least"] <= time, (name, capability)
            is_noisy = name.startswith("sample_whole")
            assert used["at_most"] <= (120 if is_noisy else time), (name, capability)
    # One after the other.
    both = (
        read[name]["90"]["at_most"]
        for name in ("largest_of_chunks sums=False", "candidates 262144 k16")
    )
    assert sum(both) <= in_the_time


SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA 0x40 ;
        /*0020*/                   MOV R2, RZ ;
        /*0030*/                   MOV R3, RZ ;
        /*0040*/                   IADD3 R1, R1, 0x1, RZ ;
        /*0050*/               @P1 BRA 0x70 ;
        /*0060*/                   MUFU.LG2 R2, R3 ;
        /*0070*/               @P2 BRA 0x40 ;
        /*0080*/               @P3 EXIT ;
        /*0090*/                   STG.E [R2], R3 ;
        /*00a0*/                   EXIT ;
        /*00b0*/                   BRA 0xb0;
        /*00c0*/                   NOP;
"""


def test_instructions_are_counted_along_the_ways_through_a_kernel() -> None:
    """A part that may be left out, a loop with such a part, and an end for some threads."""
    assert executed(SASS, turns=10) == (2 + 3 * 10 + 3, 4 + 4 * 10 + 3)
    with pytest.raises(ValueError, match="2 loops"):
        executed(SASS.replace("@P3 EXIT", "@P3 BRA 0x40"))


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


STAGES = """
import json, sys
from dataclasses import replace
from tests.kernels.compile_kernels import cases, resources
for name, case in cases().items():
    if name.startswith("block_attention bf16-bf16") and case.options["num_stages"] == 3:
        two = replace(case, options={**case.options, "num_stages": 2})
        print(json.dumps([name, *(resources(each, int(sys.argv[1])) for each in (two, case))]))
"""


@pytest.mark.compile
@pytest.mark.parametrize("capability", SHARED)
def test_a_third_stage_leaves_as_many_programs_on_a_multiprocessor(capability: str) -> None:
    """Programs have 4 warps each. The third stage reads entry numbers ahead, and no more K/V."""

    def programs(used: dict[str, int]) -> int:
        registers = -(-used["registers"] // 8) * 8
        return min(65536 // (registers * 4 * 32), SHARED[capability] // (used["shared"] + 1024))

    rows = [json.loads(line) for line in run("-c", STAGES, capability).splitlines()]
    assert rows
    for name, two, three in rows:
        assert programs(three) >= programs(two), name
        assert three["shared"] <= two["shared"] + 1024, name


E4M3 = """
import sys
from tests.kernels.compile_kernels import cases, resources
every = cases()
attention = "block_attention bf16-fp8e4nv b16 g4 d128 full-0 split"
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
