"""The text of a draft's training: chats whose turns and answers the target writes.

After the user header of its chat template, an instruct model writes a user's turn (Magpie, arXiv
2406.08464). A shard is one batch of chats. It does not depend on earlier shards, and an
interruption loses at most one.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sglang_dflash.tools.bench.datasets import Prompt
from sglang_dflash.tools.transformers_loop.pair import chat_tokens

from .decoding import DecodingJob, Nucleus
from .writers import Writer

# Source of a chat -> its share, and openings of a user's turn, which the target continues.
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
# The end of half of the "math" turns.
REASON = "\n\nReason step by step, and put the final answer in \\boxed{}."
# Chats of a shard.
CHATS = {"cpu": 512, "cuda": 2048}
# One answer of three is sampled, the others are greedy; a quarter of the chats has a second turn.
SAMPLED, SECOND_TURN = 3, 0.25
TURNS, ANSWERS = Nucleus(0.9, 0.97), Nucleus(0.7, 0.97)
TURN_TOKENS, ANSWER_TOKENS = 160, 288
# Tokens of a repetition loop that are kept: the draft sees loops, but not too many of them.
LOOP_TOKENS = 24
# A text that shares this many words in a row with a held-out prompt is a near copy.
NEAR_COPY = 13
MARK = "\N{SNOWMAN}\N{SNOWMAN}"


@dataclass
class Chat:
    """Messages, and their tokens.

    Attributes:
        source: a key of `OPENINGS`, or the name of a set of prompts.
        sampled: whether answers are sampled; greedy otherwise.
        planned: the user's next turns.
        ids: token ids up to the last answer's end.
        answers: begin and end of every answer in `ids`.
        is_over: whether no turn follows.
    """

    source: str
    sampled: bool
    planned: list[str] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    answers: list[tuple[int, int]] = field(default_factory=list)
    is_over: bool = False

    @property
    def row(self) -> dict[str, Any]:
        # `kind` is the key in files that were written before.
        values = {name: getattr(self, name) for name in ("sampled", "ids", "answers")}
        return {"kind": self.source, **values}


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def grams(text: str) -> set[tuple[str, ...]]:
    """Return all runs of `NEAR_COPY` words; a shorter text is one run."""
    words = words_of(text)
    count = max(1, len(words) - NEAR_COPY + 1)
    return {tuple(words[i : i + NEAR_COPY]) for i in range(count)} if words else set()


def is_turn(text: str) -> bool:
    """Return whether a text looks like a user's turn in English. The target also writes others."""
    plain = sum(char.isascii() for char in text)
    has_whole_code = text.count("```") % 2 == 0
    return len(words_of(text)) >= 3 and plain >= 0.98 * len(text) and has_whole_code


class Author:
    """Writes chats.

    Args:
        writer: continues texts.
        ends: the tokens that end a text.
        held_out: prompts that no text may be a near copy of.
        loop_tokens: tokens of a repetition loop that are kept.
    """

    def __init__(
        self,
        writer: Writer,
        tokenizer: Any,
        ends: Collection[int],
        held_out: Sequence[Prompt] = (),
        loop_tokens: int = LOOP_TOKENS,
    ) -> None:
        self.writer, self.tokenizer, self.ends = writer, tokenizer, ends
        turns = [turn for prompt in held_out for turn in prompt.turns]
        self.held_out = {gram for turn in turns for gram in grams(turn)}
        self.loop_tokens = loop_tokens
        after = tokenizer(self._around_turn([])[1], add_special_tokens=False)["input_ids"]
        self.ends_of_turn = {*ends, *after[:1]}

    def shard(self, number: int, count: int, prompts: Sequence[Prompt]) -> list[Chat]:
        """Write a shard: answers to `prompts`, or chats whose turns the target writes, too."""
        torch.manual_seed(number)
        rng = random.Random(f"text-{number}")
        shares = [share for share, _ in OPENINGS.values()]
        chats = []
        for i in range(number * count, (number + 1) * count):
            sampled = rng.randrange(SAMPLED) == 0
            if prompts:
                # When all prompts have a greedy answer, further answers are sampled.
                turns = list(prompts[i % len(prompts)].turns)
                near = not all(map(self._is_new, turns))
                chats.append(Chat("prompts", sampled or i >= len(prompts), turns, is_over=near))
            else:
                chats.append(Chat(rng.choices(list(OPENINGS), shares)[0], sampled))
        if not prompts:
            self._plan(chats, rng)
        self.answer(chats, ANSWER_TOKENS)
        if not prompts:
            again = [chat for chat in chats if not chat.is_over and rng.random() < SECOND_TURN]
            self._plan(again, rng)
            self.answer(again, ANSWER_TOKENS)
        return [chat for chat in chats if chat.answers]

    def _is_new(self, text: str) -> bool:
        """Return whether a text is no near copy of a held-out prompt."""
        return self.held_out.isdisjoint(grams(text))

    def answer(self, chats: Sequence[Chat], tokens: int) -> None:
        """Answer all planned turns."""
        while unanswered := [chat for chat in chats if chat.planned and not chat.is_over]:
            self._answer_next(unanswered, tokens)

    def _around_turn(self, messages: list[dict[str, str]]) -> list[str]:
        """Return the template's text before and after a user's turn."""
        chat = [*messages, {"role": "user", "content": MARK}]
        how = {"tokenize": False, "add_generation_prompt": True}
        return self.tokenizer.apply_chat_template(chat, **how).split(MARK)

    def _plan(self, chats: list[Chat], rng: random.Random) -> None:
        """Let the target write the next turn of every chat. A chat without a good turn is over."""
        openings = ["" if chat.messages else rng.choice(OPENINGS[chat.source][1]) for chat in chats]
        jobs = []
        for chat, opening in zip(chats, openings, strict=True):
            text = self._around_turn(chat.messages)[0] + opening
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            jobs.append(DecodingJob(ids, TURN_TOKENS, sampled=True))
        self._write(jobs, self.ends_of_turn, TURNS)
        for chat, opening, job in zip(chats, openings, jobs, strict=True):
            text = (opening + self.tokenizer.decode(job.tokens[:-1])).strip()
            good = job.ended and is_turn(text) and self._is_new(text)
            if good and chat.source == "math" and not chat.messages and rng.random() < 0.5:
                text += REASON
            chat.planned, chat.is_over = [text] if good else [], not good

    def _answer_next(self, chats: list[Chat], tokens: int) -> None:
        for chat in chats:
            chat.messages.append({"role": "user", "content": chat.planned.pop(0)})
        prompts = [chat_tokens(self.tokenizer, chat.messages) for chat in chats]
        jobs = [
            DecodingJob(ids, tokens, chat.sampled) for chat, ids in zip(chats, prompts, strict=True)
        ]
        self._write(jobs, self.ends, ANSWERS)
        for chat, job in zip(chats, jobs, strict=True):
            text = self.tokenizer.decode(job.tokens, skip_special_tokens=True)
            chat.is_over = not self._is_new(text)
            if chat.is_over or len(job.tokens) < 2:
                continue
            chat.messages.append({"role": "assistant", "content": text})
            # If the template renders earlier turns in another way, their answers are dropped.
            same = job.prompt[: len(chat.ids)] == chat.ids
            span = (len(job.prompt), len(job.prompt) + len(job.tokens))
            chat.ids, chat.answers = job.prompt + job.tokens, [*chat.answers * same, span]
            chat.is_over = not job.ended and not chat.planned

    def _write(self, jobs: list[DecodingJob], ends: Collection[int], nucleus: Nucleus) -> None:
        self.writer.write(jobs, ends, nucleus, self.loop_tokens)


def write_shards(
    author: Author, folder: Path, count: int, chats: int, prompts: Sequence[Prompt]
) -> None:
    """Write the shards 0 to `count - 1` that are not in `folder` yet."""
    folder.mkdir(parents=True, exist_ok=True)

    def write_shard(number: int) -> None:
        began = author.writer.now()
        rows = [chat.row for chat in author.shard(number, chats, prompts)]
        spent = author.writer.now() - began
        lines = [{"chats": len(rows), "spent": spent}, *rows]
        file = folder / f"{number:04}.jsonl"
        file.with_suffix(".tmp").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        file.with_suffix(".tmp").replace(file)
        new = sum(end - begin for row in rows for begin, end in row["answers"])
        print(
            f"text {number + 1}/{count}: {len(rows)} chats of {chats}, {new} tokens of answers, "
            f"{spent:.0f} s",
            flush=True,
        )

    missing = [i for i in range(count) if not (folder / f"{i:04}.jsonl").exists()]
    with ThreadPoolExecutor(author.writer.shards_at_a_time) as pool:
        for _ in pool.map(write_shard, missing):
            pass
