"""DFlash over a Hugging Face target: the same core, without a server."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.checkpoint.errors import ConfigError
from sglang_dflash.core.acceptance import accept, sample, target_probabilities
from sglang_dflash.core.attention.backend import make_attention
from sglang_dflash.core.drafter import Drafter, TargetHead
from sglang_dflash.core.kv_cache.direct import DirectKVCache
from sglang_dflash.core.model import DraftModel
from sglang_dflash.core.options import Options

# Logits [B, V] to the target's tokens [B].
Choose = Callable[[Tensor], Tensor]


@dataclass
class Generation:
    """Generated token ids (without the prompt), and how many of them each verify step committed."""

    tokens: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per verify step, the bonus token included."""
        return sum(self.committed) / max(1, len(self.committed))


def sampler(
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    generator: torch.Generator | None = None,
) -> Choose:
    """How the target picks its tokens; temperature 0 is greedy."""
    if temperature == 0:
        return lambda logits: logits.argmax(-1)
    return lambda logits: sample(
        target_probabilities(logits, temperature, top_k, top_p, min_p), generator
    )


@dataclass(frozen=True)
class Prefill:
    """A prompt that the target has read: its KV cache, features `[N, F * E]` of every token, logits `[1, V]` after the last."""

    kv: Any
    features: Tensor
    logits: Tensor


@torch.inference_mode()
def prefill(draft: DraftModel, target: Any, input_ids: Tensor) -> Prefill:
    """Let the target read `input_ids` int64 `[1, N]`; any number of generations may start from the result, one after another.

    Raises:
        ConfigError: the pair does not fit, or the batch is larger than 1.
    """
    if input_ids.shape[0] != 1:
        raise ConfigError(
            f"input_ids: {input_ids.shape[0]} rows; one prompt at a time is generated here"
        )
    of = target.config.get_text_config()
    draft.config.check_target(
        hidden_size=of.hidden_size, vocab_size=of.vocab_size, num_layers=of.num_hidden_layers
    )
    with captured(target, draft.config.target_layer_ids) as features:
        out = target(input_ids=input_ids, use_cache=True, logits_to_keep=1)
        return Prefill(out.past_key_values, features(), out.logits[0])


@torch.inference_mode()
def spec_generate(
    draft: DraftModel,
    target: Any,
    prompt: Tensor | Prefill,
    max_new_tokens: int,
    *,
    options: Options | None = None,
    stop_token_ids: tuple[int, ...] = (),
    choose: Choose | None = None,
    on_tokens: Callable[[list[int]], None] | None = None,
) -> Generation:
    """Generate after a prompt, int64 `[1, N]` or prefilled, with a frozen `draft` (see `core.weights.load_model`) of that `target`.

    `on_tokens` is called with the new tokens of every step. Raises as `prefill`.
    """
    start = prompt if isinstance(prompt, Prefill) else prefill(draft, target, prompt)
    resolved = (options or Options()).resolve(draft.config)
    kv, count, device = TargetCache(target, start.kv), len(start.features), start.features.device
    choose, total = choose or sampler(0.0), count + max_new_tokens + resolved.block_size
    embed, head = target.get_input_embeddings(), target.get_output_embeddings()
    cache = DirectKVCache(total, draft.config.kv_shape, draft.fc.weight.dtype, device)
    drafter = Drafter(
        draft,
        TargetHead(embed, lambda h: head(h).argmax(-1)),
        cache,
        resolved,
        make_attention("torch", draft.config, resolved.block_size, device),
    )
    result, length, at = (
        Generation(),
        torch.tensor([count], device=device),
        torch.arange(total, device=device),
    )
    drafter.absorb(start.features, at[:count], at[:count])
    bonus = choose(start.logits)
    done = _extend(result, bonus.tolist(), stop_token_ids, max_new_tokens, on_tokens)
    with captured(target, draft.config.target_layer_ids) as features, kv.recorded():
        while not done:
            seen = drafter.visible_context(length, longest=int(length))
            block = drafter.propose(bonus, length, seen, seen.clamp(max=total - 1))
            out = target(input_ids=block, past_key_values=kv.cache, use_cache=True)
            accepted = accept(block, choose(out.logits[0])[None])
            count = int(accepted.lengths)
            span = at[int(length) : int(length) + count]
            drafter.absorb(features()[:count], span, span)
            length, bonus = length + count, accepted.bonus
            kv.keep(count, resolved.block_size)
            result.committed.append(count)
            done = _extend(
                result,
                accepted.tokens[0, :count].tolist(),
                stop_token_ids,
                max_new_tokens,
                on_tokens,
            )
    kv.back_to(len(start.features))
    return result


class TargetCache:
    """A Hugging Face cache that can be taken back to a shorter text, recurrent layers included.

    Attention layers forget their last tokens. A recurrent layer cannot: its state from before the block is restored, and the layer
    reads the tokens that stay once more, from the inputs that it had in the block (replay).
    """

    def __init__(self, target: Any, cache: Any) -> None:
        self.cache = cache
        layers = target.get_decoder().layers
        self._recurrent = {
            i: _recurrent_module(layers[i])
            for i, kept in enumerate(cache.layers)
            if hasattr(kept, "recurrent_states")
        }
        self._inputs: dict[int, Tensor] = {}
        self._at_start = self._before = self._states()

    def _states(self) -> dict[int, tuple[dict[int, Tensor], dict[int, Tensor]]]:
        """Copies of every recurrent layer's convolution windows and states."""

        def copies(of: dict[int, Tensor]) -> dict[int, Tensor]:
            return {k: t.clone() for k, t in of.items()}

        kept = ((i, self.cache.layers[i]) for i in self._recurrent)
        return {i: (copies(c.conv_states), copies(c.recurrent_states)) for i, c in kept}

    def _restore(self, states: dict[int, tuple[dict[int, Tensor], dict[int, Tensor]]]) -> None:
        for i, saved in states.items():
            for of, copies in zip(
                (self.cache.layers[i].conv_states, self.cache.layers[i].recurrent_states),
                saved,
                strict=True,
            ):
                for k, t in copies.items():
                    of[k].copy_(t)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """While this lasts, recurrent layers' inputs are kept for `keep`."""

        def hook(i: int) -> Callable[..., None]:
            def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                self._inputs[i] = args[0] if args else kwargs["hidden_states"]

            return before

        handles = [
            m.register_forward_pre_hook(hook(i), with_kwargs=True)
            for i, m in self._recurrent.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def keep(self, count: int, block_size: int) -> None:
        """Of the `block_size` tokens of the last forward, only the first `count` have been there."""
        if count < block_size:
            self._crop(block_size - count)
            self._restore(self._before)
            for i, module in self._recurrent.items():
                module(hidden_states=self._inputs[i][:, :count], cache_params=self.cache)
        if self._recurrent:
            self._before = self._states()

    def back_to(self, length: int) -> None:
        """Make it what it was at construction, when it held `length` tokens."""
        self._crop(self.cache.get_seq_length() - length)
        self._restore(self._at_start)

    def _crop(self, tokens: int) -> None:
        if tokens:
            for i, layer in enumerate(self.cache.layers):
                if i not in self._recurrent:
                    layer.crop(-tokens)


def chat_tokens(
    tokenizer: Any, messages: list[dict[str, str]], thinking: bool | None = None
) -> list[int]:
    """Token ids of a chat up to where the assistant is to speak; `thinking` None leaves that to the template.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise ConfigError(
            f"chat template: the tokenizer of {tokenizer.name_or_path!r} has none; send the prompt as plain text"
        )
    how = {} if thinking is None else {"enable_thinking": thinking}
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **how
    )
    # The template has written the special tokens itself.
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _recurrent_module(layer: Any) -> Any:
    """The sub-module of a decoder layer that keeps a recurrent state; raises ConfigError where there is none to be found."""
    for module in layer.children():
        if "cache_params" in inspect.signature(module.forward).parameters:
            return module
    raise ConfigError(
        f"target: {type(layer).__name__} keeps a recurrent state, but no sub-module of it takes `cache_params`"
    )


def _extend(
    result: Generation,
    new: list[int],
    stops: tuple[int, ...],
    limit: int,
    on_tokens: Callable[[list[int]], None] | None,
) -> bool:
    """Append up to the first stop token or the limit; True where the generation ends."""
    ends = [i for i, token in enumerate(new) if token in stops]
    new = new[: min(ends[0] + 1 if ends else len(new), limit - len(result.tokens))]
    result.tokens += new
    if on_tokens is not None:
        on_tokens(new)
    return bool(ends) or len(result.tokens) >= limit


@contextmanager
def captured(target: Any, layer_ids: tuple[int, ...]) -> Iterator[Callable[[], Tensor]]:
    """Hook the target's layers; the value is a function that returns the last forward's features `[N, F * E]` of row 0."""
    layers, kept = target.get_decoder().layers, {}

    def keep(i: int) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            kept[i] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [layers[i].register_forward_hook(keep(i)) for i in layer_ids]
    try:
        yield lambda: torch.cat([kept[i][0] for i in layer_ids], dim=-1)
    finally:
        for handle in handles:
            handle.remove()
