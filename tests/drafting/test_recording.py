"""Steps that are recorded once and replayed: the list of operations, and the drafter's graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.drafter import Drafter
from sglang_dflash.drafting.graphs import (
    GraphedDrafter,
    default_batch_buckets,
    default_column_buckets,
)
from sglang_dflash.drafting.heads.head import TargetHead
from sglang_dflash.drafting.noise import LIKELIEST, SAMPLED, BlockNoise, SampledBlocks, likeliest
from sglang_dflash.drafting.options import Options
from tests.conftest import kv_groups, random_model, raw_config, with_own
from tests.recording import OpRecorder, RecordingError

RAW = raw_config()
ROWS, COLUMNS, ENTRIES = 9, 64, 150
BUCKETS = (1, 2, 4)


# -- the recorder


def test_what_python_computed_is_frozen() -> None:
    x, y = torch.ones(4), torch.zeros(())
    count = [2]
    replay = OpRecorder().record_one(lambda: y.copy_(x[: count[0]].sum()))
    count[0] = 4
    replay()
    assert y == 2


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda x: int(x.max()), "reads a value of the device on the host"),
        (lambda x: x[x > 0], "depends on values"),
        (lambda x: x.nonzero(), "depends on values"),
        (lambda x: x.masked_select(x > 0), "depends on values"),
        (lambda x: x.add_(torch.tensor([1.0, 2, 3, 4])), "copies a host value"),
    ],
)
def test_what_needs_the_host_cannot_be_recorded(run: Callable[[Tensor], Any], reason: str) -> None:
    x = torch.ones(4)
    with pytest.raises(RecordingError, match=reason):
        OpRecorder().record_one(lambda: run(x))


# -- the drafter


# Two groups of layers.
MIXED = raw_config(
    layer_types=["sliding_attention", "full_attention", "sliding_attention"], sliding_window=9
)


DFLASH2 = MIXED | with_own(selector_rank=8, selector_top_k=5, conv_kernel_size=2, conv_group_size=8)


def drafter_of(
    window: int | None,
    sinks: int = 0,
    kind: type[Drafter] = Drafter,
    raw: dict[str, Any] = RAW,
    verify_block: int | None = None,
) -> Drafter:
    torch.manual_seed(1)
    model = random_model(raw).freeze()
    asked = Options(window=window, sinks=sinks, verify_block=verify_block, looks_up=True)
    options = asked.resolve(model.config)
    embedding = torch.randn(RAW["vocab_size"], RAW["hidden_size"])
    head = TargetHead(lambda ids: embedding[ids], lambda x: x @ embedding.T)
    slots = ROWS * COLUMNS + 1
    return kind(model, head, kv_groups(model, options, slots, ENTRIES), options)


def table() -> Tensor:
    """Slots in a random order; slot 0 is padding."""
    order = torch.randperm(ROWS * COLUMNS, generator=torch.Generator().manual_seed(2)) + 1
    return order.view(ROWS, COLUMNS).int()


def graphed(
    drafter: Drafter, slots: Tensor, columns: tuple[int, ...] = (), widths: tuple[int, ...] = ()
) -> GraphedDrafter:
    return GraphedDrafter(drafter, OpRecorder(), slots, BUCKETS, columns, widths)


class Requests:
    """Requests that two drafters serve in the same way: ragged lengths, and a batch whose size
    changes at every step."""

    def __init__(self, slots: Tensor, *drafters: Any) -> None:
        self.slots, self.drafters = slots, drafters
        self.random = torch.Generator().manual_seed(3)
        self.lengths = torch.randint(1, 20, (ROWS,), generator=self.random)
        for row in range(ROWS):
            self._absorb(torch.tensor([row]), torch.zeros(1).long(), int(self.lengths[row]), None)

    def _absorb(self, rows: Tensor, starts: Tensor, count: int, committed: Tensor | None) -> None:
        positions = (starts[:, None] + torch.arange(count)).flatten()
        slots = self.slots[rows.repeat_interleave(count), positions].long()
        width = len(RAW["dflash_config"]["target_layer_ids"]) * RAW["hidden_size"]
        hidden = torch.randn(len(slots), width, generator=self.random)
        for drafter in self.drafters:
            drafter.absorb(hidden, positions, slots, committed=committed)

    def step(
        self, count: int, block: int = RAW["block_size"], width: int | None = None
    ) -> list[Tensor]:
        """A step of `count` requests, of which so many tokens are verified. What each drafter
        proposed, of blocks of that width."""
        rows = torch.randperm(ROWS, generator=self.random)[:count]
        lengths = self.lengths[rows]
        bonus = torch.randint(0, 63, (count,), generator=self.random)
        known = RequestSlots(self.slots, rows, lengths, int(lengths.max()))
        # The same recording serves greedy batches, and batches with a sampled request.
        noise = None
        if count % 2 == 0:
            seeds = torch.randint(0, 2**62, (count,), generator=self.random)
            noise = BlockNoise(seeds, 8.0 * torch.arange(count), lengths)
        found = [drafter.propose(bonus, known, noise, width) for drafter in self.drafters]
        accepted = torch.randint(1, block + 1, (count,), generator=self.random)
        committed = (torch.arange(block) < accepted[:, None]).flatten()
        self._absorb(rows, lengths, block, committed)
        self.lengths[rows] += accepted
        # A request near the end of its row ends, and another one takes its slots.
        self.lengths[self.lengths > COLUMNS - 2 * block] = 1
        return found


@pytest.mark.parametrize(
    ("window", "sinks", "raw"),
    [
        (None, 0, RAW),
        (12, 0, RAW),
        (12, 3, RAW),
        (None, 0, MIXED),
        (12, 3, MIXED),
        (12, 3, DFLASH2),
    ],
    ids=["full", "window", "sinks", "mixed", "mixed-sinks", "dflash2"],
)
def test_replayed_steps_are_the_eager_ones(
    window: int | None, sinks: int, raw: dict[str, Any]
) -> None:
    """Batches smaller than, equal to and larger than the buckets."""
    slots = table()
    # Lookup fills half of the widest blocks.
    plain, inner = (drafter_of(window, sinks, raw=raw, verify_block=8) for _ in range(2))
    # Of the width of every eager step: another number of columns sums in another order.
    recorded = graphed(inner, slots, columns=(COLUMNS,))
    requests, coupled = Requests(slots, plain, recorded), []
    for step in range(36):
        count = (1, 3, 4, 2, 6)[step % 5]
        eager, replayed = requests.step(count, block=(4, 8, 3)[step % 3])
        assert torch.equal(likeliest(eager), likeliest(replayed)), step
        if isinstance(eager, SampledBlocks):
            torch.testing.assert_close(replayed, eager, atol=1e-4, rtol=1e-5)
            coupled.append(not torch.equal(eager.tokens[LIKELIEST], eager.tokens[SAMPLED]))
        for one, other in zip(plain.groups, inner.groups, strict=True):
            a, b = one.cache, other.cache
            # A commit with padding is another product of matrices.
            torch.testing.assert_close(a.kv[: a.num_entries], b.kv[: b.num_entries])
            for mine, theirs in zip(a.tags or (), b.tags or (), strict=True):
                # What belongs to padding, a slot and the last entry, is never read.
                mine, theirs = mine.clone(), theirs.clone()
                if len(mine) == len(slots.flatten()) + 1:
                    mine[0] = theirs[0] = 0
                else:
                    mine[-1] = theirs[-1] = 0
                assert torch.equal(mine, theirs)
    # Of two requests, one of which is greedy, both may get the likeliest tokens by chance.
    assert len(coupled) > 20 and sum(coupled) >= len(coupled) - 1
    # Six requests fit into a recording of four if their blocks are short.
    commits = sum((1, 3, 4, 2, 6)[i % 5] * (4, 8, 3)[i % 3] <= 4 * 8 for i in range(36))
    assert recorded.eager == 7 and recorded.replays == {"propose": 29, "commit": commits}


def test_steps_are_recorded_again_when_weights_are_elsewhere() -> None:
    """An update records the target's graphs again; running requests and counts go on."""
    slots = table()
    plain, inner = (drafter_of(12) for _ in range(2))
    recorded = graphed(inner, slots)
    requests = Requests(slots, plain, recorded)
    requests.step(3)
    inner.counters.add_nonfinite(torch.ones(5, dtype=torch.bool))
    inner.counters.send()
    for drafter in (plain, inner):
        norm = drafter.model.norm
        norm.weight = torch.nn.Parameter(-norm.weight, requires_grad=False)
    eager, replayed = requests.step(3)
    assert not torch.equal(eager, replayed)
    before = inner.counters.read()
    recorded.record_again()
    for _ in range(4):
        eager, replayed = requests.step(3)
        assert torch.equal(eager, replayed)
    inner.counters.send()
    assert before.nonfinite == 5 == inner.counters.read().nonfinite


@pytest.mark.parametrize("raw", [RAW, DFLASH2], ids=["v1", "dflash2"])
def test_a_narrow_step_drafts_the_next_wider_block_that_is_recorded(raw: dict[str, Any]) -> None:
    """The lm_head is read for no more drafts."""
    slots = table()
    plain, inner = (drafter_of(12, raw=raw) for _ in range(2))
    rows = list[int]()
    head: Any = inner.head
    target = head.target

    def logits(hidden: Tensor) -> Tensor:
        rows.append(len(hidden))
        return target.logits(hidden)

    inner.head = replace(head, target=replace(target, logits=logits))
    # The block has 4 tokens; one that lookup fills may have more.
    recorded = graphed(inner, slots, widths=(2, 3, 8))
    assert set(rows) == {count * drafts for count in BUCKETS for drafts in (1, 2, 3)}
    rows.clear()
    requests = Requests(slots, plain, recorded)
    for step in range(24):
        width, block = ((2, 2), (3, 3), (4, 4), (8, 4), (None, 4))[step % 5]
        eager, replayed = requests.step((1, 3, 4, 2)[step % 4], width=width)
        assert torch.equal(likeliest(eager), likeliest(replayed)), step
        assert likeliest(replayed).shape[1] == block
        if isinstance(replayed, SampledBlocks):
            torch.testing.assert_close(replayed, eager, atol=1e-4, rtol=1e-5)
            assert replayed.candidates.is_contiguous() and replayed.scores.is_contiguous()
    assert not rows and recorded.replays["propose"] == 24


class BakedIn(Drafter):
    """Reads a request's length in Python."""

    def forward(self, bonus: Tensor, requests: RequestSlots) -> Tensor:
        lengths = [int(length) for length in requests.seq_lens]
        fixed = torch.stack([torch.full((), n) for n in lengths])
        return super().forward(bonus, requests._replace(seq_lens=fixed))


class BakedInQuietly(Drafter):
    """The same by `tolist`, which torch's dispatcher does not see on a CPU."""

    def forward(self, bonus: Tensor, requests: RequestSlots) -> Tensor:
        fixed = [torch.full((), n) for n in requests.seq_lens.tolist()]
        return super().forward(bonus, requests._replace(seq_lens=torch.stack(fixed)))


def test_a_length_that_is_baked_in_is_caught() -> None:
    slots = table()
    with pytest.raises(RecordingError, match="reads a value of the device"):
        graphed(drafter_of(12, kind=BakedIn), slots)
    requests = Requests(slots, drafter_of(12), graphed(drafter_of(12, kind=BakedInQuietly), slots))
    with pytest.raises(AssertionError):
        for _ in range(8):
            eager, replayed = requests.step(3)
            assert torch.equal(likeliest(eager), likeliest(replayed))


def test_padding_touches_the_padding_slot_only() -> None:
    slots = table()
    drafter = drafter_of(12)
    recorded = graphed(drafter, slots)
    requests = Requests(slots, recorded)
    (group,) = drafter.groups
    cache: Any = group.cache
    for _ in range(12):
        before = cache.tags.entry_of.clone()
        rows_before = requests.lengths.clone()
        requests.step(3)
        changed = (cache.tags.entry_of != before).nonzero().flatten().tolist()
        active = (requests.lengths != rows_before).nonzero().flatten()
        allowed = {0, *slots[active].flatten().tolist()}
        assert set(changed) <= allowed


@pytest.mark.parametrize("raw", [RAW, MIXED], ids=["full", "mixed"])
def test_without_a_window_the_next_wider_table_is_replayed(raw: dict[str, Any]) -> None:
    slots = table()
    plain, inner = (drafter_of(None, raw=raw) for _ in range(2))
    recorded = graphed(inner, slots, columns=(16, 32))
    requests = Requests(slots, plain, recorded)
    for _ in range(20):
        eager, replayed = requests.step(4)
        assert (likeliest(eager) == likeliest(replayed)).float().mean() > 0.9
    assert recorded.eager > 0 < recorded.replays["propose"]


def test_buckets() -> None:
    assert default_batch_buckets(1) == (1,) and default_batch_buckets(6) == (1, 2, 4, 6)
    assert default_batch_buckets(8) == (1, 2, 4, 8)
    assert default_column_buckets(500) == (500,)
    assert default_column_buckets(9000) == (1024, 4096, 9000)
    # A context of 256K and what SGLang adds to it: not two tables of nearly the same size.
    assert default_column_buckets(262176) == (1024, 4096, 16384, 65536, 262176)


def test_another_table_is_refused() -> None:
    slots = table()
    recorded = graphed(drafter_of(12), slots)
    requests = RequestSlots(slots.clone(), torch.zeros(1).long(), torch.ones(1).long(), 1)
    with pytest.raises(ValueError, match="is not the table"):
        recorded.propose(torch.zeros(1).long(), requests)


@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("noisy", [False, True])
def test_a_replay_is_prepared_in_few_operations(
    count: int, noisy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Views are not counted: a launch costs the host more than these copies. Padding, of which
    batch 3 has some, takes one more for a proposal and two for a commit."""
    slots, drafter = table(), drafter_of(None)
    one, ran = graphed(drafter, slots), list[str]()
    monkeypatch.setattr(one, "_graphs", dict.fromkeys(one._graphs, lambda: None))

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if not func.is_view:
                ran.append(func.__name__)
            return func(*args, **(kwargs or {}))

    rows = torch.arange(count)
    known, noise = RequestSlots(slots, rows, rows, 20), BlockNoise(rows, torch.ones(count), rows)
    with Watch():
        one.propose(rows, known, noise if noisy else None)
    # Copies by dtype, zeros, and the result.
    assert len(ran) == 2 + noisy + (count == 3 or not noisy), ran
    ran.clear()
    tokens = torch.zeros(count * RAW["block_size"], dtype=torch.int64)
    hidden = torch.zeros(len(tokens), drafter.model.config.target_hidden_width)
    with Watch():
        one.absorb(hidden, tokens, tokens, committed=tokens > 0)
    # One makes `committed`.
    assert len(ran) == 1 + 3 + 2 * (count == 3), ran
