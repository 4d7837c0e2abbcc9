"""The prompts to which all server configurations must give the same answers."""

from __future__ import annotations

import inspect
import shlex
import textwrap
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sglang_dflash.bench.server import Server
from sglang_dflash.drafting.acceptance_length import VerifySteps, of_answer
from sglang_dflash.facts.embedded import demo_pair

NEW_TOKENS = 40
# Requests whose logits depend on every token before, and one that does not.
PENALTIES = [
    {"frequency_penalty": 0.9},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.4},
    {"min_new_tokens": 25, "ignore_eos": False},
    {},
]


def prompts() -> dict[str, list[str]]:
    """At least 60 prompts by what is special about them."""
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


def run(server: Server) -> dict[str, list[dict[str, Any]]]:
    """All answers: ragged batches of 8, but the shared prefixes one after another."""
    return _answers(server, prompts())


def _answers(server: Server, asked: dict[str, list[str]]) -> dict[str, list[dict[str, Any]]]:
    answers = {}
    for name, texts in asked.items():
        with ThreadPoolExecutor(1 if name == "shared prefix" else 8) as pool:
            answers[name] = list(
                pool.map(
                    lambda t: server.generate(
                        t, temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True
                    ),
                    texts,
                )
            )
    return answers


def halved(answers: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Of `run`'s answers those that `run_half` gives."""
    return {name: every[::2] for name, every in answers.items()}


def run_half(server: Server) -> dict[str, list[dict[str, Any]]]:
    """As `run`, every second prompt: for servers that differ from one that answers them all in one
    thing."""
    return _answers(server, {name: texts[::2] for name, texts in prompts().items()})


def run_some(server: Server, each: int) -> dict[str, list[dict[str, Any]]]:
    """As `run`, the first prompts of each kind."""
    return _answers(server, {name: texts[:each] for name, texts in prompts().items()})


def run_penalised(server: Server) -> list[dict[str, Any]]:
    send = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    texts = prompts()["demo"][:10]
    return [
        server.generate(text, **{**send, **PENALTIES[i % len(PENALTIES)]})
        for i, text in enumerate(texts)
    ]


def assert_same_outputs(
    got: dict[str, list[dict[str, Any]]], expected: dict[str, list[dict[str, Any]]]
) -> None:
    """Compare token ids; report the first differing position of every differing prompt."""
    differing = []
    for name in expected:
        for i, (a, b) in enumerate(zip(got[name], expected[name], strict=True)):
            x, y = a["output_ids"], b["output_ids"]
            if x != y:
                at = next(
                    (j for j, (p, q) in enumerate(zip(x, y, strict=False)) if p != q),
                    min(len(x), len(y)),
                )
                differing.append(f"{name}[{i}] from token {at} ({len(x)} and {len(y)} tokens)")
    assert not differing, f"{len(differing)} prompts differ: {differing}"


def acceptance_length(answers: list[dict[str, Any]]) -> float:
    """See `core.acceptance_length`."""
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
