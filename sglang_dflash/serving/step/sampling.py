"""SGLang's per-request sampling state, applied to the logits of a drafted block."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from sglang.srt.constrained.base_grammar_backend import GrammarMask
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.environ import envs
from sglang.srt.layers.logits_processor import LogitsProcessorOutput as LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import compute_spec_logprobs as compute_spec_logprobs
from sglang.srt.layers.sampler import (
    apply_custom_logit_processor as apply_custom_logit_processor,
)
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo as SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite
from sglang.srt.speculative.spec_utils import (
    GrammarTree,
    build_grammar_vocab_mask,
    check_simulate_acc_token_mode,
    sample_simulated_acc_len,
)
from sglang.srt.utils.async_probe import sanitize_nan_logits as sanitize_nan_logits
from torch import Tensor

from sglang_dflash.common.log import Log
from sglang_dflash.drafting.acceptance import Accepted, simulate_acceptance
from sglang_dflash.drafting.noise import BlockNoise

logger = Log(__name__)

# SGLang's grammars with packed masks and a rollback, which its look-ahead takes for granted.
_LOOK_AHEAD = (
    "sglang.srt.constrained.xgrammar_backend",
    "sglang.srt.constrained.llguidance_backend",
)
# The token id that SGLang commits in its simulation mode "fixed".
_FILLER = 100


class GrammarMasks(NamedTuple):
    """Vocabulary masks of the W positions of a block.

    Attributes:
        requests: R.
        ahead: over all positions `[R * W, V]`, for grammars that can look ahead; None without any.
        first: over the first positions `[R, V]`, for the others; None without any.
    """

    requests: int
    ahead: GrammarMask | None
    first: GrammarMask | None

    def apply(self, logits: Tensor) -> None:
        """Mask logits `[R * W, V]` in place."""
        if self.ahead is not None:
            self.ahead.apply(logits)
        if self.first is not None:
            adjust_first(logits.unflatten(0, (self.requests, -1)), self.first.apply)


def prepare_grammar_masks(
    batch: ScheduleBatch, block: Tensor, barrier: Callable[[], None] | None
) -> Callable[[], GrammarMasks | None]:
    """Return a function that builds the vocabulary masks of a block; it returns None without
    grammars.

    To be called before the target's forward is launched: the host reads the block, and would wait
    for the forward too.

    Args:
        barrier: waits until the grammars have seen the last tokens.
    """
    if not batch.has_grammar:
        return lambda: None
    tree, info = GrammarTree.from_linear_chain(block), batch.sampling_info
    grammars = [request.grammar for request in batch.reqs]
    ahead = [grammar if looks_ahead(grammar) else None for grammar in grammars]
    others = [None if looks_ahead(grammar) else grammar for grammar in grammars]

    def make() -> GrammarMasks:
        # First: it calls the barrier, after which the grammars below have seen the last tokens,
        # too.
        over_block = build_grammar_vocab_mask(
            reqs=[SimpleNamespace(grammar=grammar) for grammar in ahead],
            tree=tree,
            sampling_info=info,
            device=block.device,
            barrier=barrier,
        )
        # It may still be that of a prefill that was merged, which must not be applied.
        info.grammar_mask = None
        of_plain_step = copy(info)
        of_plain_step.grammars = others if any(others) else None
        of_plain_step.update_regex_vocab_mask()
        return GrammarMasks(len(block), over_block, of_plain_step.grammar_mask)

    return make


def looks_ahead(grammar: Any) -> bool:
    """Return whether SGLang can tell which tokens the grammar allows after drafts: it accepts
    drafts, and rolls them back. True for no grammar."""
    if grammar is None:
        return True
    if isinstance(grammar, ReasonerGrammarObject):
        # What follows the thought; without anything, the functions of the backend.
        grammar = grammar.grammar or grammar.apply_vocab_mask
    # A class may derive from one of theirs.
    origins = (grammar,) if isinstance(grammar, FunctionType) else type(grammar).__mro__
    return any(origin.__module__ in _LOOK_AHEAD for origin in origins)


def adjust_first(by_position: Tensor, adjust: Callable[[Tensor], None]) -> None:
    """Adjust the first positions' rows `[R, V]` of logits `[R, W, V]` in place, contiguous as in
    plain decoding: `adjust` may run a kernel."""
    first = by_position[:, 0].contiguous()
    adjust(first)
    by_position[:, 0] = first


def apply_penalties(logits: Tensor, info: SamplingBatchInfo) -> None:
    """Penalize `[R, V]` logits in place as a plain decoding step does."""
    penalties_only = copy(info)
    penalties_only.grammar_mask = penalties_only.logit_bias = None
    penalties_only.apply_logits_bias(logits)


def has_penalties(info: SamplingBatchInfo) -> bool:
    """Return whether any request has penalties. Overlap scheduling passes them already summed."""
    live = info.penalizer_orchestrator
    return (
        info.acc_additive_penalties is not None
        or info.acc_scaling_penalties is not None
        or (live is not None and live.is_required)
    )


def repeated_sampling_info(info: SamplingBatchInfo, times: int) -> SamplingBatchInfo:
    """Each request's sampling parameters for `times` consecutive rows. Logit adjustments are left
    out: they are already applied."""
    seed = info.sampling_seed
    return replace(
        info,
        temperatures=info.temperatures.repeat_interleave(times, 0),
        top_ps=info.top_ps.repeat_interleave(times),
        top_ks=info.top_ks.repeat_interleave(times),
        min_ps=info.min_ps.repeat_interleave(times),
        sampling_seed=None if seed is None else seed.repeat_interleave(times),
        grammars=None,
        grammar_mask=None,
        penalizer_orchestrator=None,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        has_custom_logit_processor=False,
        custom_logit_processor=None,
        logit_bias=None,
        sampling_mask_batch_indices=_at_every_position(info.sampling_mask_batch_indices, times),
        sampling_support_logprobs_capture_indices=_at_every_position(
            info.sampling_support_logprobs_capture_indices, times
        ),
    )


def is_unfiltered(batch: ScheduleBatch) -> bool:
    """Return True if no sampled request uses top-k, top-p or min-p."""
    info = batch.sampling_info
    if info.need_top_p_sampling or info.need_min_p_sampling:
        return False
    # SGLang turns temperature 0 to top-k 1.
    tops = (request.sampling_params.top_k for request in batch.reqs if info.need_top_k_sampling)
    return all(k in (1, TOP_K_ALL) for k in tops)


def block_noise(info: SamplingBatchInfo | None, seq_lens: Tensor) -> BlockNoise | None:
    """Return `sampled_noise`; None if all requests are greedy."""
    return None if info is None or info.is_all_greedy else sampled_noise(info, seq_lens)


def sampled_noise(info: SamplingBatchInfo, seq_lens: Tensor) -> BlockNoise:
    """Return the noise that the sampler draws the tokens of a block with.

    Args:
        info: with seeds.
        seq_lens: int64 `[R]`, see `BlockNoise`.
    """
    # SGLang turns temperature 0 to top-k 1.
    temperatures = info.temperatures[:, 0].masked_fill(info.top_ks <= 1, 0.0)
    return BlockNoise(info.sampling_seed, temperatures, seq_lens)


def _at_every_position(rows: Tensor | None, width: int) -> Tensor | None:
    """Rows int64 `[N]` of requests -> `[N * width]` of their block positions."""
    if rows is None:
        return None
    return (rows[:, None] * width + torch.arange(width, device=rows.device)).flatten()


class Ranks:
    """Choices that every tensor-parallel rank takes over from the first (SGLANG_SPEC_TP_SYNC)."""

    def __init__(self, group: Any) -> None:
        """`group`: SGLang's, of the ranks."""
        self._sync, self._size = SpecTpSync(group), group.world_size

    @property
    def accept_alike(self) -> bool:
        """True if all ranks commit the first one's samples, whatever each has drafted."""
        return self._sync.enabled(SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE) or self._size == 1

    def prompt_tokens(self, tokens: Tensor) -> None:
        """The first tokens, in place."""
        self._sync.sync(SpecTpSyncSite.DFLASH_TARGET, tokens)

    def drafts(self, block: Tensor) -> Tensor:
        """A block."""
        # SGLang has no site for the drafts of its own v1 worker; this one is for choosing drafts.
        return self._sync.sync(SpecTpSyncSite.DFLASH_SELECTOR, block)

    def target_tokens(self, tokens: Tensor, info: SamplingBatchInfo | None, sampler: Any) -> None:
        """The target's tokens, in place. Without the site, in the cases in which plain decoding
        does (grammars, SYNC_TOKEN_IDS_ACROSS_TP)."""
        site = SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE
        if info is None or info.is_all_greedy:
            site = SpecTpSyncSite.DFLASH_ACCEPT_GREEDY
        if self._sync.enabled(site):
            self._sync.sync(site, tokens)
        elif info is not None:
            sampler._sync_token_ids_across_tp(tokens, info)


def keep_accepted_masks(mask: Any, info: SamplingBatchInfo, accepted: Accepted) -> None:
    """Turn the sampler's answer to `return_sampling_mask`, the tokens that it has drawn from at
    every block position, into one for the committed tokens."""
    width = accepted.tokens.shape[1]
    mask.map_device_tensors(lambda values: values.unflatten(0, (-1, width)))
    mask.num_accept_tokens = accepted.lengths.int()[info.sampling_mask_batch_indices]


def refuse_simulated_masks(original: Any, request: Any, algorithm: Any) -> str | None:
    """Around `validate_spec_sampling_mask_request`: our tokens are samples of the target, unless
    their acceptance is simulated."""
    return None if simulated_acceptance_length() is None else original(request, algorithm)


def simulated_acceptance_length() -> float | None:
    """Tokens per step that SGLANG_SIMULATE_ACC_LEN asks to commit; None if it is not set."""
    length = envs.SGLANG_SIMULATE_ACC_LEN.get()
    return length if length > 0 else None


def warn_of_simulation() -> None:
    """Log that SGLang's variables ask for a simulation, if they do."""
    if simulated_acceptance_length() is not None:
        logger.warning(
            "SGLANG_SIMULATE_ACC_LEN is set: every step commits that many tokens, "
            "right or wrong; the output has no meaning"
        )


AcceptRule = Callable[[Tensor, Tensor], Accepted]


def accept_rule(verify_block: int, rule: AcceptRule) -> AcceptRule:
    """`rule`, or SGLang's simulation of an acceptance length if its variables ask for it.

    Raises:
        ValueError: the simulation mode is unknown.
    """
    mean, method = simulated_acceptance_length(), envs.SGLANG_SIMULATE_ACC_METHOD.get()
    if mean is None:
        return rule
    check_simulate_acc_token_mode()
    filler = _FILLER if envs.SGLANG_SIMULATE_ACC_TOKEN_MODE.get() == "fixed" else None

    def simulate(block: Tensor, target_tokens: Tensor) -> Accepted:
        length = min(sample_simulated_acc_len(mean, method, verify_block), block.shape[1])
        return simulate_acceptance(block, target_tokens, length, filler)

    return simulate
