"""`sglang-dflash bench`."""

from __future__ import annotations

import argparse

from sglang_dflash.bench.settings import ON_ACCELERATOR, BenchSettings
from sglang_dflash.cli import Failed
from sglang_dflash.facts.command_line import add_flags, given

# Setting -> its flags.
NAMES = {
    "arms": "--arm",
    "base_url": "--base-url",
    "pair": "--model",
    "target": "--target",
    "draft": "--draft",
    "dataset": "--dataset --dataset-name",
    "dataset_file": "--dataset-file",
    "cache_dir": "--cache-dir",
    "concurrency": "--concurrency --max-concurrency",
    "request_rate": "--request-rate",
    "seed": "--seed",
    "block_size": "--block-size",
    "num_prompts": "--num-prompts",
    "max_new_tokens": "--max-new-tokens",
    "rounds": "--rounds",
    "thinking": "--thinking",
    "ignore_eos": "--ignore-eos",
    "simulated_acceptance": "--simulated-acceptance",
    "dtype": "--dtype",
    "in_turn": "--in-turn",
    "port": "--port",
    "out": "--out",
    "output_file": "--output-file",
    "picture": "--picture",
    "json": "--json",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "sglang-dflash bench [options] [-- FLAGS of every server that is started]"
    large = {k: f"{v}; {getattr(BenchSettings, k)} on a CPU" for k, v in ON_ACCELERATOR.items()}
    add_flags(parser, BenchSettings, NAMES, {"pair": "dense", **large})


def run(args: argparse.Namespace) -> None:
    from sglang_dflash.bench import compare
    from sglang_dflash.bench.gate import OutputsDiffer
    from sglang_dflash.bench.load import RequestFailed
    from sglang_dflash.bench.server import ServerFailed
    from sglang_dflash.bench.sigterm import sigterm_as_exit

    try:
        with sigterm_as_exit():
            compare.main(given(args, BenchSettings))
    except (OutputsDiffer, RequestFailed, ServerFailed) as error:
        raise Failed(str(error)) from error
