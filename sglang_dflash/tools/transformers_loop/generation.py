"""DFlash generation over a Hugging Face target: the same core as in serving, without a server."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.common.errors import ConfigError
from sglang_dflash.drafting.acceptance import accept
from sglang_dflash.drafting.acceptance_length import VerifySteps
from sglang_dflash.drafting.attention.reference import TorchAttention
from sglang_dflash.drafting.attention.table import RequestSlots
from sglang_dflash.drafting.drafter import Drafter
from sglang_dflash.drafting.groups import KVGroup
from sglang_dflash.drafting.heads.head import TargetHead
from sglang_dflash.drafting.kv import DraftKVCache
from sglang_dflash.drafting.model import DraftModel
from sglang_dflash.drafting.noise import (
    BlockNoise,
    Proposal,
    SampledBlocks,
    SampleFilters,
    proposal_of,
    sampled,
)
from sglang_dflash.drafting.options import Options, ResolvedOptions
from sglang_dflash.drafting.target_samples import sample
from sglang_dflash.tools.transformers_loop.checks import check_new_tokens, check_pair, prompt_ids
from sglang_dflash.tools.transformers_loop.target_cache import TargetCache, capture_hidden


@dataclass
class Generation:
    """A generated text.

    Attributes:
        tokens: generated token ids, without the prompt.
        committed: number of tokens from each verify step, the bonus token included.
    """

    tokens: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """See `drafting.acceptance_length`; 0.0 without a verify step."""
        return VerifySteps(len(self.committed), sum(self.committed)).acceptance_length or 0.0


@dataclass(frozen=True)
class Sampler:
    """The target's sampler, with noise from a hash, as in SGLang's seeded sampling.

    A text depends only on its prompt, these values and the logits, not on how it is drafted; if
    `draws`, it only has the target's distribution, and more drafts are accepted.

    Attributes:
        temperature: 0 is greedy, and the other attributes have no effect.
        top_k: number of tokens to sample from; 0 for all.
        top_p: probability mass to sample from.
        seed: by default drawn from torch's generator.
        draws: whether drafts are drawn from the draft's distribution (`drafting.noise`).

    Raises:
        ConfigError: a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = field(default_factory=lambda: int(torch.randint(2**63 - 1, ())))
    draws: bool = False

    def __post_init__(self) -> None:
        heat = self.temperature
        if not (isinstance(heat, int | float) and 0 <= heat < math.inf):
            raise ConfigError("temperature", heat, "0 (greedy) or a positive number")
        if self.top_k < 0:
            required = "0, or how many tokens to keep, is required"
            raise ConfigError("top_k", self.top_k, required)
        if not 0 < self.top_p <= 1:
            required = "a number above 0 and up to 1 is required"
            raise ConfigError("top_p", self.top_p, required)
        if not 0 <= self.seed < 2**63:
            raise ConfigError("seed", self.seed, "a number from 0 to 2**63 - 1 is required")

    def __call__(
        self, logits: Tensor, positions: Tensor, proposal: Proposal | None = None
    ) -> Tensor:
        """Sample tokens int64 `[N]` after adjacent `positions` int64 `[N]`, from logits `[N, V]`.

        Args:
            proposal: of the drafts at the positions after the first; None if none were drawn.
        """
        noise = self._own_noise(positions[:1])
        if noise is None:
            return logits.argmax(-1)
        filters = None
        if self.top_k or self.top_p < 1:
            top_ks = torch.full_like(positions[:1], self.top_k or logits.shape[-1])
            shares = torch.tensor([[self.top_p], [0.0]], device=logits.device)
            filters = SampleFilters(top_ks, *shares)
        return sample(logits, noise, filters, proposal)

    def block(
        self, drafted: Tensor | SampledBlocks, noise: BlockNoise | None
    ) -> tuple[Tensor, Proposal | None]:
        """The block to verify, and what it was drawn from; None if it was not."""
        block = sampled(drafted)
        return block, proposal_of(block, drafted, noise, None) if self.draws else None

    def noise(self, length: Tensor) -> BlockNoise | None:
        """Return the noise, for the drafter, of a block whose bonus token is at `length` int64
        `[1]`; None if there is none."""
        return self._own_noise(length)

    def _own_noise(self, length: Tensor) -> BlockNoise | None:
        if self.temperature == 0:
            return None
        temperatures = torch.full_like(length, self.temperature, dtype=torch.float32)
        return BlockNoise(torch.full_like(length, self.seed), temperatures, length)


@dataclass(frozen=True)
class Prefill:
    """A prompt after the target's forward.

    Attributes:
        kv: the target's Hugging Face cache of the prompt.
        target_hidden: `[N, F * E]`, hidden states of the F layers that the draft reads.
        logits: `[1, V]` after the last token.
    """

    kv: Any
    target_hidden: Tensor
    logits: Tensor


@torch.inference_mode()
def prefill(draft: DraftModel, target: Any, input_ids: Any) -> Prefill:
    """Run the target over a prompt.

    Any number of generations may start from the result, one after another.

    Args:
        target: a causal language model of Transformers.
        input_ids: int64 `[1, N]`, or what a tokenizer returns for one prompt with
            `return_tensors="pt"`.

    Raises:
        ConfigError: see `checks.check_pair` and `checks.prompt_ids`.
    """
    check_pair(draft, target)
    input_ids = prompt_ids(input_ids, target)
    with capture_hidden(target, draft.config.target_layer_ids) as hidden:
        out = target(input_ids=input_ids, use_cache=True, logits_to_keep=1)
        return Prefill(out.past_key_values, hidden(), out.logits[0])


@torch.inference_mode()
def spec_generate(
    draft: DraftModel,
    target: Any,
    prompt: Any,
    max_new_tokens: int,
    *,
    options: Options | None = None,
    stop_token_ids: tuple[int, ...] = (),
    choose: Sampler | None = None,
    on_tokens: Callable[[list[int]], None] | None = None,
) -> Generation:
    """Generate after a prompt.

    Args:
        draft: frozen, as `load_model` or `DFlashDraftModel.from_pretrained` gives it.
        target: the causal language model of Transformers that the draft was trained for.
        prompt: int64 `[1, N]`, or what a tokenizer returns for one prompt, or a `prefill`.
        max_new_tokens: the most tokens to generate.
        options: block size and context window; the other options have no effect here.
        stop_token_ids: the generation ends after the first of these.
        choose: the target's sampler; None is greedy.
        on_tokens: called with the new tokens of every step.

    Raises:
        ConfigError: see `prefill` and `Options.resolve`; `max_new_tokens` is not positive.
    """
    check_new_tokens(max_new_tokens)
    start = prompt if isinstance(prompt, Prefill) else prefill(draft, target, prompt)
    resolved = (options or Options()).resolve(draft.config)
    choose, verify_block = choose or Sampler(), resolved.verify_block
    prompt_length, device = len(start.target_hidden), start.target_hidden.device
    total = prompt_length + max_new_tokens + verify_block  # The last block is written whole.
    positions, target_cache = torch.arange(total, device=device), TargetCache(target, start.kv)
    drafter = _drafter(draft, target, resolved, total, device)
    # A token's slot is its position.
    slots, row = positions[None].int(), positions[:1]
    drafter.absorb(start.target_hidden, positions[:prompt_length], positions[:prompt_length])

    length = positions[prompt_length, None]
    result, bonus = Generation(), choose(start.logits, length - 1)
    done = _extend(result, bonus.tolist(), stop_token_ids, max_new_tokens, on_tokens)
    with capture_hidden(target, draft.config.target_layer_ids) as hidden, target_cache.recording():
        while not done:
            noise, at = choose.noise(length), positions[int(length) :][:verify_block]
            drafted = drafter.propose(bonus, RequestSlots(slots, row, length, int(length)), noise)
            block, proposal = choose.block(drafted, noise)
            out = target(input_ids=block, past_key_values=target_cache.cache, use_cache=True)
            accepted = accept(block, choose(out.logits[0], at, proposal)[None])
            count = int(accepted.lengths)
            drafter.absorb(hidden()[:count], at[:count], at[:count])
            length, bonus = length + count, accepted.bonus
            target_cache.keep(count, verify_block)
            before, new = len(result.tokens), accepted.tokens[0, :count].tolist()
            done = _extend(result, new, stop_token_ids, max_new_tokens, on_tokens)
            result.committed.append(len(result.tokens) - before)
    target_cache.reset(prompt_length)
    return result


def _drafter(
    draft: DraftModel, target: Any, options: ResolvedOptions, total: int, device: torch.device
) -> Drafter:
    """Make a drafter with the target's embedding and head, for `total` tokens of one request."""
    embed, head = target.get_input_embeddings(), target.get_output_embeddings()
    groups = [
        KVGroup(
            layer_group,
            DraftKVCache(total, layer_group.kv_shape(draft.kv_shape), draft.dtype, device),
            TorchAttention(layer_group.attentions, options.draft_block),
        )
        for layer_group in draft.config.groups(options.reach)
    ]
    return Drafter(draft, TargetHead(embed, head), groups, options)


def _extend(
    result: Generation,
    new: list[int],
    stops: tuple[int, ...],
    limit: int,
    on_tokens: Callable[[list[int]], None] | None,
) -> bool:
    """Append `new` up to the first stop token or the limit. Returns True if the text has ended."""
    ends = [i for i, token in enumerate(new) if token in stops]
    new = new[: min(ends[0] + 1 if ends else len(new), limit - len(result.tokens))]
    result.tokens += new
    if on_tokens is not None:
        on_tokens(new)
    return bool(ends) or len(result.tokens) >= limit
