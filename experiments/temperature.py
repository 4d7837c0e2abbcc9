"""Acceptance length of sampled drafts by temperature, in the loop over Transformers.

Uses the built-in chat prompts on the `smollm2` pair, whose draft was not trained on them. `argmax`
drafts the likeliest tokens, as for greedy requests; `coupled` follows the target's random numbers
where that has guessed more tokens, in this answer or earlier ones. Both have seeds, and generate
the same text: if an answer differs, nothing is reported. `drawn` is for requests without a seed:
drafts are drawn from the draft's distribution, and its texts are others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.common.command_line import setting
from sglang_dflash.common.progress import progress_bar
from sglang_dflash.drafting.acceptance_length import VerifySteps
from sglang_dflash.tools.bench.datasets import encode_turn, load
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from sglang_dflash.tools.demo_pairs.public_target import KIND
from sglang_dflash.tools.transformers_loop import load as load_pair
from sglang_dflash.tools.transformers_loop import prefill, spec_generate
from sglang_dflash.tools.transformers_loop.generation import Sampler

# Temperature, top-p.
SETTINGS = ((1.0, 1.0), (0.7, 1.0), (0.6, 0.95))


@dataclass(frozen=True)
class Options:
    prompts: int = setting(60, "of the built-in data set chat (default: {default})")
    new_tokens: int = setting(128, "per prompt (default: {default})")


class ArgmaxDrafts(Sampler):
    """A sampler of the same tokens that does not pass its noise to the drafter."""

    def noise(self, length: Tensor) -> None:
        del length


ARMS: dict[str, Callable[..., Sampler]] = {
    "argmax": ArgmaxDrafts, "coupled": Sampler, "drawn": partial(Sampler, draws=True),
}  # fmt: skip


def run(options: Options) -> dict[str, Any]:
    """Raises RuntimeError if an answer depends on how it is drafted."""
    torch.set_num_threads(1)
    named, prompts = demo_pair(KIND), load("chat", options.prompts)
    pair = load_pair(str(named.target), str(named.draft), dtype="float32", device="cpu")
    counts = {(how, arm): VerifySteps() for how in SETTINGS for arm in ARMS}
    with progress_bar(len(prompts)) as bar:
        for seed, prompt in enumerate(prompts):
            ids = torch.tensor([encode_turn(pair.tokenizer, prompt, [], None)])
            start = prefill(pair.draft, pair.target, ids)
            for how in SETTINGS:
                answers = set()
                for arm, sampler in ARMS.items():
                    out = spec_generate(
                        pair.draft,
                        pair.target,
                        start,
                        options.new_tokens,
                        stop_token_ids=pair.stop_token_ids,
                        choose=sampler(how[0], 0, how[1], seed),
                    )
                    if arm != "drawn":
                        answers.add(tuple(out.tokens))
                    counts[how, arm] += VerifySteps(len(out.committed), sum(out.committed))
                if len(answers) > 1:
                    raise RuntimeError(f"prompt {seed}: its answer depends on how it is drafted")
            bar.update()
    rows = []
    for temperature, top_p in SETTINGS:
        lengths = {arm: counts[(temperature, top_p), arm].acceptance_length or 0 for arm in ARMS}
        row = {"temperature": temperature, "top_p": top_p, **lengths}
        row["gain"] = lengths["drawn"] / lengths["argmax"]
        rows.append({name: round(value, 3) for name, value in row.items()})
    return {"rows": rows}


def table(result: dict[str, Any]) -> list[str]:
    return [
        f"temperature {row['temperature']}, top-p {row['top_p']}: {row['argmax']:.3f} tokens per "
        f"step with argmax drafts, {row['coupled']:.3f} with coupled ones, {row['drawn']:.3f} with "
        f"drawn ones ({row['gain']:.3f} times)"
        for row in result["rows"]
    ]
