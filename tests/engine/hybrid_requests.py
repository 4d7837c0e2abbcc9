"""The prompts and chats that servers of recurrent targets answer. Every answer has its prompt."""

from __future__ import annotations

import functools
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sglang_dflash.bench.server import Server

NEW_TOKENS, BLOCK_SIZE = 40, 8
TURNS = 3

Answers = list[dict[str, Any]]


def prompts() -> list[list[int]]:
    """40 prompts: short ones, ones around the 64-token chunk of prefill, long ones, and ones that
    share a prefix of 300 tokens.

    Of the seeds tried, here and for the chats, these leave no two tokens equally likely (see CLEAR
    in test_hybrid.py).
    """
    rng = random.Random(4)
    lengths = [1, 2, 5, 17, 40, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 300] * 2
    separate = [[rng.randrange(1000) for _ in range(n)] for n in lengths]
    trunk = [rng.randrange(1000) for _ in range(300)]
    return separate + [trunk + [rng.randrange(1000) for _ in range(1 + i)] for i in range(8)]


def _answer(server: Server, prompt: list[int]) -> dict[str, Any]:
    answer = server.generate(prompt, temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    return {**answer, "prompt": prompt}


def hybrid_answers(server: Server) -> dict[str, Answers]:
    """To all prompts, eight at a time, the shared prefixes one after another; and to four chats of
    three turns."""

    one = functools.partial(_answer, server)

    def chat(index: int) -> Answers:
        """Every turn repeats the one before: its states were kept while it was decoded."""
        rng, text, done = random.Random(50 + index), [], []
        for _ in range(TURNS):
            text = text + [rng.randrange(1000) for _ in range(30 + 7 * index)]
            done.append(one(text))
            text = text + done[-1]["output_ids"]
        return done

    every = prompts()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, every[:-8])) + [one(prompt) for prompt in every[-8:]]
        chats = [turn for turns in pool.map(chat, range(4)) for turn in turns]
        return {"prompts": answers, "chats": chats}
