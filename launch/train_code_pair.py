"""Train a demo pair on library code, and measure it on files that it has not seen.

    python launch/train_code_pair.py --work WORK --out PAIR

The pairs in launch/demo_models were made at commit b951dd7, the code pair by this recipe with the
files in another order.

Stages: target, continuations, draft (DFlash v1), dflash2 (it starts from that one), card. A stage
whose result is there is skipped, and an interrupted one resumes. Everything runs on one core.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from launch.demo_training import card, data, pair

STAGES = ("target", "continuations", "draft", "dflash2", "card")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of the training state")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder that gets target/, draft/, prompts.json and the model card",
    )
    parser.add_argument("--until", choices=STAGES, default="card", help="the last stage to run")
    parser.add_argument("--target-steps", type=int, default=1300, help="of 7 x 448 tokens")
    parser.add_argument("--shards", type=int, default=80, help="of 128 continuations")
    parser.add_argument("--draft-steps", type=int, default=4000)
    parser.add_argument("--dflash2-steps", type=int, default=1200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    split = data.load_split()
    print(f"split {split.digest()}: {len(split.train)} files, {len(split.held_out)} held out")
    print(f"left out as near copies: {', '.join(split.near_copies) or 'none'}", flush=True)
    tokenizer = pair.make_tokenizer(split, args.work)
    stages = {
        "target": lambda: pair.make_target(
            split, tokenizer, args.work, args.out, args.target_steps
        ),
        "continuations": lambda: pair.make_continuations(
            split, tokenizer, args.work, args.out, args.shards
        ),
        "draft": lambda: pair.make_draft(tokenizer, args.work, args.out, args.draft_steps),
        "dflash2": lambda: pair.make_dflash2(args.work, args.out, args.dflash2_steps),
        "card": lambda: card.write_card(args.out, split, tokenizer, pair.cpu_seconds(args.work)),
    }
    for name in STAGES[: STAGES.index(args.until) + 1]:
        stages[name]()
        print(f"{name}: done", flush=True)


if __name__ == "__main__":
    main()
