"""A kernel as it is launched, for compiling it without a launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Pointers that are neither to floats nor to int64.
INT32 = {"p_entries", "p_req_to_token", "p_entry_of", "p_owner", "p_texts", "p_least", "p_outputs"}
BOOL = {"p_in_use", "p_taken", "p_looks_up", "p_is_drawn", "p_live"}
INT64 = {"p_rows", "p_seq_lens", "p_positions", "p_ids", "p_bonus", "p_block", "p_before",
         "p_after", "p_target", "p_lengths", "p_checkpoints", "p_steps", "p_seeds", "p_tokens",
         "p_keys", "p_columns", "p_matches", "p_drafted", "p_followed", "p_classes",
         "p_class_of_length", "p_counts", "p_candidates", "p_likeliest"}  # fmt: skip
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8e4nv": 1}
FLOAT32 = {"p_best", "p_temperatures", "p_partial", "p_lse", "p_frequencies", "p_states", "p_a_log",
           "p_totals", "p_maxima", "p_sums", "p_top_ps", "p_min_ps", "p_scores", "p_counted",
           "p_frequency", "p_present", "p_presence", "p_factors", "p_repetition",
           "p_stops"}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A kernel with the constants of a launch.

    Attributes:
        types: Triton types of arguments, by name, where they are not the usual ones.
        dtype: of pointers to floats.
        options: of the compiler.
        since: the first capability that can compile it.
        logits: that one program is for; 0 if it reads none.
        turns: of its loop.
    """

    name: str
    kernel: Any
    constants: Mapping[str, Any]
    types: Mapping[str, str] = field(default_factory=dict)
    dtype: str = "bf16"
    options: Mapping[str, int] = field(default_factory=dict)
    since: int = 80
    logits: int = 0
    turns: int = 1


def pointer(name: str, dtype: str) -> str:
    for names, kind in ((INT32, "i32"), (BOOL, "i1"), (INT64, "i64"), (FLOAT32, "fp32")):
        if name in names:
            return f"*{kind}"
    return f"*{dtype}"
