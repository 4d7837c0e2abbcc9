"""The kernels on the target's logits, as they are launched for the largest vocabulary that SGLang
serves."""

from __future__ import annotations

import triton
from dflash_kernels import candidates, penalize, sample_filtered, sample_whole

from sglang_dflash.checkpoint.heads.dflash2 import MOST_CANDIDATES
from tests.kernels.case import Case

WIDTH = 2**18
PROPOSAL = "p_block", "p_is_drawn", "p_candidates", "p_scores"
PARTS = {"BLOCK_PARTS": triton.next_power_of_2(candidates.part_count(WIDTH))}
SPLITS = {"BLOCK_SPLITS": triton.next_power_of_2(triton.cdiv(WIDTH, sample_whole.CHUNK))}
TYPES = {"p_out": "*i64", "p_values": "*fp32", "p_top_ks": "*i32", "p_ranks": "*i32",
         "p_likelier": "*fp32"}  # fmt: skip
DRAWN = {"K": 16, "BLOCK_Q": 16}
ONE_WARP = {"num_warps": 1}
HAS = "HAS_FREQUENCY", "HAS_PRESENCE", "HAS_REPETITION", "HAS_STOPS"
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
    """Return the kernels that sample from whole rows: of logits, of rows of which some are decided,
    and after drafts that were drawn."""
    columns = {"CHUNK": sample_whole.CHUNK, "BLOCK": sample_whole.BLOCK}
    types = {**TYPES, "p_ids": "*i32"}
    turns = {"logits": sample_whole.CHUNK, "turns": sample_whole.CHUNK // sample_whole.BLOCK}
    found = []
    for drawn, states in ((False, False), (False, True), (True, True)):
        shape = {**columns, **PARTS, **DRAWN, "HAS_PROPOSAL": drawn, "HAS_STATES": states}
        if not drawn:
            shape |= {"K": 1, "BLOCK_Q": 1, **dict.fromkeys((*PROPOSAL, "p_maxima", "p_sums"))}
        shape |= {} if states else {"p_out": None}
        name = f"sample_whole drawn={drawn}{' filtered' * (states and not drawn)}"
        # With a proposal there is a loop in the loop.
        own = {} if drawn else turns
        found.append(Case(name, sample_whole.sample_whole_kernel, shape, types=types, **own))
    for name, shape in (("judge_drafts", {**DRAWN, **PARTS}), ("merge_samples", SPLITS)):
        kernel = getattr(sample_whole, f"{name}_kernel")
        found.append(Case(name, kernel, shape, types=types, options=ONE_WARP))
    return found


def filter_cases() -> list[Case]:
    """Return the kernels that sample with filters."""
    k = MOST_CANDIDATES
    top = {"TOP": k, "BLOCK_TOP": k, "HAS_PROPOSAL": True}
    no_proposal = {"HAS_PROPOSAL": False, **dict.fromkeys(PROPOSAL), "K": 1, "BLOCK_Q": 1}
    chunk = {"BLOCK": sample_filtered.BLOCK, "CHUNK": sample_filtered.CHUNK}
    row = {"BLOCK": sample_filtered.WIDE_BLOCK}
    found = []
    for name, constants, warps in (
        ("sample_candidates", top | no_proposal, 1),
        ("sample_candidates drawn", top | DRAWN, 4),
        (f"sample_candidates drawn k{k}", top | {"K": k, "BLOCK_Q": k}, 4),
        ("rank_samples", chunk | SPLITS, 4),
        ("sample_others", row | SPLITS, 16),
    ):
        kernel = getattr(sample_filtered, f"{name.split()[0]}_kernel")
        ids = {} if name.startswith("sample_candidates") else {"p_ids": "*i32"}
        types = {**TYPES, **ids, "p_logits": "*fp32"}
        options = {"num_warps": warps}
        found.append(Case(name, kernel, constants | PARTS, types=types, options=options))
    return found
