"""Samples of whole distributions, in one pass over the target's logits."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dflash_kernels.draft_ops import TritonOps
from sglang.srt.layers import sampler as sglangs
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from experiments.kernel_traffic import StepContents
from experiments.launches import bytes_of, record_launches
from sglang_dflash.drafting.noise import Proposal
from sglang_dflash.drafting.ops import TorchOps
from sglang_dflash.plugins.platform_cpu.torch_ops import murmur_hash32
from sglang_dflash.serving.start import build
from sglang_dflash.serving.step import seeded_sampling
from sglang_dflash.serving.step.sampling import Ranks
from sglang_dflash.serving.step.seeded_sampling import sample_by_token_id
from sglang_dflash.serving.step.target_tokens import TargetTokens
from tests.reliability.test_block_rows import no_penalties, output_of
from tests.serving.batches import batch_of, request_of, sampling_info
from tests.serving.in_process import ONE_RANK

VOCABULARY, BLOCK = 97, 4
NEEDS = "need_top_k_sampling", "need_top_p_sampling", "need_min_p_sampling"
UNFILTERED: dict[str, Any] = {
    **dict.fromkeys(NEEDS, False),
    "top_ks": torch.tensor([TOP_K_ALL, TOP_K_ALL]),
}  # fmt: skip
# A greedy request, as SGLang has it.
WITH_GREEDY: dict[str, Any] = {
    **UNFILTERED, "need_top_k_sampling": True, "top_ks": torch.tensor([TOP_K_ALL, 1]),
    "temperatures": torch.tensor([[0.5], [1.0]]),
}  # fmt: skip


FILTERED_WITH_GREEDY: dict[str, Any] = {
    **WITH_GREEDY, **dict.fromkeys(NEEDS, True), "top_ks": torch.tensor([80, 1]),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sglangs, "murmur_hash32", murmur_hash32)
    with torch.compiler.set_stance("force_eager"):
        yield


# The sampling backend that has no kernels of top-k and top-p.
KERNELS = SimpleNamespace(kernel=SimpleNamespace(sampling_backend="pytorch"))


class Sampler:
    """SGLang's rules, for seeded requests. Counts its calls."""

    calls = 0

    def __call__(self, output: Any, info: Any, *rest: Any) -> Tensor:
        self.calls += 1
        probs = (output.next_token_logits / info.temperatures).softmax(-1)
        simple = not (info.need_top_k_sampling or info.need_top_p_sampling)
        return sample_by_token_id(None, self, probs, info, rest[-1], simple)[0]

    def _sync_token_ids_across_tp(self, *_: Any) -> None:
        pass


def batch_with(info: Any) -> Any:
    return batch_of(*(request_of(top_k=int(k)) for k in info.top_ks), sampling_info=info)


@pytest.mark.parametrize("is_filtered", [False, True], ids=["whole", "filtered"])
def test_they_are_those_of_sglangs_sampler(
    is_filtered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same noise and the same filters: for many seeds, positions and temperatures."""
    monkeypatch.setattr(seeded_sampling, "get_exec", lambda: KERNELS)
    sampler = Sampler()
    ours = TargetTokens(sampler, Ranks(ONE_RANK), no_penalties(), TorchOps())
    theirs = TargetTokens(sampler, Ranks(ONE_RANK), no_penalties())
    rows = 50
    filters = {
        "top_ks": torch.full((rows,), TOP_K_ALL), "top_ps": torch.ones(rows),
        "min_ps": torch.zeros(rows),
    }  # fmt: skip
    if is_filtered:
        # A greedy request, and others with one to three filters.
        filters["top_ks"] = torch.tensor([1, TOP_K_ALL, 20, 80, TOP_K_ALL]).repeat(10)
        filters["top_ps"] = torch.tensor([1.0, 0.95, 0.8, 1.0, 0.9]).repeat(10)
        filters["min_ps"] = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.2]).repeat(10)
    info = sampling_info(
        **UNFILTERED | filters | dict.fromkeys(NEEDS, is_filtered),
        sampling_seed=torch.randint(-(2**62), 2**62, (rows,)),
        temperatures=torch.rand(rows, 1) + 0.2,
    )
    positions = torch.randint(0, 5000, (rows, 1)) + torch.arange(BLOCK)
    logits, drafts = torch.randn(rows * BLOCK, VOCABULARY), torch.zeros(rows, BLOCK).long()
    found = [
        one(batch_with(info), output_of(logits.clone()), drafts, positions, lambda: None)
        for one in (ours, theirs)
    ]
    assert sampler.calls == 1 and torch.equal(*found)
    assert (found[0].flatten() != logits.argmax(-1)).float().mean() > 0.2


@pytest.mark.parametrize(
    ("changes", "calls"),
    [
        (UNFILTERED, 0),
        (WITH_GREEDY, 0),
        ({}, 0),
        (FILTERED_WITH_GREEDY, 0),
        ({**FILTERED_WITH_GREEDY, "sampling_mask_batch_indices": torch.tensor([0])}, 1),
        ({**UNFILTERED, "sampling_mask_batch_indices": torch.tensor([0])}, 1),
    ],
)
def test_which_batches_they_are_of(changes: dict[str, Any], calls: int) -> None:
    given: list[Tensor] = []

    class Fused(TorchOps):
        @staticmethod
        def sample(logits: Tensor, *of: Any) -> Tensor:
            given.append(logits.clone())
            return TorchOps.sample(logits, *of)

    class Noted(Sampler):
        def __call__(self, output: Any, *_: Any) -> Tensor:
            self.calls += 1
            return output.next_token_logits.argmax(-1)

    sampler = Noted()
    tokens = TargetTokens(sampler, Ranks(ONE_RANK), no_penalties(), Fused())
    logits, block = torch.randn(2 * BLOCK, VOCABULARY), torch.zeros(2, BLOCK).long()
    batch, output = batch_with(sampling_info(**changes)), output_of(logits.clone())
    found = tokens(batch, output, block, block, lambda: None)
    assert sampler.calls == calls and len(given) == 1 - calls
    if not calls:
        # What is still computed from them, such as log-probabilities, needs no copy.
        assert torch.equal(output.next_token_logits, logits)
    if changes is WITH_GREEDY or changes is FILTERED_WITH_GREEDY:
        assert found[1].tolist() == logits[BLOCK:].argmax(-1).tolist()


@pytest.mark.parametrize(
    ("top_k", "drawn", "bytes_"),
    [(TOP_K_ALL, False, 1.01), (20, False, 1.06), (20, True, 1.06), (TOP_K_ALL, True, 1.1)],
)
def test_logits_are_read_once(top_k: int, drawn: bool, bytes_: float) -> None:
    """64 requests of 16 tokens, and the vocabulary of Qwen3.5: a gigabyte. Of a
    request a row is read again, if drafts that were drawn are rejected, and all tokens kept."""
    rows, width, vocabulary = 64, 16, 248_320
    with FakeTensorMode(), torch.device("cuda"):
        info = sampling_info(
            **UNFILTERED
            | {"top_ks": torch.full((rows,), top_k), "need_top_k_sampling": top_k < TOP_K_ALL},
            sampling_seed=torch.zeros(rows, dtype=torch.int64),
            temperatures=torch.ones(rows, 1), top_ps=torch.ones(rows), min_ps=torch.zeros(rows),
        )  # fmt: skip
        tokens = TargetTokens(Sampler(), Ranks(ONE_RANK), no_penalties(), TritonOps())
        logits = torch.empty(rows * width, vocabulary)
        block = torch.zeros(rows, width, dtype=torch.int64)
        batch = batch_of(request_of(top_k=top_k), sampling_info=info)
        scores = torch.zeros(rows, width - 1, 16)
        proposal = Proposal(block, info.top_ps > 0, scores.long(), scores) if drawn else None
        with record_launches(StepContents([])) as found:
            tokens(batch, output_of(logits), block, block, lambda: None, proposal)
    assert bytes_of(found) < bytes_ * logits.nbytes
    assert len(found) < 10


def test_deterministic_inference_has_sglangs_own() -> None:
    """It promises the tokens of SGLang alone."""
    for ops in (TritonOps(), TorchOps()):
        assert build.sampling_ops(ops, made(sglangs.Sampler, True)) is None
        assert build.sampling_ops(ops, made(sglangs.Sampler, False)) is ops


def test_a_sampler_of_the_operators_own_samples() -> None:
    """SGLang makes it of `register_sampler_backend`."""
    own = type("Own", (sglangs.Sampler,), {})
    assert build.sampling_ops(TritonOps(), made(own, False)) is None


def made(kind: Any, is_deterministic: bool) -> Any:
    """Make a sampler without a server's settings, which it reads when it is made."""
    found = kind.__new__(kind)
    found.__dict__["enable_deterministic"] = is_deterministic
    return found


@pytest.mark.parametrize(
    ("sites", "ranks", "draws"),
    [("all", 2, True), ("rng", 2, True), ("dflash-selector", 2, False), ("off", 1, True)],
)
def test_ranks_draw_drafts_if_they_commit_the_same_samples(
    sites: str, ranks: int, draws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft is accepted by what its rank has drawn it from, and ranks may differ by rounding."""
    monkeypatch.setenv("SGLANG_SPEC_TP_SYNC", sites)
    group = SimpleNamespace(world_size=ranks, rank_in_group=0)
    tokens = TargetTokens(Sampler(), Ranks(group), no_penalties(), TorchOps())
    assert tokens.draws(batch_with(sampling_info())) == draws
