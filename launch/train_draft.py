"""Train a draft for a chat model that Transformers loads, on one machine.

    python launch/train_draft.py --target FOLDER --work WORK --out DRAFT

Stages: text (the target writes chats, or answers --prompts), states (the draft's inputs), draft
(DFlash v1), dflash2 (if --dflash2 is given; it starts from the v1 draft), card. A stage whose
result exists is skipped, and an interrupted one resumes: run the same command again. More --shards
or --steps (or --minutes) continue from the existing state. It runs on one GPU, where states are
kept in memory only, or on one core of a CPU. SIGTERM saves the state of training and ends it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from launch.draft_training import card, text
from launch.draft_training.loop import TrainingLimit
from launch.draft_training.recipe import Recipe
from sglang_dflash.common.command_line import flag_of
from sglang_dflash.common.errors import ConfigError, cut
from sglang_dflash.common.machine import reach_this_machine
from sglang_dflash.tools.bench import datasets
from sglang_dflash.tools.bench.settings import require_positive
from sglang_dflash.tools.transformers_loop.checks import find_device

STAGES = ("text", "states", "draft", "dflash2", "card")
COUNTS = ("shards", "chats", "steps", "minutes", "dflash2_steps", "milestone", "max_state_gib")
STEPS, MILESTONE = 4000, {"cpu": 600, "cuda": 60}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", type=Path, required=True, help="folder of a chat model")
    add("--work", type=Path, required=True, help="folder of the training state")
    add("--out", type=Path, required=True, help="folder that gets the draft and its card")
    add("--start", type=Path, help="a draft of this recipe to go on with")
    add("--dflash2", type=Path, help="folder that gets a DFlash2 draft")
    add("--prompts", type=Path, help="JSONL of prompts to answer, as of bench --dataset-file")
    add(
        "--held-out",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="JSONL of prompts that are measured and never trained on, beside the built-in chat",
    )
    add(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cuda or cpu (default: cuda if there is a GPU)",
    )
    add("--only", choices=STAGES, help="the only stage to run")
    add("--shards", type=int, default=10, help="of the text (default: %(default)s)")
    add(
        "--server",
        action="append",
        default=[],
        metavar="URL",
        help="an SGLang server of the target that writes the text; given again, the first one "
        "writes what is greedy, the others what is sampled",
    )
    add("--chats", type=int, help="of a shard (default: 512, on a GPU 2048)")
    add("--steps", type=int, help="of the v1 draft (default: 4000, unless there are --minutes)")
    add("--minutes", type=float, help="of the v1 draft's training, if --steps do not end it before")
    add("--dflash2-steps", type=int, default=1000, help="of the other (default: %(default)s)")
    add(
        "--milestone",
        type=float,
        help="seconds from one to the next (default: 600, on a GPU 60)",
    )
    add(
        "--max-state-gib",
        type=float,
        help="of states in a GPU's memory; further text is left out (default: 60 %% of it)",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    torch.set_num_threads(1)
    reach_this_machine()
    try:
        require_positive(args, *COUNTS)
        args.device = find_device("device", args.device)
        if args.device.type not in MILESTONE:
            raise ConfigError("device", str(args.device), f"choose one of {', '.join(MILESTONE)}")
        held_out = {"chat": datasets.load("chat", datasets.ALL)}
        for argument in args.held_out:
            name, _, file = argument.partition("=")
            if not file or name in held_out:
                required = "NAME=FILE is required, with a name that no other set has"
                raise ConfigError("held_out", argument, required)
            held_out[name] = read_prompts("held_out", Path(file))
        prompts = read_prompts("prompts", args.prompts) if args.prompts else ()
        recipe = Recipe(args.target, args.work, prompts, held_out, args.device, start=args.start)
        if args.max_state_gib:
            recipe.max_state_bytes = args.max_state_gib * 2**30
        run(args, recipe)
    except ConfigError as error:
        flags = {name: flag_of(name) for name in vars(args)}
        raise SystemExit(f"train_draft: {error.named(flags)}") from error
    except (ValueError, OSError) as error:
        raise SystemExit(f"train_draft: {cut(str(error))}") from error


def read_prompts(field: str, file: Path) -> list[datasets.Prompt]:
    """Read a file of prompts. Raises ConfigError about `field`."""
    try:
        return datasets.from_file(file)
    except ConfigError as error:
        raise error.named({"dataset_file": field}) from error


def run(args: argparse.Namespace, recipe: Recipe) -> None:
    every = args.milestone or MILESTONE[args.device.type]
    seconds = 60 * args.minutes if args.minutes else float("inf")
    steps = args.steps or (float("inf") if args.minutes else STEPS)
    stages = {
        "text": lambda: recipe.write_text(
            args.shards, args.chats or text.CHATS[recipe.device.type], args.server
        ),
        "states": recipe.write_states,
        "draft": lambda: recipe.train(False, TrainingLimit(steps, seconds), every),
        "dflash2": lambda: (
            args.dflash2 and recipe.train(True, TrainingLimit(args.dflash2_steps), every)
        ),
        "card": lambda: [
            card.write(recipe, name, folder)
            for name, folder in (("draft", args.out), ("dflash2", args.dflash2))
            if folder
        ],
    }
    for name in STAGES:
        if args.only in (None, name):
            stages[name]()
            print(f"{name}: done", flush=True)


if __name__ == "__main__":
    main()
