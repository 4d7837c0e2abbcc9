"""Requests to which all server configurations must give the same answers: each function sends some
of them and returns the answers, as a list or by kind."""

from __future__ import annotations

import functools
import inspect
import random
import shlex
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests

from sglang_dflash.drafting.acceptance_length import JUDGED_STEPS, VerifySteps, of_answer
from sglang_dflash.tools.bench.server import Server
from sglang_dflash.tools.demo_pairs.pairs import demo_pair
from tests.engine.client import GREEDY, ask, flush, together
from tests.engine.seeing import PLACE, picture

Answers = list[dict[str, Any]]
ByKind = dict[str, Answers]
NEW_TOKENS = GREEDY["max_new_tokens"]
# Tokens that DEVICE_LENGTHS takes of a prompt and its answer.
CONTEXT = 96
CONVERSATIONS, TURNS, BRANCHES = 10, 4, 12  # of which 8 run at a time
# New tokens of each of their answers, and what the first of them begins with.
CHAT_TOKENS, FIRST_TOKEN = 48, 200


def prompts() -> dict[str, list[str]]:
    """Return at least 60 prompts by their special property."""
    wrap, lex = inspect.getsource(textwrap), inspect.getsource(shlex)
    return {
        # One to about 40 tokens.
        "short": [wrap[i * 311 : i * 311 + 3 + 5 * i] for i in range(20)],
        # 300 to 1,100 tokens: longer than any draft window and prefill chunk that is configured.
        "long": [lex[i * 400 : i * 400 + 900 + 200 * i] for i in range(10)],
        "demo": demo_pair("dense").prompts[:16],
        # Three prefixes with five continuations each: all but the first of each find their prefix
        # cached.
        "shared prefix": [
            wrap[s : s + 1200] + f"\n    # {c}\n    def {c}"
            for s in (0, 2500, 5000)
            for c in ("a", "bc", "def", "g", "hi")
        ],
    }


def _at_once(server: Server, texts: Iterable[Any], clients: int = 8, **sampling: Any) -> Answers:
    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(lambda text: server.generate(text, **GREEDY | sampling), texts))


def _answers(server: Server, asked: dict[str, list[str]]) -> ByKind:
    """Ragged batches of 8, but the shared prefixes one after another."""
    return {
        name: _at_once(server, texts, 1 if name == "shared prefix" else 8)
        for name, texts in asked.items()
    }


def run(server: Server) -> ByKind:
    """All prompts."""
    return _answers(server, prompts())


def run_half(server: Server) -> ByKind:
    """Ask every second prompt of `run`: for servers that differ in one thing from one that answers
    them all."""
    return _answers(server, {name: texts[::2] for name, texts in prompts().items()})


def halved(answers: ByKind) -> ByKind:
    """Select those of `run`'s answers that `run_half` gives."""
    return {name: every[::2] for name, every in answers.items()}


def run_some(server: Server, each: int) -> ByKind:
    """Ask the first prompts of each kind of `run`."""
    return _answers(server, {name: texts[:each] for name, texts in prompts().items()})


def some_short_and_demo(server: Server) -> ByKind:
    """Ask a part of `run_half`'s prompts: for servers of several processes."""
    return _answers(server, {name: prompts()[name][::2] for name in ("short", "demo")})


def half_of_two(answers: ByKind) -> ByKind:
    """Select those of `run`'s answers that `some_short_and_demo` gives."""
    return {name: answers[name][::2] for name in ("short", "demo")}


def hang_ups(server: Server) -> Answers:
    """Every second client hangs up while the others decode, and batches change their size."""

    def one(at: int, text: str) -> dict[str, Any] | None:
        if at % 2 == 0:
            return server.generate(text, **GREEDY)
        body = {"text": text, "sampling_params": {**GREEDY, "max_new_tokens": 4000}}
        with requests.post(
            f"{server.url}/generate", json={**body, "stream": True}, stream=True
        ) as response:
            next(response.iter_lines())
        return None

    texts = prompts()["demo"][:8]
    return together(lambda i=i, t=t: one(i, t) for i, t in enumerate(texts))[::2]


def up_to_the_limit(server: Server) -> Answers:
    """Five prompts of different lengths at a time, each continued to the end of the context."""

    def one(text: str) -> dict[str, Any]:
        first = server.generate(text, **{**GREEDY, "max_new_tokens": 1})
        # SGLang takes no more than context length - 2 tokens of prompt and answer.
        left = CONTEXT - 2 - first["meta_info"]["prompt_tokens"]
        return server.generate(text, **{**GREEDY, "max_new_tokens": left})

    with ThreadPoolExecutor(5) as pool:
        return list(pool.map(one, prompts()["short"][::2]))


def many_steps(server: Server) -> Answers:
    """More verify steps than the alarm judges at once, if no draft is accepted."""
    return _at_once(server, prompts()["demo"][:8], max_new_tokens=5 * JUDGED_STEPS // 32)


@functools.cache
def pieces(pair: str) -> list[list[int]]:
    """Token ids of the demo prompts, of which chats are made."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_pair(pair).target)
    return [tokenizer(prompt)["input_ids"] for prompt in demo_pair(pair).prompts]


def chatted(server: Server, pair: str = "dense") -> ByKind:
    """Chats whose turns find their history cached, then prompts that branch from one trunk."""
    return {"chats": _chats(server, pieces(pair)), "branches": _branches(server, pieces(pair))}


def chatted_hybrid(server: Server) -> ByKind:
    return chatted(server, "hybrid")


def _chats(server: Server, texts: list[list[int]]) -> Answers:
    """Every turn continues its whole history, in a new order every turn."""
    rng, answers = random.Random(0), list[dict[str, Any]]()
    # Conversations have different first tokens: a request finds only its own history cached.
    histories = [[FIRST_TOKEN + i] for i in range(CONVERSATIONS)]
    for turn in range(TURNS):
        order = rng.sample(range(CONVERSATIONS), CONVERSATIONS)
        for i in order:
            text = texts[(i + 7 * turn) % len(texts)]
            histories[i] = histories[i] + text[: rng.randint(30, 150)]
        got = _at_once(server, [histories[i] for i in order], max_new_tokens=CHAT_TOKENS)
        for i, answer in zip(order, got, strict=True):
            histories[i] = histories[i] + answer["output_ids"]
        answers += got
    return answers


def _branches(server: Server, texts: list[list[int]]) -> Answers:
    """One long prompt, then many that share its first 400 tokens and end early.

    The draft K/V of the shared tokens was never computed, because the drafts of the first prompt
    could not see them.
    """
    trunk = [token for text in texts for token in text]
    _at_once(server, [trunk[:1000]], max_new_tokens=CHAT_TOKENS)
    prompts = [
        [*trunk[:400], FIRST_TOKEN + i, *texts[(i + 5) % len(texts)][: 10 + i]]
        for i in range(BRANCHES)
    ]
    return _at_once(server, prompts, max_new_tokens=CHAT_TOKENS)


def run_pair(server: Server) -> Answers:
    """The hybrid pair's texts: 132 tokens cross two boundaries of kept recurrent states."""
    return _at_once(server, demo_pair("hybrid").prompts[:8], clients=5, max_new_tokens=132)


def pictures(server: Server) -> Answers:
    """The hybrid pair's texts with up to three images, before, inside and after the text; then the
    sixth with another image, and three of them again."""

    def one(text: int, place: int, images: Sequence[int]) -> dict[str, Any]:
        prompt = demo_pair("hybrid").prompts[text]
        at = (0, 40, len(prompt))[place]
        prompt = prompt[:at] + PLACE * len(images) + prompt[at:]
        drawn = [picture(i, 32 * (2 + i % 5), 32 * (2 + i % 3)) for i in images]
        return ask(server, prompt, {"image_data": drawn or None}, max_new_tokens=64)

    jobs = [(i % 7, i % 3, range(i, i + i % 4)) for i in range(12)]
    jobs += [(5, 2, range(50, 51)), *jobs[1:4]]
    with ThreadPoolExecutor(5) as pool:
        return list(pool.map(lambda job: one(*job), jobs))


# Random recurrent targets, whose drafts an oracle knows: new tokens, and turns of a chat.
HYBRID_TOKENS, HYBRID_TURNS = 40, 3


def _hybrid_prompts() -> list[list[int]]:
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
    answer = server.generate(prompt, temperature=0, max_new_tokens=HYBRID_TOKENS, ignore_eos=True)
    return {**answer, "prompt": prompt}


def _hybrid_chat(server: Server, index: int) -> Answers:
    """Every turn repeats the one before: its states were kept while it was decoded."""
    rng, text, done = random.Random(50 + index), [], []
    for _ in range(HYBRID_TURNS):
        text = text + [rng.randrange(1000) for _ in range(30 + 7 * index)]
        done.append(_answer(server, text))
        text = text + done[-1]["output_ids"]
    return done


def hybrid_answers(server: Server) -> ByKind:
    """Return a recurrent target's answers: to 40 prompts, eight at a time, the shared prefixes one
    after another; and to four chats of three turns."""
    one, chat = functools.partial(_answer, server), functools.partial(_hybrid_chat, server)
    every = _hybrid_prompts()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, every[:-8])) + [one(prompt) for prompt in every[-8:]]
        chats = [turn for turns in pool.map(chat, range(4)) for turn in turns]
        return {"prompts": answers, "chats": chats}


def hybrid_answers_in_chunks(server: Server) -> ByKind:
    """`hybrid_answers`, then its shared prefixes and chats one after another, with nothing cached
    before: where prompts share a chunk, their arrival decides which states are kept."""
    answers = hybrid_answers(server)
    flush(server)
    prefixes = [_answer(server, prompt) for prompt in _hybrid_prompts()[-8:]]
    prefixes += [turn for index in range(4) for turn in _hybrid_chat(server, index)]
    return {**answers, "prefixes": prefixes}


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0},
]


def _seeded(
    server: Server,
    texts: list[str],
    ways: list[dict[str, Any]],
    tokens: int,
    first_seed: int,
    clients: int = 6,
) -> Answers:
    def one(job: tuple[int, str]) -> dict[str, Any]:
        at, text = job
        how = {**ways[at % len(ways)], "sampling_seed": first_seed + at}
        return server.generate(text, **{**GREEDY, "max_new_tokens": tokens, **how})

    with ThreadPoolExecutor(clients) as pool:
        return list(pool.map(one, enumerate(texts)))


def seeded(server: Server) -> Answers:
    texts = prompts()["demo"][:12] + prompts()["short"][8:14]
    return _seeded(server, texts, SAMPLING, NEW_TOKENS, 1000)


def seeded_alone(server: Server) -> Answers:
    """A request of each kind, without others beside it."""
    texts = prompts()["demo"][: len(SAMPLING)]
    return _seeded(server, texts, SAMPLING, NEW_TOKENS, 1000, clients=1)


def seeded_hybrid(server: Server) -> Answers:
    return _seeded(server, demo_pair("hybrid").prompts[:12], SAMPLING, 96, 2000)


# A repetition penalty with others, too: the order in which they are applied is fixed.
WAYS: list[dict[str, Any]] = [
    {"frequency_penalty": 0.9},
    # Rewards repetition: a count that comes late changes the next token.
    {"frequency_penalty": -2.0},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.4},
    {"min_new_tokens": 25, "ignore_eos": False},
    {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.2},
]
# Seconds between requests: prefills come in between the decode steps of others.
GAP = 0.06


def _twelve() -> list[Callable[[Server], dict[str, Any]]]:
    """Return requests with a penalty and without, in turn. Some prompts take several chunks.

    The target did not memorize these texts: a penalty changes the answer.
    """
    texts = [*prompts()["short"][4:13], *prompts()["long"][:3]]
    ways = [WAYS[i // 2 % len(WAYS)] if i % 2 == 0 else {} for i in range(len(texts))]
    return [
        lambda server, text=text, way=way: ask(server, text, **way)
        for text, way in zip(texts, ways, strict=True)
    ]


def alone(server: Server) -> Answers:
    """One request after another."""
    return [request(server) for request in _twelve()]


def joining(server: Server) -> Answers:
    """The requests of `alone`: each joins the batch of those before it."""

    def later(i: int, request: Callable[[Server], dict[str, Any]]) -> dict[str, Any]:
        time.sleep(i * GAP)
        return request(server)

    return together(lambda i=i, r=r: later(i, r) for i, r in enumerate(_twelve()))


def penalised_together(server: Server) -> Answers:
    """Six at once, so that a tight pool retracts some."""
    return together(lambda job=job: job(server) for job in _twelve()[::2])


def outputs(answers: Any) -> dict[str, list[list[int]]]:
    """Output ids by kind, or what a front end makes of them."""
    if isinstance(answers, list):
        answers = {"all": answers}
    return {
        kind: [answer["told"] if "told" in answer else answer["output_ids"] for answer in every]
        for kind, every in answers.items()
    }


def assert_same_outputs(got: Any, expected: Any) -> None:
    """Compare token ids; report the first differing position of every differing prompt."""
    got, expected = outputs(got), outputs(expected)
    assert got.keys() == expected.keys()
    differing = []
    for name in expected:
        for i, (x, y) in enumerate(zip(got[name], expected[name], strict=True)):
            if x != y:
                at = next(
                    (j for j, (p, q) in enumerate(zip(x, y, strict=False)) if p != q),
                    min(len(x), len(y)),
                )
                differing.append(f"{name}[{i}] from token {at} ({len(x)} and {len(y)} tokens)")
    assert not differing, f"{len(differing)} prompts differ: {differing}"


def acceptance_length(answers: list[dict[str, Any]]) -> float:
    """See `drafting.acceptance_length`."""
    length = counted(answers).acceptance_length
    assert length is not None, "no answer took a verify step"
    return length


def counted(answers: list[dict[str, Any]]) -> VerifySteps:
    """Verify steps and the tokens kept from them, by the answers."""
    infos = (answer["meta_info"] for answer in answers)
    return sum(
        (of_answer(i.get("spec_verify_ct", 0), i["completion_tokens"]) for i in infos),
        VerifySteps(),
    )
