"""Train the embedded demo pair: python launch/train_demo.py --work /tmp/demo --out launch/demo_models/dense

Stages (each resumes where it was cut): tokenizer, target, memorise, drafter, card.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from demo_training import data, target  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the resumable training state")
    parser.add_argument("--out", type=Path, required=True, help="folder that gets target/ and draft/")
    parser.add_argument("--target-steps", type=int, default=800)
    parser.add_argument("--memorise-steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)

    corpus = data.load_corpus()
    tokenizer_file = args.work / "tokenizer.json"
    if not tokenizer_file.exists():
        data.train_tokenizer(corpus).save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    model = target.train_target(corpus, tokenizer, args.work, args.target_steps, args.memorise_steps)
    target.save_target(model, tokenizer, args.out / "target")


if __name__ == "__main__":
    main()
