"""`sglang-dflash bench`: arms side by side on the same prompts, warm and in turns, and a report that only exists if they agree."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sglang_dflash.bench import load, measure, picture, report
from sglang_dflash.bench.arms import Arm, arms_of, opened
from sglang_dflash.bench.datasets import Prompt, from_file, select
from sglang_dflash.bench.datasets import load as load_dataset
from sglang_dflash.bench.gate import OutputsDiffer, Runs, differences
from sglang_dflash.bench.settings import Settings, default_cache
from sglang_dflash.checkpoint.embedded import demo_pair
from sglang_dflash.checkpoint.errors import ConfigError

WARM_UP_TOKENS = 16

# Says a conversation's next turn to an endpoint: prompt, then the answers so far.
Ask = Callable[[load.Endpoint, Prompt, list[str]], load.Answer]


class Comparison:
    """The passes of one comparison, as they are made."""

    def __init__(
        self,
        settings: Settings,
        arms: list[Arm],
        prompts: dict[str, list[Prompt]],
        ask: Ask,
        warm: Ask,
    ) -> None:
        self.settings, self.arms, self.prompts = settings, arms, prompts
        self._ask, self._warm = ask, warm
        self.runs: Runs = {}
        self.kept_prefixes: set[str] = set()

    @property
    def first_arm(self) -> str:
        return self.arms[0].name

    def measure(self, progress: Progress) -> None:
        """All arms at once and taking turns, or one after another. Raises OutputsDiffer, ServerFailed, RequestFailed."""
        assert self.settings.rounds is not None
        answers = (
            sum(map(len, self.prompts.values()))
            * len(self.settings.levels)
            * len(self.arms)
            * self.settings.rounds
        )
        task = progress.add_task("starting", total=answers)
        for group in [[arm] for arm in self.arms] if self.settings.in_turn else [self.arms]:
            progress.update(task, description=f"starting {', '.join(arm.name for arm in group)}")
            with opened(group) as endpoints:
                for dataset in self.prompts:
                    for concurrency in self.settings.levels:
                        self._level(endpoints, dataset, concurrency, progress, task)

    def _level(
        self,
        endpoints: dict[str, load.Endpoint],
        dataset: str,
        concurrency: int,
        progress: Progress,
        task: Any,
    ) -> None:
        assert self.settings.rounds is not None
        prompts, passes = self.prompts[dataset], self.runs.setdefault((dataset, concurrency), {})
        for name, to in endpoints.items():
            progress.update(task, description=f"{dataset}, {concurrency} at a time: warming {name}")
            load.run(to, prompts[:concurrency], concurrency, self._warm)
        for i in range(self.settings.rounds):
            # Whoever was first is last in the next round: a machine that slows down slows them alike.
            for name in list(endpoints)[:: -1 if i % 2 else 1]:
                progress.update(task, description=f"{dataset}, {concurrency} at a time: {name}")
                if not endpoints[name].flush():
                    self.kept_prefixes.add(name)
                done = load.run(
                    endpoints[name], prompts, concurrency, self._ask, lambda: progress.advance(task)
                )
                passes.setdefault(name, []).append(done)
        self._check()

    def _check(self) -> None:
        if self.settings.simulated_acceptance is not None:
            # Outputs by decree are nobody's to judge, and the report says so.
            return
        found = differences(self.runs, self.first_arm)
        # Near-ties of a rounded dtype may fall either way; in float32 nothing may.
        if found and self.settings.dtype == "float32":
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise OutputsDiffer(
                f"{found[0]}{more}; no figure without equal outputs. If these servers do not compute in float32, say so with --dtype"
            )


def load_prompts(settings: Settings) -> dict[str, list[Prompt]]:
    """Prompts by data set. Raises ConfigError, also where there are fewer prompts than clients."""
    assert settings.num_prompts is not None
    if settings.dataset_file is not None:
        path = Path(settings.dataset_file)
        found = {path.stem: select(from_file(path), settings.num_prompts)}
    else:
        cache = Path(settings.cache_dir) if settings.cache_dir else default_cache()
        found = {
            name: load_dataset(name, settings.num_prompts, model=settings.model, cache=cache)
            for name in settings.dataset
        }
    for name, prompts in found.items():
        if len(prompts) < max(settings.levels):
            raise ConfigError(
                f"--concurrency: {max(settings.levels)} clients, but {name} has {len(prompts)} prompts; see --num-prompts"
            )
    return found


def encoder(
    settings: Settings, prompts: dict[str, list[Prompt]]
) -> Callable[[Prompt, list[str]], load.Input]:
    """How a turn becomes what is sent: token ids, so that all arms read the same, or text where no tokenizer is known.

    Raises:
        ConfigError: a chat, but no tokenizer or no chat template.
    """
    chats = any(prompt.chat for many in prompts.values() for prompt in many)
    if settings.thinking is not None and not chats:
        raise ConfigError(
            f"--thinking: {settings.thinking!r}, but none of {', '.join(prompts)} goes through a chat template"
        )
    source = str(demo_pair(settings.model).target) if settings.model else settings.target
    if source is None:
        if chats:
            raise ConfigError(
                "--target: missing; chats need the chat template of the model that the servers run"
            )
        return lambda prompt, _said: prompt.turns[0]
    from transformers import AutoTokenizer

    from sglang_dflash.hf.generation import chat_tokens

    tokenizer = AutoTokenizer.from_pretrained(source)
    thinking = None if settings.thinking is None else settings.thinking == "on"

    def encode(prompt: Prompt, said: list[str]) -> load.Input:
        if not prompt.chat:
            return tokenizer(prompt.turns[0])["input_ids"]
        messages = []
        for turn, answer in zip(prompt.turns, said, strict=False):
            messages += [
                {"role": "user", "content": turn},
                {"role": "assistant", "content": answer},
            ]
        return chat_tokens(
            tokenizer, [*messages, {"role": "user", "content": prompt.turns[len(said)]}], thinking
        )

    for many in prompts.values():
        # A template that is missing is told before a server starts.
        encode(many[0], [])
    return encode


def compare(settings: Settings, accelerator: bool, progress: Progress) -> dict[str, Any]:
    """Measure resolved settings; the report as one object. Raises as `Comparison.measure`, and ConfigError."""
    arms, prompts = arms_of(settings, accelerator), load_prompts(settings)
    encode = encoder(settings, prompts)

    def asking(max_new_tokens: int) -> Ask:
        def ask(to: load.Endpoint, prompt: Prompt, said: list[str]) -> load.Answer:
            # A chat ends where the model ends it; a text that is merely continued has no end.
            ignore_eos = not prompt.chat if settings.ignore_eos is None else settings.ignore_eos
            return to.ask(encode(prompt, said), max_new_tokens, ignore_eos)

        return ask

    assert settings.max_new_tokens is not None
    warm = asking(min(WARM_UP_TOKENS, settings.max_new_tokens))
    comparison = Comparison(settings, arms, prompts, asking(settings.max_new_tokens), warm)
    comparison.measure(progress)
    return report.summed_up(
        settings,
        [arm.name for arm in arms],
        {name: len(many) for name, many in prompts.items()},
        comparison.runs,
        sorted(comparison.kept_prefixes),
        measure.hardware(),
    )


def main(settings: Settings) -> None:
    """Compare, print card and table, write DIR/results.json, table.md and throughput.png; the last line is the JSON object."""
    import torch

    # Whatever would spoil the end is told at the beginning.
    picture.check()
    out = Path(settings.out)
    out.mkdir(parents=True, exist_ok=True)
    accelerator = torch.cuda.is_available()
    settings = settings.resolve(accelerator)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        result = compare(settings, accelerator, progress)
    (out / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / "table.md").write_text(report.markdown(result))
    picture.draw(result, out / "throughput.png")
    print(*report.card(result), sep="\n")
    # A pipe has no width of its own.
    Console(width=max(Console().width, 120)).print(report.table(result))
    print(f"written to {out}: results.json, table.md, throughput.png")
    print(json.dumps(result))
