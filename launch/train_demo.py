"""Train an embedded demo pair and measure it.

    python launch/train_demo.py --work WORK --out launch/demo_models/dense

Stages: tokenizer, target, memorizing, drafter, card. An interrupted stage resumes. About two
CPU-hours in total on one core.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from demo_training import card, data, drafter, target  # noqa: E402

from sglang_dflash.drafting.weights import load_model  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=["dense", "hybrid"], default="dense")
    parser.add_argument(
        "--work", type=Path, required=True, help="folder of the resumable training state"
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder that gets target/, draft/, prompts.json and the model card",
    )
    parser.add_argument("--target-steps", type=int, default=600)
    parser.add_argument("--memorise-steps", type=int, default=300)
    parser.add_argument("--drafter-steps", type=int, default=1600)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)

    corpus = data.load_corpus()
    tokenizer_file = args.work / "tokenizer.json"
    if not tokenizer_file.exists():
        data.train_tokenizer(corpus).save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    if not (args.out / "target").exists():
        trained = target.train_target(
            args.kind, corpus, tokenizer, args.work, args.target_steps, args.memorise_steps
        )
        target.save_target(trained, tokenizer, args.out / "target")
    # The drafter learns from the target as served: weights rounded to the checkpoint's dtype.
    model = target.load_target(args.out / "target")
    if not (args.out / "draft").exists():
        drafter.train_drafter(
            corpus, model, tokenizer, args.work, args.out / "draft", args.drafter_steps
        )
    training = (
        f"target {args.target_steps} + {args.memorise_steps} steps, "
        f"draft {args.drafter_steps} steps, CPU only."
    )
    draft = load_model(args.out / "draft", dtype=torch.float32)
    card.write_card(args.kind, corpus, model, draft, tokenizer, args.out, {"training": training})


if __name__ == "__main__":
    main()
