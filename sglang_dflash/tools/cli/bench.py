"""`sglang-dflash bench`."""

from __future__ import annotations

import argparse
from collections.abc import Collection

from sglang_dflash.common.command_line import add_flags, given, spelled
from sglang_dflash.tools.bench.settings import ON_ACCELERATOR, BenchSettings

FLAGS = spelled(
    (
        "vllm", "base_url", "target", "draft", "dataset_file", "seed", "num_prompts",
        "max_new_tokens", "rounds", "temperature", "top_p", "top_k", "thinking",
        "simulated_acceptance", "dtype", "out", "picture",
    ),
    arms="--arm",
    pair="--model",
    as_json="--json",
    dataset="--dataset --dataset-name",
    concurrency="--concurrency --max-concurrency",
)  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "sglang-dflash bench [options] [-- FLAGS of every SGLang server that is started]"
    large = {k: f"{v}; {getattr(BenchSettings, k)} on a CPU" for k, v in ON_ACCELERATOR.items()}
    large["concurrency"] += " and for embedded pairs"
    add_flags(parser, BenchSettings, FLAGS, {"pair": "dense", **large})


def split(argv: list[str], _flags: Collection[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into those parsed here and the servers' flags."""
    end = argv.index("--") if "--" in argv else len(argv)
    return argv[:end], argv[end + 1 :]


def run(args: argparse.Namespace) -> None:
    from sglang_dflash.common.machine import reach_this_machine
    from sglang_dflash.tools.bench import compare
    from sglang_dflash.tools.bench.server import sigterm_as_exit

    reach_this_machine()
    with sigterm_as_exit():
        compare.main(given(args, BenchSettings))
