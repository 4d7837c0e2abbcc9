"""Grammars that no text satisfies.

XGrammar compiles `root ::= root` and the JSON schema `{"$ref": "#"}`. Its token mask is then empty,
SGLang samples a token from no candidates, and ends the request with HTTP 500.
"""

from __future__ import annotations

import functools
import json
import logging
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger(__name__)

# The serialized form of a grammar that `satisfiable` reads, and its kinds of expressions.
FORMAT = "v16"
RULE_REF, SEQUENCE, CHOICES, REPEAT = 4, 5, 6, 8
# XGrammar needs 12 s for a JSON schema nested 500 deep. Larger ones are left to the scheduler,
# which compiles in a thread.
MAX_LENGTH = 20_000
MAX_DEPTH = 64


def check_grammar(params: Mapping[str, Any], backend: str | None) -> None:
    """Raise ValueError if XGrammar would serve a grammar that no text satisfies.

    One that cannot be parsed passes: SGLang answers HTTP 400 with the parser's message.
    """
    if backend != "xgrammar":
        return
    for field in ("json_schema", "ebnf", "regex", "structural_tag"):
        text = params.get(field)
        if isinstance(text, str) and text and not satisfiable(field, text):
            raise ValueError(
                f"sampling_params.{field} (response_format): {reprlib.repr(text)} is satisfied by "
                "no text: its rules only refer to each other; a grammar needs a rule that ends"
            )


@functools.lru_cache(maxsize=256)
def satisfiable(field: str, text: str) -> bool:
    """Whether the root rule derives any text; True also if that is not examined.

    A rule is productive if one of its choices consists of productive parts; terminals are. The
    least fixed point is that of a context-free grammar's generating symbols (Hopcroft and Ullman,
    Introduction to Automata Theory, section 4.4).
    """
    if len(text) > MAX_LENGTH or _depth(text) > MAX_DEPTH or text == "$$ANY$$":
        return True
    try:
        grammar = json.loads(_parser(field)(text).serialize_json())
    except (RuntimeError, ValueError, TypeError):
        return True
    if grammar["__VERSION__"] != FORMAT:
        logger.warning(
            "XGrammar writes grammars in format %s, not %s: a request whose grammar no text "
            "satisfies is not refused",
            grammar["__VERSION__"],
            FORMAT,
        )
        return True
    return grammar["root_rule_id"] in _productive_rules(grammar)


def _parser(field: str) -> Callable[[str], Any]:
    from xgrammar import Grammar

    parsers: dict[str, Callable[[str], Any]] = {
        "json_schema": Grammar.from_json_schema,
        "ebnf": Grammar.from_ebnf,
        "regex": Grammar.from_regex,
        "structural_tag": Grammar.from_structural_tag,
    }
    return parsers[field]


def _depth(text: str) -> int:
    """How deep brackets are nested, those in strings included."""
    depth = deepest = 0
    for char in text:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth -= 1
    return deepest


def _productive_rules(grammar: Mapping[str, Any]) -> set[int]:
    data, starts = grammar["grammar_expr_data"], grammar["grammar_expr_indptr"]
    productive: set[int] = set()

    def derives(expression: int) -> bool:
        kind, length = data[starts[expression]], data[starts[expression] + 1]
        parts = data[starts[expression] + 2 : starts[expression] + 2 + length]
        if kind == RULE_REF:
            return parts[0] in productive
        if kind == SEQUENCE:
            return all(map(derives, parts))
        if kind == CHOICES:
            return any(map(derives, parts))
        if kind == REPEAT:
            rule, least = parts[0], parts[1]
            return least == 0 or rule in productive
        return True

    while True:
        more = {
            number
            for number, rule in enumerate(grammar["rules"])
            if number not in productive and derives(rule[1])
        }
        if not more:
            return productive
        productive |= more
