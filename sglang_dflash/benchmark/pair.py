"""Plain decoding and DFlash over Transformers, on the same prompts, timed without the prefill."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from sglang_dflash.bench.encoding import encode_turn
from sglang_dflash.bench.prompt import Prompt
from sglang_dflash.benchmark.arguments import Settings
from sglang_dflash.drafting.options import Options
from sglang_dflash.transformers_loop.generate import Loaded
from sglang_dflash.transformers_loop.generation import (
    Choose,
    Prefill,
    prefill,
    sampler,
    spec_generate,
)
from sglang_dflash.transformers_loop.target_cache import TargetCache

T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """One turn of a prompt.

    Attributes:
        tokens: DFlash's answer, the first one by the prefill.
        committed: tokens of the answer that each verify step gave.
        accepted: the same with what the last step accepted beyond its end.
        same: whether plain decoding gives the same answer; None if tokens are sampled.
        plain_s, dflash_s: seconds per token, without the target's prefill.
    """

    prompt: int
    turn: int
    text: str
    tokens: list[int]
    committed: list[int]
    accepted: list[int]
    same: bool | None
    plain_s: float
    dflash_s: float


@torch.inference_mode()
def plain_generate(
    target: Any, start: Prefill, max_new_tokens: int, stops: tuple[int, ...], choose: Choose
) -> list[int]:
    """Decode token by token after a prefill, which is left as it was."""
    length = len(start.target_hidden)
    cache, next_token = TargetCache(target, start.kv), choose(start.logits)
    tokens = next_token.tolist()
    while len(tokens) < max_new_tokens and tokens[-1] not in stops:
        out = target(input_ids=next_token[None], past_key_values=cache.cache, use_cache=True)
        next_token = choose(out.logits[0])
        tokens += next_token.tolist()
    cache.reset(length)
    return tokens


class Runner:
    """Answers prompts by a pair in both ways."""

    def __init__(self, settings: Settings, pair: Loaded, options: Options) -> None:
        self.settings, self.pair, self.options = settings, pair, options

    def warm_up(self, prompt: Prompt, tokens: int) -> None:
        """Do once what the first measured answer would otherwise pay for."""
        self._turn(0, prompt, [], tokens)

    def converse(self, index: int, prompt: Prompt) -> list[Measured]:
        """All turns of a prompt; a turn continues DFlash's answers to those before it."""
        done: list[Measured] = []
        for _ in prompt.turns:
            answers = [one.text for one in done]
            done.append(self._turn(index, prompt, answers, self.settings.max_new_tokens))
        return done

    def _turn(self, index: int, prompt: Prompt, answers: list[str], limit: int) -> Measured:
        pair, stops = self.pair, self.pair.stop_token_ids
        ids = encode_turn(pair.tokenizer, prompt, answers, self.settings.enable_thinking)
        start = prefill(pair.draft, pair.target, torch.tensor([ids], device=pair.device))

        def plain() -> list[int]:
            return plain_generate(pair.target, start, limit, stops, self._choose(index))

        def dflash() -> Any:
            return spec_generate(
                pair.draft,
                pair.target,
                start,
                limit,
                options=self.options,
                stop_token_ids=stops,
                choose=self._choose(index),
            )

        # The order changes from prompt to prompt, like the arms of `sglang-dflash bench`.
        if index % 2:
            out, dflash_s = self._timed(dflash)
            tokens, plain_s = self._timed(plain)
        else:
            tokens, plain_s = self._timed(plain)
            out, dflash_s = self._timed(dflash)
        return Measured(
            index,
            len(answers),
            pair.tokenizer.decode(out.tokens, skip_special_tokens=True),
            out.tokens,
            out.committed,
            out.accepted,
            None if self.settings.temperature else tokens == out.tokens,
            plain_s / len(tokens),
            dflash_s / len(out.tokens),
        )

    def _choose(self, index: int) -> Choose:
        """A sampler whose seed depends on the prompt, not on the rank that answers it."""
        generator = torch.Generator(self.pair.device).manual_seed(self.settings.seed + index)
        of = self.settings
        return sampler(of.temperature, of.top_k or 0, of.top_p, generator=generator)

    def _timed(self, run: Callable[[], T]) -> tuple[T, float]:
        self._synchronize()
        began = time.perf_counter()
        result = run()
        self._synchronize()
        return result, time.perf_counter() - began

    def _synchronize(self) -> None:
        if self.pair.device.type == "cuda":
            torch.cuda.synchronize(self.pair.device)
