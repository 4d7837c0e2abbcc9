"""Penalties at the positions of a drafted block, in one launch. Names as in `gated_delta_fold`.

Letters in shapes: R requests; W positions of a step; V tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.traffic import Traffic
from sglang_dflash.drafting.penalties import Penalties

# Columns of a program.
BLOCK = 1024


# Batches with any kinds of penalties share a compilation, and so do blocks of any width. SGLang's
# table of stop tokens has rows of another stride until a batch is filtered.
@triton.jit(
    do_not_specialize=[
        "p_block", "p_frequency", "p_presence", "p_repetition", "p_stops", "p_least", "p_outputs",
        "s_block", "s_stops", "W",
    ]
)  # fmt: skip
def penalize_kernel(
    p_logits, p_block, p_counted, p_frequency, HAS_FREQUENCY, p_present, p_presence, HAS_PRESENCE,
    p_factors, p_repetition, HAS_REPETITION, p_stops, p_least, p_outputs, HAS_STOPS, s_logits,
    s_block, s_stops, V, W, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per request and BLOCK columns. It reads a penalty's table once, and nothing of
    what is neutral for its request."""
    i_r, i_v = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_frequency = tl.load(p_frequency + i_r, mask=HAS_FREQUENCY, other=0.0)
    i_presence = tl.load(p_presence + i_r, mask=HAS_PRESENCE, other=0.0)
    i_repetition = tl.load(p_repetition + i_r, mask=HAS_REPETITION, other=1.0)
    i_missing = tl.load(p_least + i_r, mask=HAS_STOPS, other=0)
    i_missing -= tl.load(p_outputs + i_r, mask=HAS_STOPS, other=0)
    is_frequency, is_presence = i_frequency != 0.0, i_presence != 0.0
    is_repetition, is_held = i_repetition != 1.0, i_missing > 1
    if is_frequency | is_presence | is_repetition | is_held:
        o_v = i_v * BLOCK + tl.arange(0, BLOCK)
        m_v, o_table = o_v < V, i_r * V + o_v
        b_counted, b_present = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        b_factors, b_stops = tl.full((BLOCK,), 1.0, tl.float32), tl.zeros((BLOCK,), tl.float32)
        if is_frequency:
            b_counted = tl.load(p_counted + o_table, mask=m_v)
        if is_presence:
            b_present = tl.load(p_present + o_table, mask=m_v)
        if is_repetition:
            b_factors = tl.load(p_factors + o_table, mask=m_v, other=1.0)
        if is_held:
            b_stops = tl.load(p_stops + i_r * s_stops + o_v, mask=m_v)
        for i_w in range(1, W):
            b_is_draft = o_v == tl.load(p_block + i_r * s_block + i_w).to(tl.int32)
            b_counted = tl.where(b_is_draft, b_counted + i_frequency, b_counted)
            b_present = tl.where(b_is_draft, i_presence, b_present)
            b_factors = tl.where(b_is_draft, i_repetition, b_factors)
            p_after = p_logits + (i_r * W + i_w) * s_logits + o_v
            b_after = tl.load(p_after, mask=m_v).to(tl.float32) - (b_counted + b_present)
            # Rounded where torch rounds.
            b_after = b_after.to(p_logits.dtype.element_ty).to(tl.float32)
            if i_missing > i_w:
                b_after += b_stops
            if is_repetition:
                b_scaled = tl.div_rn(b_after, b_factors)
                b_after = tl.where(b_after < 0, b_after * b_factors, b_scaled)
            tl.store(p_after, b_after.to(p_logits.dtype.element_ty), mask=m_v)


def penalize(logits: Tensor, block: Tensor, penalties: Penalties) -> None:
    """See its twin, `drafting.penalties.penalize`, whose arguments these are. Requests without
    penalties keep their logits, to the bit.

    Raises:
        ValueError: a table of penalties so far is not contiguous.
    """
    requests, positions, width = logits.shape
    for name, penalty in zip(penalties._fields[:3], penalties[:3], strict=True):
        if penalty is not None and not penalty.so_far.is_contiguous():
            raise ValueError(f"{name}: strides {penalty.so_far.stride()}; dense rows are required")
    if not requests or positions < 2:
        return
    # Stands for tensors that are not read.
    nothing = torch.empty(1, dtype=torch.float32, device=logits.device)
    counts, stops = nothing.view(torch.int32), penalties.stops
    tables: list[Any] = []
    for penalty in penalties[:3]:
        tables += (*(penalty or (nothing, nothing)), penalty is not None)
    penalize_kernel[(requests, triton.cdiv(width, BLOCK))](
        logits.view(-1, width), block, *tables, *(stops or (nothing, counts, counts)),
        stops is not None, logits.stride(1), block.stride(0),
        0 if stops is None else stops.penalties.stride(0), width, positions, BLOCK=BLOCK,
    )  # fmt: skip


def traffic(
    shape: tuple[int, ...], itemsize: int, kinds: Sequence[bool], tables: Sequence[int]
) -> Traffic:
    """Bytes of one launch.

    Args:
        shape: of the logits, `[R, W, V]`.
        itemsize: bytes of one of them.
        kinds: of `Penalties`, whether any request has them.
        tables: of each request, how many kinds it has.
    """
    _, positions, width = shape
    programs, penalized = triton.cdiv(width, BLOCK), sum(count > 0 for count in tables)
    after = penalized * (positions - 1)
    of_request = sum(size for size, has in zip((4, 4, 4, 8), kinds, strict=True) if has)
    read = programs * (len(tables) * of_request + 8 * after) + 4 * width * sum(tables)
    return Traffic(read + after * width * itemsize, after * width * itemsize)
