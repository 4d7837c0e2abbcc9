"""`sglang-dflash bench`: arms side by side on the same prompts, warm and in turns.

A report is written only if their outputs agree.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_dflash.bench import datasets, load, picture, report
from sglang_dflash.bench.arms import Arms, arms_of, opened
from sglang_dflash.bench.gate import OutputsDiffer, Runs, differences
from sglang_dflash.bench.hardware import hardware
from sglang_dflash.bench.progress import progress_bar
from sglang_dflash.bench.prompt import Encode, Prompt, encoder
from sglang_dflash.bench.settings import BenchSettings
from sglang_dflash.facts.embedded import demo_pair
from sglang_dflash.facts.errors import ConfigError

WARM_UP_TOKENS = 16

# Data set -> its prompts.
Prompts = dict[str, list[Prompt]]


class Comparison:
    """The passes of one comparison, collected as they are made."""

    def __init__(
        self, settings: BenchSettings, arms: Arms, prompts: Prompts, encode: Encode
    ) -> None:
        self.settings, self.arms, self.prompts, self._encode = settings, arms, prompts, encode
        self.runs: Runs = {}
        self.kept_prefixes: set[str] = set()

    def measure(self) -> None:
        """Run all arms at once in turns, or one server after another.

        Raises:
            OutputsDiffer: an arm's answers are not the first arm's, in float32.
            ServerFailed, RequestFailed: a server cannot be started or asked.
        """
        settings, arms = self.settings, self.arms
        conversations = sum(map(len, self.prompts.values())) * len(settings.levels)
        groups = [{name: arms[name]} for name in arms] if settings.in_turn else [arms]
        with progress_bar(conversations * len(arms) * settings.rounds) as bar:
            for group in groups:
                bar.set_description(f"starting {', '.join(group)}")
                with opened(group, port=settings.port) as endpoints:
                    for dataset in self.prompts:
                        for concurrency in settings.levels:
                            self._level(endpoints, dataset, concurrency, bar)

    def _level(
        self, endpoints: Mapping[str, load.Endpoint], dataset: str, concurrency: int, bar: Any
    ) -> None:
        settings, prompts = self.settings, self.prompts[dataset]
        passes = self.runs.setdefault((dataset, concurrency), {})
        at = f"{dataset}, {concurrency} at a time"
        few = self._asking(min(WARM_UP_TOKENS, settings.max_new_tokens))
        for name, to in endpoints.items():
            bar.set_description(f"{at}: warming {name}")
            load.run(to, prompts[:concurrency], concurrency, few)
        # The same times in every pass.
        rate = settings.request_rate
        sent_at_s = None if rate is None else load.arrivals(len(prompts), rate, settings.seed)
        for i in range(settings.rounds):
            # The order reverses every round: a machine that slows down slows all arms alike.
            for name in list(endpoints)[:: -1 if i % 2 else 1]:
                bar.set_description(f"{at}: {name}, round {i + 1} of {settings.rounds}")
                if not endpoints[name].flush():
                    self.kept_prefixes.add(name)
                ask = self._asking(settings.max_new_tokens)
                done = load.run(endpoints[name], prompts, concurrency, ask, bar.update, sent_at_s)
                passes.setdefault(name, []).append(done)
        self._check()

    def _asking(
        self, max_new_tokens: int
    ) -> Callable[[load.Endpoint, Prompt, list[str]], load.Answer]:
        def ask(to: load.Endpoint, prompt: Prompt, answers: list[str]) -> load.Answer:
            # The model ends a chat; a text that is continued has no end.
            asked = self.settings.ignore_eos
            ignore_eos = not prompt.chat if asked is None else asked
            return to.ask(self._encode(prompt, answers), max_new_tokens, ignore_eos)

        return ask

    def _check(self) -> None:
        if self.settings.simulated_acceptance is not None:
            # Simulated acceptance changes the outputs; the report says so.
            return
        found = differences(self.runs, next(iter(self.arms)))
        # Near-ties of a rounded dtype may fall either way; float32 allows no difference.
        if found and self.settings.dtype == "float32":
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise OutputsDiffer(
                f"{found[0]}{more}; no figure without equal outputs. "
                "If these servers do not compute in float32, name their dtype with --dtype"
            )


def load_prompts(settings: BenchSettings) -> Prompts:
    """Prompts by data set.

    Raises:
        ConfigError: a data set cannot be loaded, or has fewer prompts than there are clients.
    """
    count = settings.num_prompts
    if settings.dataset_file is not None:
        path = Path(settings.dataset_file)
        found = {path.stem: datasets.select(datasets.from_file(path), count, settings.seed)}
    else:
        found = {
            name: datasets.load(
                name,
                count,
                model=settings.embedded,
                cache=settings.cache,
                seed=settings.seed,
            )
            for name in settings.datasets
        }
    for name, prompts in found.items():
        # With a request rate more clients than prompts are no limit, and that is the default.
        if len(prompts) < max(settings.levels) and settings.request_rate is None:
            required = f"{name} has {len(prompts)} prompts only; see {{num_prompts}}"
            raise ConfigError("concurrency", max(settings.levels), required)
    return found


def encode_of(settings: BenchSettings, prompts: Prompts) -> Encode:
    """How a turn and the answers so far become a request.

    Raises:
        ConfigError: a chat, but no tokenizer or no chat template; or thinking without a chat.
    """
    chats = any(prompt.chat for many in prompts.values() for prompt in many)
    if settings.thinking is not None and not chats:
        required = f"none of {', '.join(prompts)} goes through a chat template"
        raise ConfigError("thinking", settings.thinking, required)
    pair = settings.embedded
    source = str(demo_pair(pair).target) if pair else settings.target
    if source is None and chats:
        required = "chats need the chat template of the model that the servers run"
        raise ConfigError("target", required=required)
    encode = encoder(source, settings.thinking)
    for many in prompts.values():
        # A missing template is an error before a server starts.
        encode(many[0], [])
    return encode


def compare(settings: BenchSettings, accelerator: bool) -> dict[str, Any]:
    """Measure, and return the report as one object.

    Raises:
        ConfigError: an arm or a data set is not available.
        OutputsDiffer, ServerFailed, RequestFailed: see `Comparison.measure`.
    """
    arms, prompts = arms_of(settings, accelerator), load_prompts(settings)
    comparison = Comparison(settings, arms, prompts, encode_of(settings, prompts))
    comparison.measure()
    return report.summarize(
        settings,
        list(arms),
        {name: len(many) for name, many in prompts.items()},
        comparison.runs,
        sorted(comparison.kept_prefixes),
        hardware(),
    )


def main(given: Mapping[str, Any]) -> None:
    """Compare, print card, table and the report as one line of JSON, and write results.json and
    table.md.

    Args:
        given: fields of `BenchSettings`.
    """
    import torch

    accelerator = torch.cuda.is_available()
    settings = BenchSettings.for_machine(given, accelerator)
    # What would fail at the end fails at the beginning.
    if settings.picture:
        picture.check()
    out = Path(settings.out)
    out.mkdir(parents=True, exist_ok=True)
    if settings.output_file is not None:
        Path(settings.output_file).parent.mkdir(parents=True, exist_ok=True)
    result = compare(settings, accelerator)
    written = write(settings, out, result)
    if not settings.json:
        print(*report.card(result), sep="\n")
        # A pipe has no width of its own.
        Console(width=max(Console().width, 130)).print(report.table(result))
        print(f"written: {', '.join(map(str, written))}")
    print(json.dumps(result))


def write(settings: BenchSettings, out: Path, result: dict[str, Any]) -> list[Path]:
    """Write the files of a report; their paths."""
    results, table, drawn = out / "results.json", out / "table.md", out / "throughput.png"
    results.write_text(json.dumps(result, indent=1) + "\n")
    table.write_text(report.markdown(result, drawn.name if settings.picture else None))
    written = [results, table]
    if settings.picture:
        picture.draw(result, drawn)
        written.append(drawn)
    if settings.output_file is not None:
        # A line per run, as SGLang's bench_serving writes it.
        with Path(settings.output_file).open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        written.append(Path(settings.output_file))
    return written
