"""The drafter's recorded steps against eager ones: a few milliseconds at start-up that find a graph
which this machine gets wrong."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.drafter import Drafter, Proposer
from sglang_dflash.drafting.groups import clear
from sglang_dflash.drafting.noise import SAMPLED, BlockNoise, SampledBlocks
from sglang_dflash.drafting.random_inputs import RandomInputs
from sglang_dflash.drafting.self_check import CONTEXT, REQUESTS, TOLERANCE, failed


def check_recording(
    eager: Drafter,
    recorded: Proposer,
    req_to_token: Tensor,
    sizes: Sequence[int] = (REQUESTS,),
    widths: Sequence[int] = (),
) -> None:
    """Compare recorded proposals, without noise and coupled, with eager ones, over context that
    both read. For an empty cache; it is empty again afterwards, and so are the rows of the table.

    Another token is no error where it is as likely to the eager draft as the one that it took, up
    to rounding: two products of one shape may still be computed by two algorithms.

    Args:
        sizes: of recorded batches. The one compared has such a size: rows of padding would change
            shapes, and a larger one would be run eagerly, and so be compared with itself.
        widths: tokens of blocks to compare beside the whole block.

    Raises:
        SelfCheckFailed: the drafted tokens differ.
    """
    draw, model = RandomInputs(eager.model), eager.model
    count = max((n for n in sizes if n <= REQUESTS), default=min(sizes))
    rows = torch.arange(1, count + 1, device=draw.device)
    entries = min(group.cache.num_entries for group in eager.groups)
    length = min(CONTEXT, req_to_token.shape[1] - eager.draft_block, entries // max(8, 2 * count))
    slots = 1 + torch.arange(len(rows) * length, device=draw.device)
    seq_lens, bonus = torch.full_like(rows, length), torch.zeros_like(rows)
    requests = RequestSlots(req_to_token, rows, seq_lens, req_to_token.shape[1])
    try:
        req_to_token[rows, :length] = slots.view(len(rows), length).to(req_to_token.dtype)
        hidden = draw.floats(len(slots), model.config.target_hidden_width)
        eager.absorb(hidden, torch.arange(length, device=draw.device).repeat(len(rows)), slots)
        hidden = eager.forward(bonus, requests)
        temperatures = torch.ones_like(rows, dtype=torch.float32)
        noise = BlockNoise(draw.ints(0, 2**62, count), temperatures, seq_lens)
        rules = ("", None), ("coupled ", noise)
        for width, (label, rule_noise) in product({*widths, eager.draft_block}, rules):
            blocks = recorded.propose(bonus, requests, rule_noise, width)
            if isinstance(blocks, SampledBlocks):
                blocks = blocks.tokens[SAMPLED]
            drafted, states = blocks[:, 1:], hidden[:, : blocks.shape[1]]
            shortfall = eager.head.shortfall(states, bonus, drafted, rule_noise).max().item()
            # A NaN fails: it is not below anything.
            if not shortfall <= TOLERANCE[draw.dtype]:
                check = f"recorded {label}proposal of {count} requests on {draw.device.type}"
                problem = f"it drafts tokens that are less likely by {shortfall:.3g} of the largest"
                raise failed(check, f"{problem} score ({TOLERANCE[draw.dtype]:g} is allowed)")
    finally:
        req_to_token[rows, :length] = 0
        clear(eager.groups)
        eager.counters.clear()
