"""`sglang-dflash bench`: arms side by side on the same prompts, warm and in turns.

A report is written only if their outputs agree.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_dflash.bench import load, measure, picture, report
from sglang_dflash.bench.arms import Arm, arms_of, opened
from sglang_dflash.bench.datasets import from_file, select
from sglang_dflash.bench.datasets import load as load_dataset
from sglang_dflash.bench.encoding import Encode, encoder
from sglang_dflash.bench.gate import OutputsDiffer, Runs, differences
from sglang_dflash.bench.progress import Progress, shown
from sglang_dflash.bench.prompt import Prompt
from sglang_dflash.bench.settings import GivenPair, ResolvedSettings, RunningServers, Settings
from sglang_dflash.facts.embedded import demo_pair
from sglang_dflash.facts.errors import ConfigError

WARM_UP_TOKENS = 16

# Sends a conversation's next turn to an endpoint: prompt, then the answers so far.
Ask = Callable[[load.Endpoint, Prompt, list[str]], load.Answer]


class Comparison:
    """The passes of one comparison, collected as they are made."""

    def __init__(
        self,
        settings: ResolvedSettings,
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

    @property
    def steps(self) -> int:
        """Conversations of all passes."""
        prompts = sum(map(len, self.prompts.values()))
        return prompts * len(self.settings.levels) * len(self.arms) * self.settings.rounds

    def measure(self, progress: Progress) -> None:
        """Run all arms at once in turns, or one server after another.

        Raises:
            OutputsDiffer: an arm's answers are not the first arm's, in float32.
            ServerFailed, RequestFailed: a server cannot be started or asked.
        """
        for group in [[arm] for arm in self.arms] if self.settings.in_turn else [self.arms]:
            progress.describe(f"starting {', '.join(arm.name for arm in group)}")
            with opened(group, port=self.settings.port) as endpoints:
                for dataset in self.prompts:
                    for concurrency in self.settings.levels:
                        self._level(endpoints, dataset, concurrency, progress)

    def _level(
        self,
        endpoints: dict[str, load.Endpoint],
        dataset: str,
        concurrency: int,
        progress: Progress,
    ) -> None:
        prompts, passes = self.prompts[dataset], self.runs.setdefault((dataset, concurrency), {})
        at = f"{dataset}, {concurrency} at a time"
        for name, to in endpoints.items():
            progress.describe(f"{at}: warming {name}")
            load.run(to, prompts[:concurrency], concurrency, self._warm)
        for i in range(self.settings.rounds):
            # The order reverses every round: a machine that slows down slows all arms alike.
            for name in list(endpoints)[:: -1 if i % 2 else 1]:
                progress.describe(f"{at}: {name}, round {i + 1} of {self.settings.rounds}")
                if not endpoints[name].flush():
                    self.kept_prefixes.add(name)
                done = load.run(
                    endpoints[name],
                    prompts,
                    concurrency,
                    self._ask,
                    progress.advance,
                    self._sent_at_s(len(prompts)),
                )
                passes.setdefault(name, []).append(done)
        self._check()

    def _sent_at_s(self, count: int) -> list[float] | None:
        """When each prompt is sent: the same times in every pass."""
        rate = self.settings.request_rate
        return None if rate is None else load.arrivals(count, rate, self.settings.seed)

    def _check(self) -> None:
        if self.settings.simulated_acceptance is not None:
            # Simulated acceptance changes the outputs; the report says so.
            return
        found = differences(self.runs, self.first_arm)
        # Near-ties of a rounded dtype may fall either way; float32 allows no difference.
        if found and self.settings.dtype == "float32":
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise OutputsDiffer(
                f"{found[0]}{more}; no figure without equal outputs. "
                "If these servers do not compute in float32, name their dtype with --dtype"
            )


def load_prompts(settings: ResolvedSettings) -> dict[str, list[Prompt]]:
    """Prompts by data set.

    Raises:
        ConfigError: a data set cannot be loaded, or has fewer prompts than there are clients.
    """
    count = settings.num_prompts
    if settings.dataset_file is not None:
        path = settings.dataset_file
        found = {path.stem: select(from_file(path), count, settings.seed)}
    else:
        found = {
            name: load_dataset(
                name, count, model=settings.model, cache=settings.cache_dir, seed=settings.seed
            )
            for name in settings.dataset
        }
    for name, prompts in found.items():
        # With a request rate more clients than prompts are no limit, and that is the default.
        if len(prompts) < max(settings.levels) and settings.request_rate is None:
            raise ConfigError(
                f"--concurrency: {max(settings.levels)} clients, but {name} has "
                f"{len(prompts)} prompts; see --num-prompts"
            )
    return found


def encode_of(settings: ResolvedSettings, prompts: dict[str, list[Prompt]]) -> Encode:
    """How a turn and the answers so far become a request.

    Raises:
        ConfigError: a chat, but no tokenizer or no chat template; or thinking without a chat.
    """
    chats = any(prompt.chat for many in prompts.values() for prompt in many)
    if settings.thinking is not None and not chats:
        raise ConfigError(
            f"--thinking: {settings.thinking!r}, but none of {', '.join(prompts)} "
            "goes through a chat template"
        )
    source = _tokenizer(settings)
    if source is None and chats:
        raise ConfigError(
            "--target: missing; chats need the chat template of the model that the servers run"
        )
    thinking = None if settings.thinking is None else settings.thinking == "on"
    encode = encoder(source, thinking)
    for many in prompts.values():
        # A missing template is an error before a server starts.
        encode(many[0], [])
    return encode


def _tokenizer(settings: ResolvedSettings) -> str | None:
    """Folder or hub name of the target's tokenizer, if it is known."""
    if settings.model is not None:
        return str(demo_pair(settings.model).target)
    if isinstance(settings.served, GivenPair | RunningServers):
        return settings.served.target
    return None


def compare(settings: ResolvedSettings, accelerator: bool) -> dict[str, Any]:
    """Measure, and return the report as one object.

    Raises:
        ConfigError: an arm or a data set is not available.
        OutputsDiffer, ServerFailed, RequestFailed: see `Comparison.measure`.
    """
    arms, prompts = arms_of(settings, accelerator), load_prompts(settings)
    encode = encode_of(settings, prompts)

    def asking(max_new_tokens: int) -> Ask:
        def ask(to: load.Endpoint, prompt: Prompt, answers: list[str]) -> load.Answer:
            # The model ends a chat; a text that is continued has no end.
            ignore_eos = not prompt.chat if settings.ignore_eos is None else settings.ignore_eos
            return to.ask(encode(prompt, answers), max_new_tokens, ignore_eos)

        return ask

    warm = asking(min(WARM_UP_TOKENS, settings.max_new_tokens))
    comparison = Comparison(settings, arms, prompts, asking(settings.max_new_tokens), warm)
    with shown(comparison.steps) as progress:
        comparison.measure(progress)
    return report.summarize(
        settings,
        [arm.name for arm in arms],
        {name: len(many) for name, many in prompts.items()},
        comparison.runs,
        sorted(comparison.kept_prefixes),
        measure.hardware(),
    )


def main(settings: Settings) -> None:
    """Compare, print card and tables, and write results.json and table.md.

    With `json` the output is the report as one JSON object instead. With `picture`,
    throughput.png is written too.
    """
    import torch

    # What would fail at the end fails at the beginning.
    if settings.picture:
        picture.check()
    accelerator = torch.cuda.is_available()
    resolved = settings.resolve(accelerator)
    out = resolved.out
    out.mkdir(parents=True, exist_ok=True)
    if resolved.output_file is not None:
        resolved.output_file.parent.mkdir(parents=True, exist_ok=True)
    result = compare(resolved, accelerator)
    written = write(resolved, result)
    if resolved.json:
        print(json.dumps(result))
        return
    print(*report.card(result), sep="\n")
    for table in report.tables(result):
        # A pipe has no width of its own.
        Console(width=max(Console().width, 130)).print(table)
    print(f"written: {', '.join(map(str, written))}")


def write(settings: ResolvedSettings, result: dict[str, Any]) -> list[Path]:
    """Write the files of a report; their paths."""
    results, table = settings.out / "results.json", settings.out / "table.md"
    drawn = settings.out / "throughput.png" if settings.picture else None
    results.write_text(json.dumps(result, indent=1) + "\n")
    table.write_text(report.markdown(result, None if drawn is None else drawn.name))
    written = [results, table]
    if drawn is not None:
        picture.draw(result, drawn)
        written.append(drawn)
    if settings.output_file is not None:
        # A line per run, as SGLang's bench_serving writes it.
        with settings.output_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        written.append(settings.output_file)
    return written
