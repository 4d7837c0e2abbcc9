"""Train the target of the `code` pair.

    python launch/train_code_pair.py --work WORK --out OUT

Runs on one core. State is saved under WORK every minute, and an interrupted run resumes from it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from demo_training import code_pair, data  # noqa: E402
from demo_training.card import mean_loss  # noqa: E402
from demo_training.split import load_split  # noqa: E402
from demo_training.target import load_target, save_target  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder of the training state")
    parser.add_argument("--out", type=Path, required=True, help="folder that gets target/")
    parser.add_argument("--begin", type=Path, help="a target checkpoint to continue from")
    parser.add_argument("--steps", type=int, default=1300, help="of 7 x 448 tokens")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    split = load_split()
    print(f"split {split.digest()}: {len(split.train)} files, {len(split.held_out)} held out")
    print(f"left out as near copies: {', '.join(split.near_copies) or 'none'}", flush=True)
    file = (args.begin or args.work) / "tokenizer.json"
    if not file.exists():
        texts = [split.train[name] for name in sorted(split.train)]
        data.train_bpe(texts, code_pair.VOCAB_SIZE).save(str(file))
    tokenizer = Tokenizer.from_file(str(file))
    stream = data.token_stream(tokenizer, split.train)
    target = code_pair.train_target(stream, tokenizer, args.work, args.steps, args.begin)
    save_target(target, tokenizer, args.out / "target")
    held_out = data.token_stream(tokenizer, split.held_out)
    per_token = mean_loss(load_target(args.out / "target"), tokenizer, split.held_out)
    per_byte = per_token * len(held_out) / sum(len(t.encode()) for t in split.held_out.values())
    print(f"held-out loss: {per_token:.3f} nats per token, {per_byte:.3f} per byte")


if __name__ == "__main__":
    main()
