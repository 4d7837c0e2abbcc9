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
    "concurrency": "--concurrency --max-concurrency",
    "seed": "--seed",
    "num_prompts": "--num-prompts",
    "max_new_tokens": "--max-new-tokens",
    "rounds": "--rounds",
    "temperature": "--temperature",
    "top_p": "--top-p",
    "top_k": "--top-k",
    "thinking": "--thinking",
    "simulated_acceptance": "--simulated-acceptance",
    "dtype": "--dtype",
    "out": "--out",
    "picture": "--picture",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "sglang-dflash bench [options] [-- FLAGS of every server that is started]"
    large = {k: f"{v}; {getattr(BenchSettings, k)} on a CPU" for k, v in ON_ACCELERATOR.items()}
    add_flags(parser, BenchSettings, NAMES, {"pair": "dense", **large})


def run(args: argparse.Namespace) -> None:
    from sglang_dflash.bench import compare
    from sglang_dflash.bench.load import RequestFailed
    from sglang_dflash.bench.server import ServerFailed, sigterm_as_exit

    try:
        with sigterm_as_exit():
            compare.main(given(args, BenchSettings))
    except (compare.OutputsDiffer, RequestFailed, ServerFailed) as error:
        raise Failed(str(error)) from error
