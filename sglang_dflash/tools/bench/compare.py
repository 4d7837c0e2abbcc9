"""`sglang-dflash bench`: compare arms on the same prompts, warmed up and in turns.

A report is written only if the outputs of all arms agree.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from sglang_dflash.common.errors import ConfigError, Failed
from sglang_dflash.common.files import check_writable, make_folder, write_whole
from sglang_dflash.common.progress import progress_bar, waiting
from sglang_dflash.tools.bench import datasets, load, picture, report
from sglang_dflash.tools.bench.arms import Arms, arms_of, group_arms, open_endpoints
from sglang_dflash.tools.bench.compiled import measure_settled
from sglang_dflash.tools.bench.datasets import Encode, Prompt
from sglang_dflash.tools.bench.differences import differences, near_tie
from sglang_dflash.tools.bench.report import Measurements
from sglang_dflash.tools.bench.settings import BenchSettings
from sglang_dflash.tools.demo_pairs.pairs import demo_pair

# Data set -> its prompts.
Prompts = dict[str, list[Prompt]]
Ask = Callable[[load.Endpoint, Prompt, list[str]], load.Answer]


def main(fields: Mapping[str, Any]) -> None:
    """Compare, write results.json and table.md, and print one of them.

    Args:
        fields: fields of `BenchSettings`.

    Raises:
        ConfigError: an arm or a data set is not available.
        Failed: see `measure`.
    """
    import torch

    accelerator = torch.cuda.is_available()
    settings = BenchSettings.for_machine(fields, accelerator)
    # Check now what would otherwise fail after the measurement.
    if settings.picture:
        picture.check()
    out = make_folder("out", Path(settings.out))
    results, table = out / "results.json", out / "table.md"
    for file in (results, table):
        check_writable("out", file)
    arms, levels = arms_of(settings, accelerator), settings.levels
    prompts = load_prompts(settings, max(settings.num_prompts, *levels))
    groups = group_arms(settings, arms, accelerator)
    distinct = {name: len(drawn_prompts) for name, drawn_prompts in prompts.items()}
    # --num-prompts if it is given, and at least one prompt for each concurrent request.
    count = max(fields.get("num_prompts", 0), *levels)
    prompts = {
        name: datasets.repeat_prompts(drawn_prompts, count)
        for name, drawn_prompts in prompts.items()
    }
    encode = encode_of(settings, prompts)
    measured = measure(settings, groups, prompts, encode, start_times(results))
    counts = {name: len(sent_prompts) for name, sent_prompts in prompts.items()}
    result = report.summarize(settings, counts, distinct, measured)
    text, drawn = report.markdown(result), out / "throughput.png"
    # Written first: a reader of stdout, such as `head`, may be gone.
    write_whole(results, json.dumps(result, indent=1) + "\n")
    pictured = f"\n![throughput by concurrency]({drawn.name})\n" if settings.picture else ""
    write_whole(table, text + pictured)
    print(json.dumps(result) if settings.as_json else text)
    if settings.picture:
        picture.draw(result, drawn)


def start_times(results: Path) -> dict[str, float]:
    """Return the seconds that servers took to start in an earlier run, by arm; empty if its results
    are not there, or are none of ours."""
    try:
        times = json.loads(results.read_text(encoding="utf-8"))["start_s"]
        return {arm: float(seconds) for arm, seconds in times.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def load_prompts(settings: BenchSettings, count: int) -> Prompts:
    """At most `count` prompts of each data set, drawn by the seed.

    Raises:
        ConfigError: a data set cannot be loaded.
    """
    if settings.dataset_file is not None:
        path = Path(settings.dataset_file)
        return {path.stem: datasets.select(datasets.from_file(path), count, settings.seed)}
    return {
        name: datasets.load(name, count, model=settings.embedded, seed=settings.seed)
        for name in settings.datasets
    }


def encode_of(settings: BenchSettings, prompts: Prompts) -> Encode:
    """Return a function that encodes the next turn of a prompt, given the answers so far.

    Raises:
        ConfigError: a prompt is a chat, and there is no tokenizer or no chat template; or
            `thinking` is given, and no prompt is a chat.
    """
    chats = any(prompt.chat for prompts_of_set in prompts.values() for prompt in prompts_of_set)
    if settings.thinking is not None and not chats:
        required = f"none of {', '.join(prompts)} goes through a chat template"
        raise ConfigError("thinking", settings.thinking, required)
    pair = settings.embedded
    source = str(demo_pair(pair).target) if pair else settings.target
    if source is None and chats:
        required = "chats need the chat template of the model that the servers run"
        raise ConfigError("target", required=required)
    encode = datasets.encoder(source, settings.thinking)
    for prompts_of_set in prompts.values():
        # A missing chat template is an error before a server starts.
        encode(prompts_of_set[0], [])
    return encode


def measure(
    settings: BenchSettings,
    groups: list[Arms],
    prompts: Prompts,
    encode: Encode,
    last_times: Mapping[str, float],
) -> Measurements:
    """Run one group of servers after another. The arms of a group take turns.

    Args:
        last_times: arm -> seconds that its server took to start in an earlier run.

    Raises:
        Failed: an arm's answers differ from the first arm's where they must be equal, or a server
            does not start or does not answer.
    """
    measurements = Measurements(at_once=len(groups) == 1)
    simulated = settings.simulated_acceptance is not None
    ask_briefly = make_ask(encode, settings.warm_up_tokens, simulated)
    ask = make_ask(encode, settings.max_new_tokens, simulated)

    def level(name: str, concurrency: int, endpoints: Mapping[str, load.Endpoint]) -> None:
        passes = measurements.runs.setdefault((name, concurrency), {})
        label = f"{name}, {concurrency} at a time"
        for arm, server in endpoints.items():
            bar.set_description(f"{label}: warming {arm}")
            load.run(server, prompts[name][:concurrency], concurrency, ask_briefly)
        for i in range(settings.rounds):
            # Reverse the order every round, so that a machine that slows down slows all arms.
            for arm in list(endpoints)[:: -1 if i % 2 else 1]:
                bar.set_description(f"{label}: {arm}, round {i + 1} of {settings.rounds}")
                if not endpoints[arm].flush() and arm not in measurements.kept_prefixes:
                    measurements.kept_prefixes.append(arm)
                arguments = endpoints[arm], prompts[name], concurrency, ask, bar.update
                bench_pass = measure_settled(partial(load.run, *arguments), endpoints[arm].flush)
                passes.setdefault(arm, []).append(bench_pass)

    conversations = sum(map(len, prompts.values())) * len(settings.levels)
    arms = sum(map(len, groups))
    with progress_bar(conversations * arms * settings.rounds, steady=False) as bar:
        for group in groups:
            began, before = (
                time.monotonic(),
                [last_times[arm] for arm in group if arm in last_times],
            )
            with ExitStack() as servers:
                activity = f"{'asking' if settings.base_url else 'starting'} {', '.join(group)}"
                with waiting(bar, activity, max(before, default=None)):
                    endpoints = servers.enter_context(open_endpoints(group, settings))
                if not settings.base_url:
                    measurements.start_s |= dict.fromkeys(group, round(time.monotonic() - began, 1))
                measurements.servers |= {
                    arm: server.describe() for arm, server in endpoints.items()
                }
                for name in prompts:
                    for concurrency in settings.levels:
                        level(name, concurrency, endpoints)
                        find_near_ties(settings, measurements, prompts, encode, endpoints)
                        check_outputs(settings, measurements)
    return measurements


def make_ask(encode: Encode, max_new_tokens: int, simulated: bool) -> Ask:
    """Return a function that sends the next turn of a prompt."""

    def ask(server: load.Endpoint, prompt: Prompt, answers: list[str]) -> load.Answer:
        # A chat ends with a stop token. A text to continue has no end, nor has the random text of
        # simulated acceptance.
        ignore_eos = simulated or not prompt.chat
        return server.ask(encode(prompt, answers), max_new_tokens, ignore_eos)

    return ask


def find_near_ties(
    settings: BenchSettings,
    measured: Measurements,
    prompts: Prompts,
    encode: Encode,
    endpoints: Mapping[str, load.Endpoint],
) -> None:
    """For each arm whose answers differ, record whether the first differing token was a near-tie.
    Sampled answers are left out: their tokens depend on random numbers, too."""
    if settings.simulated_acceptance is not None or settings.temperature:
        return
    is_float32 = report.dtypes(settings, measured.servers) == {"float32"}
    for arm, places in differences(measured.runs).items():
        if arm in measured.near_ties or not places:
            continue
        difference = places[0]
        sent = encode(
            prompts[difference.dataset][difference.prompt],
            [answer.text for answer in difference.before],
        )
        tie = near_tie(difference, sent, endpoints, is_float32)
        if tie is not None:
            measured.near_ties[arm] = tie


def check_outputs(settings: BenchSettings, measured: Measurements) -> None:
    """Raise Failed if answers differ that must be equal."""
    # Simulated acceptance changes the outputs, and the report says so.
    if report.why_unequal(settings, measured.servers) or settings.simulated_acceptance is not None:
        return
    different = [place for places in differences(measured.runs).values() for place in places]
    if different:
        more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
        tie = measured.near_ties.get(different[0].arm)
        why = f"; {tie}" if tie else ""
        raise Failed(f"{different[0]}{more}{why}; no figure of float32 without equal outputs")
