"""Operations on the target's logits, for the check at start-up (`self_check`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_dflash.drafting.noise import REDRAWING, BlockNoise, Proposal, SampleFilters
from sglang_dflash.drafting.ops import TorchOps
from sglang_dflash.drafting.penalties import Penalties, Penalty, Stops
from sglang_dflash.drafting.random_inputs import Case, RandomInputs


def penalties(draw: RandomInputs, seq_lens: Tensor) -> Case:
    """Penalties of all kinds, of a request that has none of them, too. They are of `seq_lens`
    requests, and drafts repeat each other."""
    requests, width = len(seq_lens), 4096
    logits, wrote = draw.floats(requests, 4, width).float(), draw.ints(0, 2, requests, width) > 0
    block = draw.ints(0, 2, requests, 4)
    has_some = (torch.arange(requests, device=draw.device) > 0)[:, None]

    def penalty(value: float, neutral: float) -> Penalty:
        per_token = torch.where(has_some, value, neutral)
        return Penalty(per_token.where(wrote, neutral), per_token)

    ends = torch.where(torch.arange(width, device=draw.device) < 9, -torch.inf, 0.0)
    stops = Stops(ends.repeat(requests, 1), 3 * has_some.int(), torch.zeros_like(has_some).int())
    every = Penalties(penalty(0.3, 0.0), penalty(1.5, 0.0), penalty(1.2, 1.0), stops)

    def run(ops: TorchOps) -> Sequence[Tensor]:
        penalized = logits.clone()
        ops.penalize(penalized, block, every)
        is_forbidden = penalized == -torch.inf
        return is_forbidden, penalized.masked_fill(is_forbidden, 0.0)

    return run


def samples(draw: RandomInputs, seq_lens: Tensor) -> Case:
    """Samples of a greedy request, of one whose draft is accepted, and of one whose draft is
    rejected; without a proposal, too. Few tokens are kept, many, and all."""
    requests = len(seq_lens)
    logits = draw.floats(requests * 2, 4096)
    logits[:, 0] = -100
    temperatures = torch.tensor([0.0, 0.7, 1.0], device=draw.device)
    noise = BlockNoise(draw.ints(0, 2**62, requests), temperatures, seq_lens)
    candidates = torch.stack((logits[::2].argmax(-1), torch.zeros_like(seq_lens)), 1)
    # The likeliest token is likelier than its draft has it, and the other one impossible.
    scores = torch.tensor([-9.0, 0.0], device=draw.device).expand(requests, 1, 2).contiguous()
    drafts = candidates[torch.arange(requests), torch.tensor([0, 0, 1])]
    block, ids = torch.stack((drafts, drafts), 1), torch.arange(4096, device=draw.device)
    drawn = Proposal(block, temperatures > 0, candidates[:, None], scores)

    def scores_of_samples(
        ops: TorchOps, filters: SampleFilters | None, proposal: Proposal | None
    ) -> Tensor:
        # A wrong kernel may return any number.
        tokens = ops.sample(logits, noise, filters, proposal).clamp(0, 4095).view(requests, 2, 1)
        of_noise = [
            noise._replace(seeds=noise.seeds ^ other).scores(logits.view(requests, 2, -1), ids)
            for other in (0, REDRAWING)
        ]
        samples, redrawn = (scores.gather(2, tokens)[..., 0] for scores in of_noise)
        if proposal is not None:
            samples[1, 0] = (tokens[1, 0, 0] == drafts[1]).float()
            samples[2, 0] = redrawn[2, 0]
            # Behind a rejected draft any tokens may be returned.
            samples[2, 1] = 0
        return samples

    def run(ops: TorchOps) -> Sequence[Tensor]:
        kinds: list[SampleFilters | None] = [None]
        for top_k, *shares in ((20, 0.9, 0.01), (4096, 0.9, 0.01), (4096, 1.0, 0.0)):
            top_ks = torch.where(temperatures > 0, top_k, 1).int()
            top_ps, min_ps = (torch.full_like(temperatures, share) for share in shares)
            kinds.append(SampleFilters(top_ks, top_ps, min_ps))
        return [
            scores_of_samples(ops, filters, proposal)
            for filters in kinds
            # With many tokens kept, how the draft was made does not matter.
            for proposal in ((None,) if filters is kinds[2] else (None, drawn))
        ]

    return run
