"""The text that a draft learns from: chats whose turns and answers the target writes itself.

An instruct model that is given only its template's user header writes a user's turn (Magpie, arXiv
2406.08464). A shard is one batch of chats: a cut loses one at most, and a shard does not depend on
those before it.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from sglang_dflash.bench.datasets import Prompt
from sglang_dflash.transformers_loop.pair import chat_tokens

from .writer import Job, Nucleus, write

# How a user's turn begins, by kind, and the share of the kind. What follows is the target's.
OPENINGS: dict[str, tuple[float, tuple[str, ...]]] = {
    "chat": (0.5, ("",)),
    "code": (
        0.27,
        (
            "Complete this Python function.\n\n```python\ndef ",
            "Complete this Python function.\n\n```python\nfrom typing import List\n\n\ndef ",
            "Complete this Python function.\n\n```python\nimport ",
            "Write a Python function",
            "Write a Python program that",
            "Write a function that takes a list",
            "Write a function that takes a string",
            "Implement",
            "Can you write a Python script",
            "What does this Python code do?\n\n```python\n",
            "Add type hints and a docstring to this function.\n\n```python\ndef ",
        ),
    ),
    "math": (
        0.23,
        (
            "Maria has", "Tom buys", "A shop sells", "A train", "There are", "How many", "If a",
            "Lena earns", "A baker", "Sam reads", "Each week,", "A rectangle", "Calculate",
            "A class of", "The price of", "In a garden", "Omar drives", "Nina saves", "A farmer",
        ),
    ),
}  # fmt: skip
# What half of the arithmetic turns end with.
REASON = "\n\nReason step by step, and put the final answer in \\boxed{}."
# Chats of a shard, and how many are decoded at a time.
CHATS, ROWS = 512, 256
# One answer of three is sampled, the others are greedy; a quarter of the chats has a second turn.
SAMPLED, SECOND_TURN = 3, 0.25
TURNS, ANSWERS = Nucleus(0.9, 0.97), Nucleus(0.7, 0.97)
TURN_TOKENS, ANSWER_TOKENS = 160, 288
# Of a repetition loop so many tokens are kept: the draft sees loops, but does not learn them only.
LOOP_TOKENS = 24
# A text that shares so many words in a row with a held-out prompt is a near copy.
NEAR_COPY = 13
MARK = "\N{SNOWMAN}\N{SNOWMAN}"


@dataclass
class Chat:
    """Messages, and their tokens.

    Attributes:
        kind: of `OPENINGS`, or "prompts" for the user's.
        sampled: how the answers are written.
        planned: the user's turns that follow.
        ids: token ids up to the last answer's end.
        answers: begin and end of every answer in `ids`.
        is_over: no turn follows.
    """

    kind: str
    sampled: bool
    planned: list[str] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    answers: list[tuple[int, int]] = field(default_factory=list)
    is_over: bool = False


class Turns:
    """Where a user's turn begins and ends in a chat template."""

    def __init__(self, tokenizer: Any, ends: Collection[int]) -> None:
        self.tokenizer = tokenizer
        after = self._parts([])[1]
        closing = tokenizer(after, add_special_tokens=False)["input_ids"]
        self.ends = {*ends, *closing[:1]}

    def _parts(self, messages: list[dict[str, str]]) -> list[str]:
        asked = [*messages, {"role": "user", "content": MARK}]
        text = self.tokenizer.apply_chat_template(
            asked, tokenize=False, add_generation_prompt=True
        )
        return text.split(MARK)

    def header(self, messages: list[dict[str, str]], opening: str) -> list[int]:
        """Token ids up to a turn that begins with `opening`."""
        text = self._parts(messages)[0] + opening
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def grams(text: str) -> set[tuple[str, ...]]:
    """All runs of `NEAR_COPY` words; all words of a shorter text."""
    words = words_of(text)
    count = max(1, len(words) - NEAR_COPY + 1)
    return {tuple(words[i : i + NEAR_COPY]) for i in range(count)} if words else set()


@dataclass(frozen=True)
class HeldOut:
    """Prompts that no text may be a near copy of."""

    grams: frozenset[tuple[str, ...]]

    @classmethod
    def of(cls, prompts: Sequence[Prompt]) -> HeldOut:
        return cls(frozenset(g for prompt in prompts for turn in prompt.turns for g in grams(turn)))

    def is_near(self, text: str) -> bool:
        return not self.grams.isdisjoint(grams(text))


def is_turn(text: str) -> bool:
    """Whether a text looks like what a user writes in English: the target writes others as well."""
    plain = sum(char.isascii() for char in text)
    fences = text.count("```")
    return len(words_of(text)) >= 3 and plain >= 0.98 * len(text) and fences % 2 == 0


class Author:
    """Writes shards of chats.

    Args:
        target: as `writer.fast_decoding` returns it.
        ends: the tokens that end a text.
        prompts: the user's; without them the target writes the turns.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: Any,
        ends: Collection[int],
        held_out: HeldOut,
        prompts: Sequence[Prompt] = (),
    ) -> None:
        self.target, self.tokenizer, self.ends = target, tokenizer, ends
        self.held_out, self.prompts = held_out, prompts
        self.turns = Turns(tokenizer, ends)

    def shard(self, number: int, chats: int) -> Iterator[Chat]:
        """The chats of a shard that have an answer."""
        torch.manual_seed(number)
        rng = random.Random(f"text-{number}")
        made = [self._begin(rng, number * chats + i) for i in range(chats)]
        while live := [chat for chat in made if not chat.is_over]:
            if not self.prompts:
                self._write_turns(live, rng)
            self._answer([chat for chat in live if chat.planned])
            for chat in live:
                again = bool(self.prompts) or len(chat.answers) < 2 and rng.random() < SECOND_TURN
                more = bool(chat.planned) if self.prompts else again
                chat.is_over = chat.is_over or not more
        return (chat for chat in made if chat.answers)

    def _begin(self, rng: random.Random, index: int) -> Chat:
        sampled = rng.randrange(SAMPLED) == 0
        if self.prompts:
            turns = self.prompts[index % len(self.prompts)].turns
            return Chat("prompts", sampled or index >= len(self.prompts), list(turns))
        kinds = [(kind, share) for kind, (share, _) in OPENINGS.items()]
        return Chat(rng.choices(*zip(*kinds, strict=True))[0], sampled)

    def _write_turns(self, chats: list[Chat], rng: random.Random) -> None:
        """Plan the next turn of every chat; a chat whose turn is not good is over."""
        openings = [
            rng.choice(OPENINGS[chat.kind][1]) if not chat.messages else "" for chat in chats
        ]
        jobs = [
            Job(self.turns.header(chat.messages, opening), TURN_TOKENS, sampled=True)
            for chat, opening in zip(chats, openings, strict=True)
        ]
        self._write(jobs, self.turns.ends, TURNS)
        for chat, opening, job in zip(chats, openings, jobs, strict=True):
            text = (opening + self.tokenizer.decode(job.tokens[:-1])).strip()
            good = job.ended and is_turn(text) and not self.held_out.is_near(text)
            if good and chat.kind == "math" and not chat.messages and rng.random() < 0.5:
                text += REASON
            chat.planned, chat.is_over = [text] if good else [], not good

    def _answer(self, chats: list[Chat]) -> None:
        for chat in chats:
            chat.messages.append({"role": "user", "content": chat.planned.pop(0)})
        asked = [chat_tokens(self.tokenizer, chat.messages) for chat in chats]
        jobs = [
            Job(ids, ANSWER_TOKENS, chat.sampled) for chat, ids in zip(chats, asked, strict=True)
        ]
        self._write(jobs, self.ends, ANSWERS)
        for chat, job in zip(chats, jobs, strict=True):
            text = self.tokenizer.decode(job.tokens, skip_special_tokens=True)
            if self.held_out.is_near(text):
                chat.is_over = True
                continue
            chat.messages.append({"role": "assistant", "content": text})
            # Of a later turn, the template renders what is before it.
            same = job.prompt[: len(chat.ids)] == chat.ids
            chat.answers = [*(chat.answers if same else []), (len(job.prompt), 0)]
            chat.ids = job.prompt + job.tokens
            chat.answers[-1] = (len(job.prompt), len(chat.ids))
            chat.is_over = not job.ended

    def _write(self, jobs: list[Job], ends: Collection[int], nucleus: Nucleus) -> None:
        write(self.target, jobs, ends, rows=ROWS, nucleus=nucleus, loop_tokens=LOOP_TOKENS)


def write_shards(author: Author, folder: Path, count: int, chats: int = CHATS) -> None:
    """Write the shards 0 to `count - 1` that are not in `folder` yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        file = folder / f"{number:04}.jsonl"
        if file.exists():
            continue
        began = time.process_time()
        found = list(author.shard(number, chats))
        rows = [
            {"kind": chat.kind, "sampled": chat.sampled, "ids": chat.ids, "answers": chat.answers}
            for chat in found
        ]
        spent = time.process_time() - began
        head = json.dumps({"chats": len(rows), "spent": spent})
        file.with_suffix(".tmp").write_text("\n".join([head, *map(json.dumps, rows)]) + "\n")
        file.with_suffix(".tmp").replace(file)
        new = sum(end - begin for row in rows for begin, end in row["answers"])
        print(
            f"text {number + 1}/{count}: {len(rows)} chats of {chats}, {new} tokens of answers, "
            f"{spent:.0f} CPU seconds",
            flush=True,
        )
