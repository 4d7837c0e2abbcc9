"""Kernels on the target's logits, to be compiled (`compile_kernels`)."""

from __future__ import annotations

import triton
from dflash_kernels import candidates, penalize, sample_filtered, sample_whole

from sglang_dflash.checkpoint.heads.dflash2 import MOST_CANDIDATES
from tests.kernels.case import Case

PROPOSAL = "p_block", "p_is_drawn", "p_candidates", "p_scores"
HAS = "HAS_FREQUENCY", "HAS_PRESENCE", "HAS_REPETITION", "HAS_STOPS"
# The largest vocabulary that SGLang serves.
WIDTH = 2**18
BLOCK = 16


def target_cases() -> list[Case]:
    """Return the kernels of penalties and samples."""
    return [penalty_case(), *whole_cases(), *filter_cases()]


def penalty_case() -> Case:
    """Return the kernel of penalties. A turn of its loop is a position."""
    turns, types = BLOCK - 1, {"p_logits": "*fp32", **dict.fromkeys(HAS, "u1")}
    kernel, constants = penalize.penalize_kernel, {"BLOCK": penalize.BLOCK}
    logits = turns * penalize.BLOCK
    return Case("penalize", kernel, constants, types=types, logits=logits, turns=turns)


def whole_cases() -> list[Case]:
    """Return the kernels that sample from whole vocabularies."""
    found = []
    chunk = {"CHUNK": sample_whole.CHUNK, "BLOCK": sample_whole.BLOCK}
    chunk |= {"BLOCK_PARTS": triton.next_power_of_2(candidates.part_count(WIDTH))}
    parts = {"p_ids": "*i32", "p_out": "*i64"}
    turns = {"logits": sample_whole.CHUNK, "turns": sample_whole.CHUNK // sample_whole.BLOCK}
    # Parts of a vocabulary of 248,320.
    merge, options = {"BLOCK": 32}, {"num_warps": 1}
    for drawn in (False, True):
        shape = {**chunk, "HAS_PROPOSAL": drawn, "K": 16, "BLOCK_Q": 16}
        shape |= {} if drawn else dict.fromkeys((*PROPOSAL, "p_maxima", "p_sums"))
        kernel, name = sample_whole.sample_whole_kernel, f"sample_whole drawn={drawn}"
        # With a proposal there is a loop in the loop.
        found.append(Case(name, kernel, shape, types=parts, **({} if drawn else turns)))
    kernel = sample_whole.merge_samples_kernel
    found.append(Case("merge_samples", kernel, merge, types=parts, options=options))
    return found


def filter_cases() -> list[Case]:
    """Return the kernels that sample with filters."""
    k, filtered = MOST_CANDIDATES, []
    parts_size = {"BLOCK_PARTS": triton.next_power_of_2(candidates.part_count(WIDTH))}
    types = {"p_out": "*i64", "p_values": "*fp32", "p_logits": "*fp32", "p_top_ks": "*i32"}
    no_proposal = {"HAS_PROPOSAL": False, **dict.fromkeys(PROPOSAL)}
    top = {"TOP": k, "BLOCK_TOP": k}
    for name, constants, warps in (
        ("sample_candidates", top | no_proposal | {"K": 1, "BLOCK_Q": 1}, 1),
        ("sample_candidates drawn", top | {"HAS_PROPOSAL": True, "K": 16, "BLOCK_Q": 16}, 4),
        (f"sample_candidates drawn k{k}", top | {"HAS_PROPOSAL": True, "K": k, "BLOCK_Q": k}, 4),
        ("sample_others", {"BLOCK": sample_filtered.BLOCK}, 4),
    ):
        kernel = getattr(sample_filtered, f"{name.split()[0]}_kernel")
        options = {"num_warps": warps}
        filtered.append(
            Case(name, kernel, {**constants, **parts_size}, types=types, options=options)
        )
    return filtered
