"""A request's parameters stay with its rows of a block; a block's positions differ."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from sglang_dflash.drafting.noise import likeliest
from sglang_dflash.drafting.ops import TorchOps
from sglang_dflash.plugins.platform_cpu.attention import CpuAttentionBackend
from sglang_dflash.serving.step.penalties import BlockPenalties
from sglang_dflash.serving.step.sampling import Ranks, repeated_sampling_info
from sglang_dflash.serving.step.target_tokens import TargetTokens
from tests.drafting.test_recording import Requests, drafter_of, graphed, table
from tests.serving.batches import batch_of, sampling_info
from tests.serving.in_process import ONE_RANK

VOCAB, BLOCK = 16, 3


def test_every_row_of_a_block_has_its_requests_parameters() -> None:
    given = sampling_info(
        sampling_mask_batch_indices=torch.tensor([0, 1]),
        sampling_support_logprobs_capture_indices=torch.tensor([1]),
    )
    repeated = repeated_sampling_info(given, BLOCK)
    assert repeated.sampling_mask_batch_indices.tolist() == list(range(2 * BLOCK))
    assert repeated.sampling_support_logprobs_capture_indices.tolist() == [3, 4, 5]
    for name in ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed"):
        first, second = getattr(given, name).flatten().tolist()
        rows = getattr(repeated, name).flatten().tolist()
        assert rows == [first] * BLOCK + [second] * BLOCK, name


class NotedPositions:
    """A sampler that takes the argmax and notes the positions it is given."""

    def __call__(self, output: Any, info: Any, *rest: Any) -> Tensor:
        self.positions: Tensor = rest[-1]
        return output.next_token_logits.argmax(-1)

    def _sync_token_ids_across_tp(self, *_: Any) -> None:
        pass


def output_of(logits: Tensor) -> LogitsProcessorOutput:
    return LogitsProcessorOutput(next_token_logits=logits)


def test_every_position_draws_its_own_random_number() -> None:
    """With a seed, the number is a hash of seed and position: plain decoding's."""
    sampler = NotedPositions()
    positions = torch.tensor([[7, 8, 9], [20, 21, 22]])
    block, logits = torch.zeros(2, BLOCK, dtype=torch.int64), torch.randn(2 * BLOCK, VOCAB)
    TargetTokens(sampler, Ranks(ONE_RANK), no_penalties())(
        batch_of(sampling_info=sampling_info()), output_of(logits), block, positions, lambda: None
    )
    assert sampler.positions.tolist() == [7, 8, 9, 20, 21, 22]


def test_greedy_tokens_are_of_the_logits_that_sglangs_sampler_takes() -> None:
    """With SGLANG_SANITIZE_NAN_LOGITS a NaN is the least likely token, and else the first."""
    logits = torch.zeros(2 * BLOCK, VOCAB)
    logits[:, 3], logits[:, 5] = 1.0, float("nan")
    block, info = torch.zeros(2, BLOCK, dtype=torch.int64), sampling_info()
    info.is_all_greedy = True
    for sanitizes, token in ((False, 5), (True, 3)):
        with envs.SGLANG_SANITIZE_NAN_LOGITS.override(sanitizes):
            tokens = TargetTokens(NotedPositions(), Ranks(ONE_RANK), no_penalties())(
                batch_of(sampling_info=info), output_of(logits.clone()), block, block, lambda: None
            )
        assert (tokens == token).all()


def no_penalties() -> BlockPenalties:
    """Return the penalties of a worker whose requests have none."""
    return BlockPenalties(2, BLOCK, torch.device("cpu"), TorchOps())


class Penalised(BlockPenalties):
    """Takes 10 from the token 9 of the first request."""

    def apply(self, logits: Tensor, block: Tensor) -> None:
        logits[0, 1:, 9] -= 10


def test_penalties_and_a_bias_apply_to_every_position() -> None:
    """The first position is an ordinary decoding step, with SGLang's own sum of penalties."""
    bias, penalty = torch.zeros(2, VOCAB), torch.zeros(2, VOCAB)
    bias[1, 4], penalty[0, 2] = 5.0, 10.0
    info = sampling_info(is_all_greedy=True, logit_bias=bias, acc_additive_penalties=penalty)
    logits = torch.zeros(2 * BLOCK, VOCAB)
    logits[:, 9] = 1.0
    block = torch.zeros(2, BLOCK, dtype=torch.int64)
    penalised = Penalised(2, BLOCK, torch.device("cpu"), TorchOps())
    tokens = TargetTokens(NotedPositions(), Ranks(ONE_RANK), penalised)(
        batch_of(sampling_info=info), output_of(logits), block, block, lambda: None
    )
    assert tokens.tolist() == [[2, 0, 0], [4, 4, 4]]


def test_a_verified_block_comes_after_the_committed_tokens() -> None:
    """On a plain CPU: `seq_lens` of a verify forward does not count the block."""
    slots = torch.arange(60).view(3, 20)
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=slots),
        token_to_kv_pool=None,
        use_mla_backend=False,
    )
    backend = CpuAttentionBackend(runner)
    forward = SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        seq_lens=torch.tensor([5, 9]),
        req_pool_indices=torch.tensor([2, 1]),
        spec_info=SimpleNamespace(draft_token_num=4),
        out_cache_loc=None,
    )
    backend.init_forward_metadata(forward)
    (piece,) = backend._pieces(causal=True)
    assert piece.first.tolist() == [5, 9] and piece.length.tolist() == [9, 13]
    assert piece.rows == slice(0, 8)
    columns = len(piece.slots) // 2
    wanted = [*range(40, 49)], [*range(20, 33)]
    for own, tokens in zip(piece.slots.split(columns), wanted, strict=True):
        # Padded with the last one.
        assert own.tolist() == tokens + tokens[-1:] * (columns - len(tokens))


def test_a_proposal_outlives_the_next_replay() -> None:
    """With overlap scheduling the next step is launched before this one's tokens are read."""
    slots = table()
    requests = Requests(slots, graphed(drafter_of(12), slots))
    # With noise, and without.
    for count in (4, 3):
        first = likeliest(requests.step(count)[0])
        kept = first.clone()
        second = likeliest(requests.step(count)[0])
        assert torch.equal(first, kept) and not torch.equal(second, kept)
