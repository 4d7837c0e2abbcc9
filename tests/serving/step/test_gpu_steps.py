"""Waits of a GPU's host in whole steps of our worker, on a made-up GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dflash_kernels.draft_ops import TritonOps
from dflash_kernels.traffic import Traffic
from sglang.srt.layers import sampler as sglangs
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor

from experiments.kernel_traffic import StepContents
from experiments.launches import record_launches
from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.draft_counters import DraftCounters
from sglang_dflash.drafting.kv import DraftKVCache
from sglang_dflash.drafting.kv.ring import RingKVCache
from sglang_dflash.drafting.ops import TorchOps
from sglang_dflash.drafting.text_match import LONGEST_MATCH
from sglang_dflash.drafting.width import AdaptiveWidth
from sglang_dflash.plugins.platform_cpu.torch_ops import murmur_hash32 as sglangs_hash
from sglang_dflash.serving.hybrid.rollback import Replay
from sglang_dflash.serving.step import batch as our_batch
from sglang_dflash.serving.step import penalties as block_penalties
from sglang_dflash.serving.step import sampling, target_forward
from sglang_dflash.serving.step import worker as our_worker
from sglang_dflash.serving.step.penalties import BlockPenalties
from sglang_dflash.serving.step.penalty_counts import LENGTH, PENALIZERS, count
from sglang_dflash.serving.step.seeded_sampling import sample_by_token_id
from sglang_dflash.serving.step.target_forward import TargetForwardByWidth
from sglang_dflash.serving.step.target_tokens import TargetTokens
from tests.conftest import write_kv
from tests.serving.batches import batch_of, request_of, sampling_info
from tests.serving.fake_cuda import Crossing, FakeCuda
from tests.serving.in_process import VOCAB, decode_of, prefill_of, widths_of, worker_of
from tests.serving.recurrent_target import gdn_layer, recorded_runner
from tests.serving.step.test_step_width import request

LENGTHS = [9, 14]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    mode = FakeCuda()
    monkeypatch.setattr(our_batch, "is_pin_memory_available", lambda _device: True)
    monkeypatch.setattr(Tensor, "pin_memory", lambda host: mode.pin(host))
    monkeypatch.setattr(our_worker, "record_stream", lambda _: None)
    monkeypatch.setattr(block_penalties, "record_stream", lambda _: None)
    with mode:
        yield mode


WORKERS = pytest.mark.parametrize(
    ("window", "looks_up"), [(None, False), (7, False), (7, True)], ids=["all", "window", "lookup"]
)


class MatchAtTheStart(TorchOps):
    """Torch's operations but for the search, whose twin is for a CPU: it reads how many places
    agree."""

    def find_match(
        self, bonus: Tensor, texts: Tensor, requests: RequestSlots, count: int
    ) -> tuple[Tensor, Tensor]:
        """Match as if all newest tokens stood before a text's first tokens, too."""
        return torch.full_like(bonus, LONGEST_MATCH), texts[requests.rows, :count].long()


@WORKERS
def test_a_decode_step_copies_nothing_and_reads_nothing(
    gpu: FakeCuda, window: int | None, looks_up: bool
) -> None:
    """Propose, verify, accept and commit."""
    worker, batch = worker_of(window, "cuda", looks_up=looks_up), decode_of(LENGTHS, "cuda")
    worker.drafter.counters = DraftCounters("cuda", pinned=True)
    if looks_up:
        worker.lookup._ops = MatchAtTheStart()
    gpu.crossings.clear()
    result = worker.forward_batch_generation(batch)
    # The counters of the draft, which the host reads a step later.
    assert gpu.crossings == [Crossing("copy_", waits=False)]
    assert result.next_token_ids.shape == (len(LENGTHS) * worker.verify_block,)


def launches_of_a_step(looks_up: bool) -> Counter[str]:
    """Return the launches by name. Operations of lookup are kernels, others torch's."""
    worker, batch = worker_of(None, "cuda", looks_up=looks_up), decode_of(LENGTHS, "cuda")
    worker.drafter.counters = DraftCounters("cuda", pinned=True)
    if looks_up:
        worker.lookup._ops = TritonOps()
    with record_launches(StepContents(LENGTHS)) as launches:
        worker.forward_batch_generation(batch)
    return Counter(launch.name for launch in launches)


def test_lookup_adds_few_launches_to_a_step(gpu: FakeCuda) -> None:
    """Each costs the host more than the GPU."""
    added = launches_of_a_step(looks_up=True) - launches_of_a_step(looks_up=False)
    search = dict.fromkeys(("find_match_kernel", "take_match_kernel", "clone"), 1)
    choice = dict.fromkeys(("choose_source_kernel", "learn_source_kernel"), 1)
    written = dict.fromkeys(("clamp", "to_copy", "index_put_"), 1)
    assert added == {**search, **choice, **written}


def test_the_block_is_read_for_grammars_before_the_target_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After it, the host would wait for the forward, too."""
    order: list[str] = []

    def reads(_block: Tensor) -> None:
        order.append("block")

    monkeypatch.setattr(sampling, "GrammarTree", SimpleNamespace(from_linear_chain=reads))
    monkeypatch.setattr(sampling, "build_grammar_vocab_mask", lambda **_: order.append("mask"))
    info = sampling_info(temperatures=torch.ones(2, 1), is_all_greedy=True)
    sampler = SimpleNamespace(_sync_token_ids_across_tp=lambda *_: None)
    worker = worker_of(None, sampler=sampler)
    batch = decode_of(LENGTHS, has_grammar=True, sampling_info=info)
    forward = worker.target_worker.forward_batch_generation

    def computes(*args: Any, **named: Any) -> Any:
        order.append("target")
        return forward(*args, **named)

    worker.target_worker.forward_batch_generation = computes
    worker.forward_batch_generation(batch)
    assert order == ["block", "target", "mask"]


def test_a_decode_step_of_any_width_waits_for_nothing(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy chooses from what the host knows already."""
    policy = AdaptiveWidth((1, 3, 4))
    worker = worker_of(None, "cuda", widths=widths_of(policy))
    runner = SimpleNamespace(attn_backend=None, decode_cuda_graph_runner=None)
    worker.target_worker.model_runner = runner
    monkeypatch.setattr(target_forward, "_make_at", lambda *_: (None, None))
    worker.target_forward = TargetForwardByWidth(worker.target_worker, (1, 3, 4))
    worker.drafter.counters = DraftCounters("cuda", pinned=True)
    batches = [decode_of(LENGTHS, "cuda", reqs=[request("a"), request("b")]) for _ in range(24)]
    gpu.crossings.clear()
    for batch in batches:
        width = worker.forward_batch_generation(batch).speculative_num_draft_tokens
        worker.widths.observe(width, {"a": width - 1, "b": 0})
    assert all(worker.widths.steps[width] for width in (1, 3, 4))
    assert not any(crossing.waits for crossing in gpu.crossings)


class SeededSampler:
    """A sampler like SGLang's, with the row of repairs."""

    def __call__(
        self, output: Any, info: Any, _logprobs: bool, _top: Any, _ids: Any, positions: Tensor
    ) -> Tensor:
        probs = (output.next_token_logits / info.temperatures).softmax(-1)
        return sample_by_token_id(None, None, probs, info, positions, True)[0]

    def _sync_token_ids_across_tp(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("seeds", [(None, None), (7, None), (7, 8)], ids=str)
@pytest.mark.parametrize("draws", [False, True], ids=["", "draws"])
def test_a_sampled_step_waits_for_nothing(
    gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch, draws: bool, seeds: tuple[int | None, ...]
) -> None:
    """Seeds, noise, both rules and their choice, what is learned of them, and drawn drafts."""
    monkeypatch.setattr(sglangs, "murmur_hash32", sglangs_hash)
    worker = worker_of(None, "cuda", sampler=SeededSampler())
    if draws:
        own = worker.target_tokens
        worker.target_tokens = TargetTokens(
            SeededSampler(), worker.ranks, own.penalties, worker.drafter.model.ops
        )
    worker.drafter.counters = DraftCounters("cuda", pinned=True)
    rows = len(LENGTHS)
    ones, device = torch.ones(rows, device="cuda"), torch.device("cuda")
    info = SamplingBatchInfo(
        temperatures=ones[:, None], top_ps=ones, top_ks=torch.full((rows,), 9, device="cuda"),
        min_ps=ones, is_all_greedy=False, is_any_greedy=True, need_top_p_sampling=False,
        need_top_k_sampling=False, need_min_p_sampling=False, vocab_size=VOCAB,
        device=str(device),
    )  # fmt: skip
    prompts, batch = prefill_of([0, 0], LENGTHS, "cuda"), decode_of(LENGTHS, "cuda")
    prompts.sampling_info = batch.sampling_info = info
    for one, seed in zip(batch.reqs, seeds, strict=True):
        one.sampling_params.sampling_seed = seed
    gpu.crossings.clear()
    with torch.compiler.set_stance("force_eager"):
        worker.forward_batch_generation(prompts)
        worker.forward_batch_generation(batch)
    assert not [crossing for crossing in gpu.crossings if crossing.waits]
    assert info.sampling_seed is None


@pytest.mark.parametrize("ops", [TorchOps(), TritonOps()], ids=["torch", "triton"])
def test_penalties_stay_on_the_device(gpu: FakeCuda, ops: TorchOps) -> None:
    """Counting what a step committed, and the penalties of a block: by a kernel they are a launch,
    whatever the width, that reads each table once."""
    rows, width, vocab = 2, 16, 32
    kinds = {name: (kind.counts, kind.penalty) for name, kind in PENALIZERS.items()}
    ends = ("stop_token_penalties", "min_new_tokens", LENGTH)

    def penalizer(name: str) -> Any:
        made = type(name, (), {"is_prepared": lambda _: True})()
        for number, field in enumerate(kinds.get(name, ends)):
            dtype = torch.int32 if field in ends[1:] else None
            shape = (rows, 1 if number else vocab)
            setattr(made, field, torch.ones(shape, dtype=dtype, device="cuda"))
        return made

    names = [*kinds, "BatchedMinNewTokensPenalizer"]
    orchestrator = SimpleNamespace(penalizers={name: penalizer(name) for name in names})
    info = sampling_info(penalizer_orchestrator=SimpleNamespace(is_required=True))
    batch = batch_of(sampling_info=info, req_pool_indices=torch.arange(rows, device="cuda"))
    ours = BlockPenalties(8, width, torch.device("cuda"), ops)
    block = torch.zeros(rows, width, dtype=torch.int64, device="cuda")
    gpu.crossings.clear()
    ours.commit(batch, block[:, :1])
    ours.commit(batch, block, torch.ones(rows, dtype=torch.int64, device="cuda"))
    tokens, is_new = ours.newest(batch.req_pool_indices)
    count(orchestrator, torch.arange(rows, device="cuda"), tokens, is_new)
    ours.begin(orchestrator)
    logits = torch.zeros(rows, width, vocab, device="cuda")
    with record_launches(StepContents([])) as launches:
        ours.apply(logits, block)
    assert gpu.crossings == []
    if type(ops) is TritonOps:
        assert [launch.name for launch in launches] == ["penalize_kernel"]
        per_token, tables, after = 20, 4 * vocab, (width - 1) * vocab
        read = per_token + 8 * (width - 1) + 4 * (tables + after)
        assert launches[0].traffic == Traffic(rows * read, rows * 4 * after)


def test_requests_with_processors_do_not_make_the_host_wait(gpu: FakeCuda) -> None:
    """The mask of these requests is copied while the target computes."""
    from sglang_dflash.serving.step.target_tokens import TargetTokens

    requests = [request_of(custom_logit_processor=given) for given in (None, "one")]
    batch = decode_of(LENGTHS, "cuda", reqs=requests)
    gpu.crossings.clear()
    ranks: Any = None
    mask = TargetTokens(None, ranks, ranks).single_token_mask(batch, [False, True])
    assert mask is not None and mask.shape == (2,)
    assert [crossing.waits for crossing in gpu.crossings] == [False]


@WORKERS
def test_a_prefill_copies_before_its_forward(
    gpu: FakeCuda, window: int | None, looks_up: bool
) -> None:
    """It copies from pinned memory; after the launch of the target's forward nothing crosses."""
    worker = worker_of(window, "cuda", looks_up=looks_up)
    worker.drafter.counters = DraftCounters("cuda", pinned=True)
    batch = prefill_of([3, 0], LENGTHS, "cuda")
    launched: list[int] = []
    worker.target_worker.on_launch = lambda: launched.append(len(gpu.crossings))
    gpu.crossings.clear()
    worker.forward_batch_generation(batch)
    assert launched == [len(gpu.crossings)]
    # The first one is of the counts, to the host.
    assert len(gpu.crossings) == 1 + (1 if window is None else 2) + looks_up
    assert not any(crossing.waits for crossing in gpu.crossings)


@pytest.mark.parametrize("kind", ["ring", "direct"])
def test_the_draft_kv_cache_stays_on_the_device(gpu: FakeCuda, kind: str) -> None:
    shape = (2, 2, 1, 8)
    cache: Any = (
        RingKVCache(20, 40, shape, torch.float32, "cuda")
        if kind == "ring"
        else DraftKVCache(40, shape, torch.float32, "cuda")
    )
    slots = torch.arange(6, device="cuda")
    kv, live = torch.zeros(6, *shape, device="cuda"), slots < 4
    gpu.crossings.clear()
    for fair_share in (None, 3):
        write_kv(cache, slots, kv, live, fair_share)
        write_kv(cache, slots, kv, None, fair_share)
    cache.forget(slots)
    cache.clear()
    assert gpu.crossings == []


@pytest.mark.parametrize("with_checkpoints", [False, True])
def test_replays_commit_stays_on_the_device(
    gpu: FakeCuda, with_checkpoints: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but two kernels (tests/kernels/test_gated_delta_fold.py), which are launched once."""
    runner = recorded_runner(gdn_layer(1, 4, device="cuda"), depth=2, rows=3, block=4)
    folded: list[Any] = []
    replay = Replay(runner, lambda *args: folded.append(args), lambda *args: folded.append(args))
    lengths = torch.ones(2, dtype=torch.int64, device="cuda")
    monkeypatch.setattr(our_batch, "mamba_track_grid", lambda _page: 8)
    batch = batch_of(
        mamba_track_indices=lengths.int() if with_checkpoints else None,
        tree_cache=SimpleNamespace(page_size=1),
    )
    gpu.crossings.clear()
    replay.commit(lengths, our_batch.checkpoints_due(batch, lengths + 6, lengths))
    assert gpu.crossings == [] and len(folded) == 2
    assert all((args[-1].steps is None) != with_checkpoints for args in folded)


def test_a_host_scalar_in_an_indexed_assignment_is_noticed(gpu: FakeCuda) -> None:
    """The made-up GPU sees what a real one would wait for."""
    owner, where = torch.zeros(4, device="cuda"), torch.tensor([1], device="cuda")
    assert [crossing.name for crossing in gpu.crossings] == ["_to_copy"]
    gpu.crossings.clear()
    owner[where] = -1
    assert [crossing.waits for crossing in gpu.crossings] == [True]
    gpu.crossings.clear()
    owner[1:].fill_(-1)
    assert gpu.crossings == []
