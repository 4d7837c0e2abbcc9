"""The entries of a step's `ContextTable`: one launch for all layers of a group.

Letters in shapes: R requests, C table columns. Names as in `gated_delta_fold`.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from dflash_kernels.traffic import Traffic
from sglang_dflash.checkpoint.draft_config import Reach
from sglang_dflash.drafting.kv import Tags

BLOCK = 256


@triton.jit
def context_table_kernel(
    p_entries, p_req_to_token, p_rows, p_seq_lens, p_entry_of, p_owner, p_in_use,
    s_entries_r, s_entries_c, s_req_to_token_r, C, LIMIT, SINKS, POSITIONS,
    HAS_TAGS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per request and BLOCK columns. A request uses LIMIT columns at most."""
    i_r = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i_len = tl.load(p_seq_lens + i_r).to(tl.int32)
    i_used = tl.minimum(i_len, LIMIT)
    # The sinks, then the newest tokens, as in `context_positions`.
    o_position = tl.where(o_c < SINKS, o_c, o_c + i_len - i_used)
    m_c = (o_c < i_used) & (o_position < POSITIONS)
    p_row = p_req_to_token + tl.load(p_rows + i_r).to(tl.int64) * s_req_to_token_r
    b_slot = tl.load(p_row + o_position, mask=m_c, other=-1)
    b_entry = b_slot
    if HAS_TAGS:
        b_entry = tl.load(p_entry_of + b_slot, mask=m_c, other=0)
        b_owner = tl.load(p_owner + b_entry, mask=m_c, other=-1)
        m_live = m_c & (b_owner == b_slot)
        tl.store(p_in_use + b_entry, m_live, mask=m_live)
        b_entry = tl.where(m_live, b_entry, -1)
    tl.store(p_entries + i_r * s_entries_r + o_c * s_entries_c, b_entry.to(tl.int32), mask=o_c < C)


def context_table(
    entries: Tensor,
    req_to_token: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    reach: Reach,
    tags: Tags | None,
) -> None:
    """See its twin, `drafting.attention.table.fill_context_table`, whose arguments these are.
    `req_to_token` is not read past a request's tokens, nor is the row of a request of length 0.

    Raises:
        ValueError: `req_to_token` is not contiguous along positions.
    """
    if req_to_token.stride(1) != 1:
        raise ValueError(f"req_to_token: strides {req_to_token.stride()}; unit stride is required")
    requests, columns = entries.shape
    if tags is not None:
        tags.in_use.zero_()
    if not entries.numel():
        return
    entry_of, owner, in_use = tags or (entries, entries, entries)
    context_table_kernel[(requests, triton.cdiv(columns, BLOCK))](
        entries, req_to_token, rows, seq_lens, entry_of, owner, in_use,
        *entries.stride(), req_to_token.stride(0),
        columns, reach.tokens_read(columns), reach.sinks, req_to_token.shape[1],
        HAS_TAGS=tags is not None, BLOCK=BLOCK,
    )  # fmt: skip


def traffic(
    columns: int, seq_lens: Sequence[int], reach: Reach, has_tags: bool, dead: int = 0
) -> Traffic:
    """Bytes of one launch, with int64 `rows` and `seq_lens`. Clearing `in_use` is not counted.

    Args:
        columns: C.
        seq_lens: committed tokens of the requests.
        has_tags: whether the cache has tags.
        dead: tokens in sight whose K/V is dead, over all requests.
    """
    programs = len(seq_lens) * triton.cdiv(columns, BLOCK)
    in_sight = sum(min(n, reach.tokens_read(columns)) for n in seq_lens)
    per_column = 12 if has_tags else 4
    return Traffic(
        read_bytes=programs * 16 + in_sight * per_column,
        written_bytes=len(seq_lens) * columns * 4 + (in_sight - dead if has_tags else 0),
    )
