"""Requests for every feature: one function per feature, sent to every server that answers it."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sglang_dflash.tools.bench.server import Server
from tests.engine import workload
from tests.engine.client import GREEDY, ask, flush, post, stream, together, until
from tests.engine.processors import Likeliest, NoRepeat, Nudged

PROMPTS = workload.prompts()
Answers = list[dict[str, Any]]

POINT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{3,12}$"},
        "kind": {"enum": ["function", "class", "module"]},
        "lines": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 999},
            "minItems": 2,
            "maxItems": 4,
        },
    },
    "required": ["name", "kind", "lines"],
    "additionalProperties": False,
}
# The first is what the target writes anyway, so that drafts are accepted under a grammar too; the
# others are what it never writes.
REGULAR = [
    r"[a-zA-Z_ .,:=()\n\[\]]{100,140}",
    r"(\d{2}-[xyz]{3};){6}",
    r'("""[a-z ]{4,40}"""\n){2}',
]
NESTED = """
root ::= "[" sum (", " sum){1,3} "]"
sum ::= term (" + " term){0,2}
term ::= [a-z]{1,4} | [0-9]{1,3} | "(" sum ")"
"""


def grammars(server: Server) -> Answers:
    """Two prompts for each grammar, two without one, and two with a processor beside a grammar, all
    in the same batches."""
    kinds = [
        {"json_schema": json.dumps(POINT)},
        *({"regex": r} for r in REGULAR),
        {"ebnf": NESTED},
        {},
    ]
    likeliest = {"custom_logit_processor": Likeliest.to_str()}
    ways: list[Any] = [*((kind, {}) for kind in kinds), ({"regex": REGULAR[1]}, likeliest)]
    jobs = [(text, *way) for way in ways for text in PROMPTS["demo"][:2]]
    limits = {"max_new_tokens": 80, "ignore_eos": False}
    return together(
        lambda t=text, k=kind, m=more: ask(server, t, m, **limits, **k) for text, kind, more in jobs
    )


def logprobs(server: Server) -> Answers:
    """Ask for them in prompt and output; greedy, sampled with no choice left, with a bias."""
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7, "top_k": 1},
        {"logit_bias": {"40": 4.0, "300": 4.0}},
    ]
    more = {
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 4,
        "token_ids_logprob": [10, 500],
    }
    texts = PROMPTS["demo"][:6] + PROMPTS["long"][:1]
    return together(
        lambda i=i, t=t: ask(server, t, more, **ways[i % len(ways)]) for i, t in enumerate(texts)
    )


def scores(server: Server) -> Answers:
    """Ask for no token: log-probabilities of the prompt and after it, and those at chosen
    positions; each by itself, then all beside requests for tokens."""
    asked: list[dict[str, Any]] = [
        {},
        {"logprob_start_len": 0},
        {"top_logprobs_num": 2},
        {"token_ids_logprob": [10, 500]},
        {"logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [10, 500]},
        {"logprob_start_len": 0, "token_ids_logprob": [10], "token_indices_to_pool": [1, 3]},
    ]
    text = PROMPTS["demo"][2]
    jobs = [
        lambda more=more: ask(server, text, {"return_logprob": True, **more}, max_new_tokens=0)
        for more in asked
    ]
    alone = [job() for job in jobs]
    more = {"return_logprob": True}
    many = lambda t: lambda: ask(server, t, more, max_new_tokens=9)  # noqa: E731
    return alone + together([*jobs * 2, *map(many, PROMPTS["demo"][:6])])


def likelihoods(server: Server) -> Answers:
    """Log-probabilities of answers: each request by itself, then all at once."""
    more = {"return_logprob": True, "top_logprobs_num": 2}
    texts = [*PROMPTS["demo"][:5], *PROMPTS["short"][:2], PROMPTS["long"][0]]
    jobs = [lambda text=text: ask(server, text, more) for text in texts]
    return [job() for job in jobs] + together(jobs)


BIASES = [{}, {"77": 3.0, "260": 3.0, "14": -4.0}, {str(token): 2.5 for token in range(64, 91)}]
# The target is so unsure of these that a mild bias changes the output.
UNSURE = PROMPTS["short"][8:11]


def biases(server: Server) -> Answers:
    """Ask every prompt with each of `BIASES`, mild enough that every token still counts."""
    return together(lambda t=t, b=b: ask(server, t, logit_bias=b) for t in UNSURE for b in BIASES)


def penalties(server: Server) -> Answers:
    """Each by itself and several at once, in batches with requests that have none."""
    several = {
        "frequency_penalty": 0.4,
        "presence_penalty": 0.6,
        "min_new_tokens": 25,
        "logit_bias": {"77": 2.0},
        "ignore_eos": False,
    }
    ways = [*workload.WAYS, {}, several]
    return together(
        lambda i=i, t=t: ask(server, t, **ways[i % len(ways)])
        for i, t in enumerate(PROMPTS["demo"][:8])
    )


def choices(server: Server) -> Answers:
    """Several answers to one prompt: greedy, and sampled from the top token only."""
    jobs = [
        (t, k)
        for t in PROMPTS["demo"][:2]
        for k in ({"n": 3}, {"n": 2, "temperature": 0.8, "top_k": 1})
    ]
    return [
        answer
        for several in together(lambda t=t, k=k: ask(server, t, **k) for t, k in jobs)
        for answer in several
    ]


def earliest_stops(server: Server) -> Answers:
    """A token that stops the request early: first forbidden for 20 tokens, then allowed."""
    text = PROMPTS["demo"][2]
    token = ask(server, text)["output_ids"][4]
    stop = {"stop_token_ids": [token], "ignore_eos": False, "max_new_tokens": 60}
    return [ask(server, text, **stop, min_new_tokens=20), ask(server, text, **stop)]


def limits(server: Server) -> Answers:
    """Numbers of tokens around a block's, a stop string and a stop token inside a block, and a bias
    that forces a token at every position or avoids one."""
    text = PROMPTS["demo"][1]
    whole = ask(server, text, max_new_tokens=40)
    ids, written = whole["output_ids"], whole["text"]
    # The first occurrence of a token that is not at the start.
    token = next(t for i, t in enumerate(ids) if i > 10 and ids.index(t) == i)
    ways: list[dict[str, Any]] = [
        *({"max_new_tokens": n} for n in (1, 2, 7, 8, 9, 23)),
        {"stop": [written[len(written) // 2 :][:4]]},
        {"stop_token_ids": [token], "ignore_eos": False},
        {"logit_bias": {"77": 100}},
        {"logit_bias": {str(ids[0]): -100}},
    ]
    answers = together(lambda w=w: ask(server, text, **{"max_new_tokens": 40, **w}) for w in ways)
    assert [len(answer["output_ids"]) for answer in answers[:6]] == [1, 2, 7, 8, 9, 23]
    assert answers[6]["text"] == written[: written.index(ways[6]["stop"][0])]
    assert answers[7]["output_ids"] == ids[: ids.index(token) + 1]
    assert set(answers[8]["output_ids"]) == {77} and ids[0] not in answers[9]["output_ids"]
    return answers


def processors(server: Server) -> Answers:
    """Ask as `biases` does, by a processor that does not read the output so far."""
    nudge = {"custom_logit_processor": Nudged.to_str()}
    ways = [
        ({}, None),
        (nudge, {"tokens": list(range(64, 91)), "by": 2.5}),
        (nudge, {"tokens": [77, 260], "by": 8.0}),
    ]
    return together(
        lambda t=t, w=w: ask(server, t, w[0], custom_params=w[1]) for t in UNSURE for w in ways
    )


def processors_of_history(server: Server) -> Answers:
    more = {"custom_logit_processor": NoRepeat.to_str()}
    return together(lambda t=t: ask(server, t, more, custom_params={"unused": 0}) for t in UNSURE)


def priorities(server: Server) -> Answers:
    """12 requests for 8 places, and an urgent one once these are taken.

    Returns the answers, the urgent one's first, with their end times.
    """
    begun = [threading.Event() for _ in range(13)]

    def timed(i: int, text: str, priority: int, tokens: int) -> dict[str, Any]:
        body = {
            "text": text,
            "priority": priority,
            "sampling_params": {**GREEDY, "max_new_tokens": tokens},
        }
        return {**stream(server, body, begun[i]), "ended": time.monotonic()}

    with ThreadPoolExecutor(13) as pool:
        ordinary = [
            pool.submit(timed, i, text, 0, 60) for i, text in enumerate(PROMPTS["short"][4:16])
        ]
        until(lambda: sum(event.is_set() for event in begun) >= 8)
        urgent = pool.submit(timed, 12, PROMPTS["demo"][0], 100, 30)
        return [urgent.result(), *(one.result() for one in ordinary)]


def aborts(server: Server) -> Answers:
    """Two of four requests are aborted by their ids once they have begun.

    The cache is then flushed, which needs all memory to be free, and one is sent a second time.
    """
    begun = [threading.Event() for _ in range(4)]
    tokens = [40, 20_000, 20_000, 40]
    bodies = [
        {
            "text": text,
            "rid": f"aborts-{i}",
            "sampling_params": {**GREEDY, "max_new_tokens": tokens[i]},
        }
        for i, text in enumerate(PROMPTS["demo"][:4])
    ]
    with ThreadPoolExecutor(4) as pool:
        streams = [
            pool.submit(stream, server, body, event)
            for body, event in zip(bodies, begun, strict=True)
        ]
        for i in (1, 2):
            assert begun[i].wait(60)
            post(server, "abort_request", {"rid": f"aborts-{i}"})
        answers = [one.result() for one in streams]
    flush(server)
    return [*answers, ask(server, PROMPTS["demo"][1])]


def hidden_states(server: Server) -> Answers:
    """Ask for all tokens' states, streamed and not, with an end inside a block, and sampled."""
    ids = ask(server, PROMPTS["demo"][1], max_new_tokens=40)["output_ids"]
    ways: list[dict[str, Any]] = [
        {},
        {"stream": True},
        {"stop_token_ids": [ids[21]], "ignore_eos": False},
        {"temperature": 0.7, "top_k": 1},
    ]

    def one(i: int, way: dict[str, Any]) -> dict[str, Any]:
        sampling = {**GREEDY, "max_new_tokens": 120, **way}
        streamed = sampling.pop("stream", False)
        text = PROMPTS["demo"][1 if i == 2 else 0]
        body = {"text": text, "return_hidden_states": True, "sampling_params": sampling}
        if streamed:
            return stream(server, body, threading.Event())
        return post(server, "generate", body).json()

    return together(lambda i=i, w=w: one(i, w) for i, w in enumerate(ways))


def sampling_masks(server: Server) -> Answers:
    """Greedy, and sampled by every rule, with log-probabilities of the token and of all."""
    ways: list[dict[str, Any]] = [
        {"top_k": 1},
        {"temperature": 0.8, "top_k": 20},
        {"temperature": 1.0, "top_k": 40, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 40, "min_p": 0.05},
    ]
    return together(
        lambda i=i, w=w: ask(
            server,
            PROMPTS["short"][8 + i],
            {
                "return_sampling_mask": True,
                "sampling_logprobs_mode": ("selected", "support")[i % 2],
            },
            sampling_seed=i,
            **w,
        )
        for i, w in enumerate(ways * 2)
    )


TURNS = [
    "def area(width, height):\n    ",
    "\n\ndef volume(width, height, depth):\n    ",
    "\n\nclass Box:\n    def ",
]


def sessions(server: Server) -> Answers:
    """A conversation of three turns whose first is then replaced; two streaming sessions with turns
    of 23 and 24 tokens; and conversations whose first turn ends at a token inside a block."""

    def branching() -> Answers:
        session, answers = post(server, "open_session", {"capacity_of_str_len": 4000}).json(), []
        before = [None, f"{session}-0", f"{session}-1"]
        for i, turn in enumerate(TURNS):
            answers.append(
                ask(
                    server,
                    turn,
                    {"session_params": {"id": session, "rid": before[i]}, "rid": f"{session}-{i}"},
                )
            )
        replaced = {"id": session, "rid": f"{session}-0", "replace": True}
        answers.append(
            ask(server, "import os\n", {"session_params": replaced, "rid": f"{session}-replaced"})
        )
        post(server, "close_session", {"session_id": session})
        return answers

    def streaming(tokens: int) -> Answers:
        session = post(
            server, "open_session", {"capacity_of_str_len": 4000, "streaming": True}
        ).json()
        answers = [
            ask(server, turn, {"session_params": {"id": session}}, max_new_tokens=tokens)
            for turn in TURNS
        ]
        post(server, "close_session", {"session_id": session})
        return answers

    def ended_at(token: int) -> Answers:
        session = post(server, "open_session", {"capacity_of_str_len": 4000}).json()
        asked = {"session_params": {"id": session}, "rid": session}
        ways = {"stop_token_ids": [token], "ignore_eos": False}
        ended = ask(server, PROMPTS["demo"][1], asked, **ways)
        asked = {"session_params": {"id": session, "rid": session}}
        answers = [ended, ask(server, TURNS[1], asked)]
        post(server, "close_session", {"session_id": session})
        return answers

    jobs = [branching, lambda: streaming(23), lambda: streaming(24)]
    ids = ask(server, PROMPTS["demo"][1])["output_ids"]
    jobs += [lambda token=token: ended_at(token) for token in dict.fromkeys(ids[5:13])]
    return [one for answers in together(jobs) for one in answers]


def mixed_chunks(server: Server) -> Answers:
    """Prompts of several chunks are prefilled while six requests decode, two under a grammar. All
    come in one request, whose grammars are compiled: so when they meet depends on no client."""
    constrained: list[dict[str, Any]] = [{"regex": REGULAR[0]}, {"ebnf": NESTED}]
    for grammar in constrained:
        ask(server, "#", max_new_tokens=1, ignore_eos=False, **grammar)
    kinds = [{"max_new_tokens": 80, "ignore_eos": False, **kind} for kind in constrained]
    kinds += [{"max_new_tokens": 240}] * 4 + [{"max_new_tokens": 10}] * 2
    long = [f"# {i}\n{PROMPTS['long'][i]}" for i in (6, 7)]
    body = {
        "text": [*PROMPTS["short"][8:14], *long],
        "sampling_params": [{**GREEDY, **kind} for kind in kinds],
    }
    return post(server, "generate", body).json()


def adapters(server: Server) -> Answers:
    """The same prompts with and without the adapter, in one batch.

    Then one pair a second time, so that prefixes of both are cached.
    """
    jobs = [(t, more) for t in PROMPTS["demo"][:3] for more in ({"lora_path": "adapter"}, {})]
    return [
        a
        for some in (jobs, jobs[:2])
        for a in together(lambda t=t, m=m: ask(server, t, m) for t, m in some)
    ]
