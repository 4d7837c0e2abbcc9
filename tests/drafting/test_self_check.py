"""The start-up check finds operations, attention and recordings that are wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dflash.drafting.attention.paged import PagedAttention
from sglang_dflash.drafting.attention.reference import TorchAttention
from sglang_dflash.drafting.draft_counters import DraftCounts
from sglang_dflash.drafting.graphs import GraphedDrafter
from sglang_dflash.drafting.groups import KVGroup
from sglang_dflash.drafting.kv.ring import RingKVCache
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.noise import BlockNoise, likeliest
from sglang_dflash.drafting.ops import TorchOps
from sglang_dflash.drafting.options import Options, ResolvedOptions
from sglang_dflash.drafting.recording_check import check_recording
from sglang_dflash.drafting.recurrent import replay
from sglang_dflash.drafting.self_check import (
    SelfCheckFailed,
    check_attention,
    check_ops,
    check_replay,
)
from tests.conftest import kv_groups, random_model, raw_config, with_own
from tests.drafting.test_paged_attention import plain_kernel
from tests.drafting.test_recording import DFLASH2, MIXED, drafter_of, table
from tests.recording import OpRecorder

OPS = ["add_rms_norm", "qk_norm_rope", "silu_mul", "write_context", "fill_context_table",
       "place_in_ring", "prepare_block", "penalize", "sample", "accept", "find_match",
       "choose_source", "learn_source", "convolve", "candidates", "walk"]  # fmt: skip
BLOCK = 4


class Other:
    """Operations of another type than torch's with the same results, except for `wrong`'s."""

    def __init__(self, wrong: str = "", change: float = 0.01) -> None:
        self._ops, self._wrong, self._change = TorchOps(), wrong, change

    def __getattr__(self, name: str) -> Any:
        right = getattr(self._ops, name)
        if name != self._wrong:
            return right

        def run(*args: Any, **kwargs: Any) -> Any:
            out = right(*args, **kwargs)
            if name in ("write_context", "penalize"):
                args[0][-2] += self._change
                return out
            if name == "fill_context_table":
                args[0][-2] += 1
                return out
            if name == "learn_source":
                args[0].totals += self._change
                return out
            parts = [out] if isinstance(out, Tensor) else list(out)
            parts[0] = parts[0] + (self._change if parts[0].is_floating_point() else 1)
            return parts[0] if isinstance(out, Tensor) else tuple(parts)

        return run


def sliding_model() -> tuple[DraftModel, ResolvedOptions]:
    layers = ["sliding_attention"] * 2 + ["full_attention"]
    model = random_model(raw_config(layer_types=layers, sliding_window=8))
    return model, Options().resolve(model.config)


def model_of(ops: Any) -> DraftModel:
    own = with_own(selector_rank=8, selector_top_k=5, conv_kernel_size=2, conv_group_size=8)
    model = random_model(raw_config(**own))
    model.ops = ops
    return model


def test_the_models_own_torch_operations_are_not_compared() -> None:
    assert check_ops(model_of(TorchOps()), BLOCK, 2 * BLOCK) == []


def test_equal_operations_pass() -> None:
    assert check_ops(model_of(Other()), BLOCK, 2 * BLOCK) == OPS


@pytest.mark.parametrize("name", OPS)
def test_an_operation_that_differs_is_named(name: str) -> None:
    with pytest.raises(SelfCheckFailed, match=rf"self-check: {name} \[.*differs from torch by"):
        check_ops(model_of(Other(wrong=name)), BLOCK, 2 * BLOCK)


def test_nan_is_a_difference() -> None:
    with pytest.raises(SelfCheckFailed, match="silu_mul"):
        check_ops(model_of(Other(wrong="silu_mul", change=float("nan"))), BLOCK, 2 * BLOCK)


class Blind(TorchAttention):
    """Sees no context in the second layer."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer == 1:
            return v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
        return super().attend(layer, q, k, v)


def test_attention_is_compared_layer_by_layer() -> None:
    model, options = sliding_model()
    for group in kv_groups(
        model,
        options,
        60,
        attention=lambda of: TorchAttention(of.attentions, BLOCK, chunk_bytes=4096),
    ):
        check_attention(model, BLOCK, group, 3)
    blind, _ = kv_groups(model, options, 60, attention=lambda of: Blind(of.attentions, BLOCK))
    with pytest.raises(SelfCheckFailed, match=r"attention of layer 1 \(Blind\)"):
        check_attention(model, BLOCK, blind, 3)


def far(q: Tensor, k: Tensor, v: Tensor, pages: Any, block: int, layer: Any) -> Tensor:
    """A kernel that takes no notice of a sliding window."""
    return plain_kernel(q, k, v, pages, block, replace(layer, sliding_window=None))


def test_attention_through_pages_is_compared_on_the_cache() -> None:
    """It keeps the block's K/V at the end of the cache, and leaves dead entries out."""
    model, options = sliding_model()
    layer_group, _ = model.config.groups(options.reach)
    shape = layer_group.kv_shape(model.kv_shape)
    cache = RingKVCache(60, 80, shape, torch.float32, "cpu", scratch=3 * BLOCK)
    for kernel in (plain_kernel, far):
        paged = PagedAttention(layer_group.attentions, BLOCK, cache.num_entries + 1, kernel)
        group = KVGroup(layer_group, cache, paged)
        if kernel is plain_kernel:
            check_attention(model, BLOCK, group, 3)
        else:
            with pytest.raises(SelfCheckFailed, match=r"attention of layer 0 \(PagedAttention\)"):
                check_attention(model, BLOCK, group, 3)
        assert not cache.kv.any()


@pytest.mark.parametrize("entries", [1, 3, 41])
def test_attention_is_compared_on_a_small_cache(entries: int) -> None:
    model = random_model(raw_config())
    options = Options(window=20).resolve(model.config)
    (group,) = kv_groups(model, options, 60, entries)
    check_attention(model, BLOCK, group, 3)
    (group,) = kv_groups(
        model, options, 60, entries, attention=lambda of: Blind(of.attentions, BLOCK)
    )
    with pytest.raises(SelfCheckFailed, match="attention of layer 1"):
        check_attention(model, BLOCK, group, 3)


@pytest.mark.parametrize(("sizes", "compared"), [((1, 2), 2), ((1, 2, 4), 2), ((4, 8), 4)])
def test_what_is_compared_has_a_recorded_size(sizes: tuple[int, ...], compared: int) -> None:
    """Rows of padding would change the shapes of products, and so their rounding."""
    slots, drafter = table(), drafter_of(None)
    seen = []

    class Recorded:
        def propose(self, bonus: Tensor, requests: Any, noise: Any, width: int) -> Any:
            seen.append(len(bonus))
            return drafter.propose(bonus, requests, noise, width)

    check_recording(drafter, Recorded(), slots, sizes, (2,))
    assert seen == 4 * [compared]


@pytest.mark.parametrize(("gap", "passes"), [(0.0, True), (1e-5, True), (1e-2, False)])
def test_a_token_that_is_as_likely_is_no_error(gap: float, passes: bool) -> None:
    """If two logits are equal up to rounding, the other token may win in a graph."""
    slots, drafter = table(), drafter_of(None)
    head: Any = drafter.head
    logits = head.target.logits

    def with_twins(hidden: Tensor) -> Tensor:
        """Token 7 is the likeliest, token 8 comes next."""
        found = logits(hidden)
        found[:, 7] = found.abs().max() + 1
        found[:, 8] = found[:, 7] * (1 - gap)
        return found

    drafter.head = replace(head, target=replace(head.target, logits=with_twins))

    class Recorded:
        def propose(self, bonus: Tensor, requests: Any, noise: Any, width: int) -> Any:
            ids = drafter.propose(bonus, requests, noise, width)
            if noise is None:
                likeliest(ids)[:, 1:] += 1
            return ids

    if passes:
        check_recording(drafter, Recorded(), slots)
        return
    with pytest.raises(SelfCheckFailed, match="less likely by 0"):
        check_recording(drafter, Recorded(), slots)


@pytest.mark.parametrize("window", [None, 12])
def test_a_recording_is_compared_and_leaves_nothing_behind(window: int | None) -> None:
    slots, drafter = table(), drafter_of(window)
    before = slots.clone()
    before[1:4] = 0
    recorded = GraphedDrafter(drafter, OpRecorder(), slots, (4,), (64,), (2,))
    slots.copy_(before)
    check_recording(drafter, recorded, slots, widths=(2,))
    assert torch.equal(slots, before) and drafter.groups[0].cache.live_share() in (0, 1)
    drafter.counters.send()
    assert drafter.counters.read() == DraftCounts()

    class Stale:
        """Repeats its first answer."""

        def propose(self, bonus: Tensor, requests: Any, noise: Any, width: int) -> Tensor:
            return recorded.propose(bonus, requests, noise) + 1

    with pytest.raises(SelfCheckFailed, match="recorded proposal"):
        check_recording(drafter, Stale(), slots)


def test_a_check_that_fails_leaves_the_table_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's, of slots that its requests have."""
    slots, drafter = table(), drafter_of(12)
    slots[1:4] = 0
    before = slots.clone()

    def failing(*_: Any) -> None:
        assert not torch.equal(slots, before)
        raise RuntimeError("no memory")

    monkeypatch.setattr(drafter, "absorb", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        check_recording(drafter, drafter, slots)
    assert torch.equal(slots, before)


@pytest.mark.parametrize("raw", [MIXED, DFLASH2], ids=["v1", "dflash2"])
def test_a_recording_with_other_noise_is_found(raw: dict[str, Any]) -> None:
    """It drafts right without noise."""
    slots, drafter = table(), drafter_of(12, raw=raw)

    class Recorded:
        def propose(
            self, bonus: Tensor, requests: Any, noise: BlockNoise | None, width: int
        ) -> Any:
            if noise is not None and wrong:
                noise = noise._replace(seeds=noise.seeds + 1)
            return drafter.propose(bonus, requests, noise, width)

    wrong = False
    check_recording(drafter, Recorded(), slots)
    wrong = True
    with pytest.raises(SelfCheckFailed, match="recorded coupled proposal"):
        check_recording(drafter, Recorded(), slots)


POOL = torch.empty(2, 5, 2 * 2 * 8 + 4 * 16, 3), torch.empty(2, 5, 4, 16, 8)


def test_replay_is_compared() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check_replay(replay.fold_, replay.move_windows_, POOL[0].to(dtype), POOL[1])

    def one_less(layers: Any, states: Tensor, kept: Any, moves: Any) -> None:
        replay.fold_(layers, states, kept, moves._replace(lengths=moves.lengths - 1))

    def no_checkpoint(layers: Any, states: Tensor, kept: Any, moves: Any) -> None:
        replay.fold_(layers, states, kept, moves._replace(checkpoints=None, steps=None))

    for wrong in (one_less, no_checkpoint):
        with pytest.raises(SelfCheckFailed, match="self-check: replay of recurrent states"):
            check_replay(wrong, replay.move_windows_, POOL[0].bfloat16(), POOL[1])
    with pytest.raises(SelfCheckFailed, match="self-check: windows of replay"):
        check_replay(replay.fold_, lambda *_: None, *POOL)
