"""The drafter against the dense reference: hidden states and drafted tokens, for every way of
limiting what it sees."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.drafter import Drafter
from sglang_dflash.drafting.heads.head import TargetHead
from sglang_dflash.drafting.noise import BlockNoise, SampledBlocks, likeliest
from sglang_dflash.drafting.options import Options
from sglang_dflash.drafting.weights import load_model, read_tensors, save_model
from tests.conftest import kv_groups, random_model, raw_config, with_own
from tests.drafting.reference import draft_block

SLIDING = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 6,
}


@dataclass(frozen=True)
class Case:
    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    window: int | None = None
    sinks: int = 0
    block: int | None = None


CASES = [
    Case("plain"),
    Case("window", window=7),
    Case("window-and-sinks", window=7, sinks=2),
    Case("window-longer-than-everything", window=500, sinks=3),
    Case("sliding-layers", SLIDING),
    Case("sliding-layers-under-a-window", SLIDING, window=5),
    Case("sliding-but-not-causal", {**SLIDING, "is_causal": False}),
    Case("sliding-narrower-than-the-block", {**SLIDING, "sliding_window": 2}),
    Case("causal-full-layers", {"is_causal": True}),
    Case("causal-by-vllms-key", {**SLIDING, **with_own(causal=False)}),
    Case("causal-by-jetspecs-key", with_own(causal_head=True)),
    Case("use-swa", with_own(use_swa=True, swa_window_size=6), window=9),
    Case("draft-vocabulary", {"draft_vocab_size": 24}),
    Case("attention-bias", {"attention_bias": True}),
    Case("wider-block-than-trained", block=6),
    Case("one-kv-head", {"num_key_value_heads": 1}),
]
SELECTOR = {"selector_rank": 8, "selector_top_k": 5}
CONVOLUTION = {"conv_kernel_size": 3, "conv_group_size": 8}
CASES += [
    Case("selector", with_own(**SELECTOR)),
    Case("convolution", {**SLIDING, **with_own(**CONVOLUTION)}, window=9),
    Case("dflash2", {"attention_bias": True, **with_own(**SELECTOR, **CONVOLUTION)}, block=6),
]
LENGTHS = [1, 23, 9, 4, 14]


class Requests:
    """Ragged requests in scattered, interleaved slots of a target pool."""

    def __init__(self, count: int, width: int, hidden: int) -> None:
        self.lengths = LENGTHS[:count]
        self.hidden = [torch.randn(n, hidden) for n in self.lengths]
        pool = torch.randperm(count * width)
        self.table = pool.view(count, width)
        self.pool_size = count * width

    def absorb_in_pieces(self, drafter: Drafter) -> None:
        """Feed all tokens in interleaved small pieces, with rejected tokens between them."""
        left = [0] * len(self.lengths)
        while any(a < n for a, n in zip(left, self.lengths, strict=True)):
            for r, n in enumerate(self.lengths):
                take = min(int(torch.randint(1, 6, ())), n - left[r])
                positions = torch.arange(left[r], left[r] + take + 2)
                rejected = torch.randn(2, self.hidden[r].shape[1])
                hidden = torch.cat([self.hidden[r][left[r] : left[r] + take], rejected])
                committed = torch.arange(take + 2) < take
                drafter.absorb(hidden, positions, self.table[r, positions], committed)
                left[r] += take


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_blocks_match_the_dense_reference(case: Case, count: int, tmp_path: Any) -> None:
    raw = raw_config(**case.changes)
    save_model(random_model(raw), raw, tmp_path, torch.float32)
    model, tensors, embed = (
        load_model(tmp_path, dtype=torch.float32),
        read_tensors(tmp_path),
        torch.randn(64, 32),
    )
    options = Options(verify_block=case.block, window=case.window, sinks=case.sinks).resolve(
        model.config
    )
    requests = Requests(count, width=40, hidden=model.config.target_hidden_width)
    groups = kv_groups(model, options, requests.pool_size, 4 * requests.pool_size)
    for group in groups:
        # Poison: an entry that was never written must never be read.
        group.cache.kv.fill_(float("nan"))
        group.cache.kv[-1] = 0
    head = TargetHead(lambda ids: embed[ids], lambda hidden: hidden @ embed.T)
    drafter = Drafter(model, head, groups, options)
    with torch.inference_mode():
        requests.absorb_in_pieces(drafter)
        lengths, bonus = torch.tensor(requests.lengths), torch.randint(0, 63, (count,))
        rows, longest = torch.arange(count), max(requests.lengths)
        slots = RequestSlots(requests.table.int(), rows, lengths, longest)
        states = drafter.forward(bonus, slots)
        block = likeliest(drafter.propose(bonus, slots))
        noise = BlockNoise(torch.arange(count), torch.full((count,), 0.8), lengths)
        both = drafter.propose(bonus, slots, noise)
        assert isinstance(both, SampledBlocks)
        for width in (2, 3):
            assert likeliest(drafter.propose(bonus, slots, None, width)).equal(block[:, :width])
            tokens, *drawn_from = drafter.propose(bonus, slots, noise, width)
            assert tokens.equal(both.tokens[..., :width])
            for part, whole in zip(drawn_from, both[1:], strict=True):
                torch.testing.assert_close(part, whole[:, : width - 1])
    size = options.draft_block
    exact = {
        name: tensor.double() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    for r in range(count):
        hidden, tokens = draft_block(
            exact,
            raw,
            requests.hidden[r].double(),
            int(bonus[r]),
            embed.double(),
            size,
            case.window,
            case.sinks if case.window is not None else 0,
        )
        # float32 through three layers is up to 4.3e-5 from float64, in which the reference is.
        torch.testing.assert_close(states[r, 1:].double(), hidden[1:], atol=1e-4, rtol=0)
        assert block[r].tolist() == tokens
