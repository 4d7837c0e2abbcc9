"""Acceptance of drafts of a code pair on its held-out prompts, a line for each.

    python launch/measure_drafts.py launch/demo_models/code draft ../code-dflash2/draft

Greedy, in float32 on one core, with the offline loop. Outside of repetition loops, over all steps,
and the share of tokens in loops: the figures of the pair's card.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from launch.demo_training import card, figures
from launch.demo_training.target import load_target
from sglang_dflash.drafting.weights import load_model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pair", type=Path, help="folder with target/ and prompts.json")
    parser.add_argument("drafts", nargs="+", help="folders, by their path from PAIR")
    parser.add_argument("--prompts", type=int, default=card.PROMPTS, help="the first so many")
    parser.add_argument("--new-tokens", type=int, default=card.NEW_TOKENS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    target = load_target(args.pair / "target")
    tokenizer = Tokenizer.from_file(str(args.pair / "target" / "tokenizer.json"))
    items = json.loads((args.pair / "prompts.json").read_text())[: args.prompts]
    prompts = [tokenizer.encode(item["prompt"]).ids for item in items]
    print("| draft | outside loops | all | tokens in loops |\n|---|---|---|---|")
    for name in args.drafts:
        draft = load_model(args.pair / name, dtype=torch.float32)
        answers = figures.answers_to(draft, target, prompts, args.new_tokens)
        outside = figures.acceptance(answers, in_loops=False)
        everywhere, share = figures.acceptance(answers), figures.loop_share(answers)
        print(f"| {name} | {outside:.2f} | {everywhere:.2f} | {share:.0%} |", flush=True)


if __name__ == "__main__":
    main()
