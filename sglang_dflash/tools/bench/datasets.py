"""Prompts by data set: embedded, from this Python's library, from a file, or from the hub; and how
their turns become requests."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import random
import textwrap
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dflash.checkpoint.hub import unreachable
from sglang_dflash.common.errors import ConfigError, cut
from sglang_dflash.tools.bench import conversations
from sglang_dflash.tools.bench.conversations import Message
from sglang_dflash.tools.demo_pairs.pairs import demo_pair

# The content of a request: a text, token ids, or the messages of a chat.
Input = str | list[int] | list[Message]


class Prompt(NamedTuple):
    """A user's turns.

    Attributes:
        chat: whether the turns go through the chat template. Otherwise they are one text to
            continue: each later turn is appended to the answer before it.
        recorded: for a recorded conversation, the messages before the answer of each turn. They
            hold the recorded answers, so that all servers read the same.
        tools: passed to the chat template.
    """

    turns: tuple[str, ...]
    chat: bool
    recorded: tuple[tuple[Message, ...], ...] = ()
    tools: tuple[Message, ...] = ()

    def messages(self, answers: list[str]) -> list[Message]:
        """A chat up to the turn after the last of `answers`."""
        if self.recorded:
            return list(self.recorded[len(answers)])
        messages = list[Message]()
        for turn, answer in zip(self.turns, answers, strict=False):
            messages += [
                {"role": "user", "content": turn},
                {"role": "assistant", "content": answer},
            ]
        return [*messages, {"role": "user", "content": self.turns[len(answers)]}]

    def text(self, answers: list[str]) -> str:
        """The text to continue, up to the turn after the last of `answers`."""
        before = zip(self.turns, answers, strict=False)
        return "".join(turn + answer for turn, answer in before) + self.turns[len(answers)]


# A prompt and the answers to its turns so far -> the content of the next request.
Encode = Callable[[Prompt, list[str]], Input]


class HubDataset(NamedTuple):
    """A data set of the hub: its repository, and how to read the turns of a row."""

    repository: str
    config: str | None
    split: str
    turns: Callable[[dict[str, Any]], list[str]]


_MATH = "\n\nReason step by step, and put the final answer in \\boxed{}."

HUB = {
    "gsm8k": HubDataset("openai/gsm8k", "main", "test", lambda row: [row["question"] + _MATH]),
    "math500": HubDataset(
        "HuggingFaceH4/MATH-500", None, "test", lambda row: [row["problem"] + _MATH]
    ),
    "humaneval": HubDataset(
        "openai/openai_humaneval",
        None,
        "test",
        lambda row: [f"Complete this Python function.\n\n```python\n{row['prompt']}```"],
    ),
    "mbpp": HubDataset(
        "google-research-datasets/mbpp",
        "sanitized",
        "test",
        lambda row: [
            f"{row['prompt']}\n\nThe code has to pass these tests:\n\n"
            + "\n".join(row["test_list"])
        ],
    ),
    "mt-bench": HubDataset(
        "HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: list(row["prompt"])
    ),
    "alpaca": HubDataset(
        "tatsu-lab/alpaca",
        None,
        "train",
        lambda row: ["\n\n".join(filter(None, (row["instruction"], row["input"])))],
    ),
}
BUILT_IN = ("demo", "stdlib", "chat", "code", "edits")
# Questions to an assistant. No demo model was trained on them.
CHAT = Path(__file__).parent / "chat.jsonl"
NAMES = (*BUILT_IN, *HUB)
# More prompts than any data set has.
ALL = 10**9

# The library modules that the embedded pairs were not trained on.
HELD_OUT = ("colorsys", "heapq", "contextlib", "getopt", "json.decoder", "json.encoder")


def load(name: str, count: int, *, model: str | None = None, seed: int = 0) -> list[Prompt]:
    """`count` prompts of one of `NAMES`, the same ones for a seed; all of them if there are fewer.

    Args:
        model: the embedded pair whose texts are "demo"; None for "dense".

    Raises:
        ConfigError: it cannot be fetched.
    """
    if name in HUB:
        prompts = _fetch(name)
    elif name == "stdlib":
        prompts = stdlib_functions()
    elif name == "chat":
        prompts = from_file(CHAT)
    elif name in ("code", "edits"):
        prompts = [
            _ask_about(name, function) for function in held_out_functions() if is_short(function)
        ]
    else:
        texts = demo_pair(model or "dense").prompts
        if not texts:
            raise ConfigError("dataset", name, f"the pair {model} has no texts; chat is for it")
        prompts = [Prompt((text,), chat=False) for text in texts]
    return select(prompts, count, seed)


def select(prompts: list[Prompt], count: int, seed: int) -> list[Prompt]:
    """Draw `count` prompts with a seed, because data sets are often sorted by subject."""
    return random.Random(seed).sample(prompts, min(count, len(prompts)))


class LibraryFunction(NamedTuple):
    """A function of the library.

    Attributes:
        name: the function's name.
        lines: its source, not indented.
        document: number of lines up to the end of its docstring; 0 without one.
    """

    name: str
    lines: tuple[str, ...]
    document: int


def held_out_functions() -> list[LibraryFunction]:
    """The functions of the held-out modules that have 8 lines or more."""
    functions = []
    for module in HELD_OUT:
        source = inspect.getsource(importlib.import_module(module))
        lines = source.splitlines(keepends=True)
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
                continue
            body = lines[node.lineno - 1 : node.end_lineno]
            if len(body) < 8:
                continue
            end = node.body[0].end_lineno if ast.get_docstring(node) is not None else None
            document = 0 if end is None else end - node.lineno + 1
            text = textwrap.dedent("".join(body)).splitlines(keepends=True)
            functions.append(LibraryFunction(node.name, tuple(text), document))
    return functions


def is_short(function: LibraryFunction) -> bool:
    """Return whether a small model can work on a function: it has a docstring, a public name and
    at most 1200 characters."""
    is_public = not function.name.startswith("_")
    return is_public and function.document > 0 and sum(map(len, function.lines)) <= 1200


def stdlib_functions() -> list[Prompt]:
    """The first half of every held-out function, to be continued."""
    halves = [
        Prompt(("".join(function.lines[: len(function.lines) // 2]),), chat=False)
        for function in held_out_functions()
    ]
    # Variants of a function for other Python versions begin alike.
    return list(dict.fromkeys(halves))


def _ask_about(name: str, function: LibraryFunction) -> Prompt:
    """Return the prompt of a chat about a function: `code` completes it, `edits` renames it."""
    if name == "code":
        text = "".join(function.lines[: function.document])
        return Prompt((f"Complete this Python function.\n\n```python\n{text}```",), chat=True)
    ask = (
        f"Rename the function `{function.name}` to `solve` in this file, change nothing else, and "
        "answer with the whole file."
    )
    return Prompt((f"{ask}\n\n```python\n{''.join(function.lines)}```",), chat=True)


def repeat_prompts(prompts: list[Prompt], count: int) -> list[Prompt]:
    """Return all prompts, repeated from the beginning until there are at least `count`."""
    return list(islice(cycle(prompts), max(count, len(prompts))))


def from_file(path: Path) -> list[Prompt]:
    """Prompts of a file: JSON on each line, or one list in JSON as ShareGPT's.

    `{"prompt": TEXT}` is continued as it is. All others go through the chat template: `{"turns":
    [TEXT, ...]}`, and recorded conversations, `{"messages": [...]}` and `{"conversations": [...]}`.
    Each answer of a recorded conversation is requested after the messages recorded before it.

    Raises:
        ConfigError: no such file, it is not UTF-8, or a row is none of these.
    """
    if not path.is_file():
        raise ConfigError("dataset_file", str(path), "there is no such file")
    try:
        # With or without a byte order mark.
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        required = f"it cannot be read ({cut(str(error))})"
        raise ConfigError("dataset_file", str(path), required) from error
    parsed = [_parse_row(row, where) for where, row in _rows(text, path)]
    # Some conversations of ShareGPT hold nothing to answer.
    prompts = [prompt for prompt in parsed if prompt.turns]
    if not prompts:
        raise ConfigError("dataset_file", str(path), "it holds no prompt")
    return prompts


def _rows(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each row."""
    if text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except ValueError as error:
            required = f"it begins like a JSON list, but is not valid JSON ({cut(str(error))})"
            raise ConfigError("dataset_file", str(path), required) from error
        yield from ((f"entry {number}", row) for number, row in enumerate(rows, 1))
        return
    # `splitlines` would also end a line at U+2028 and others, which JSON has in its strings.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError:
                row = line
            yield f"line {number}", row


def _parse_row(row: Any, where: str) -> Prompt:
    why = (
        'in JSON {"prompt": TEXT}, {"turns": [TEXT, ...]}, {"messages": [...]} or ShareGPT\'s '
        '{"conversations": [...]} is required'
    )
    try:
        messages = conversations.read_row(row)
        if messages is not None:
            ends = conversations.requests_of(messages)
            return Prompt(
                tuple(messages[end - 1]["content"] for end in ends),
                chat=True,
                recorded=tuple(tuple(messages[:end]) for end in ends),
                tools=tuple(row.get("tools") or ()),
            )
        turns = row["turns"] if "turns" in row else [row["prompt"]]
        if isinstance(turns, list) and turns and all(isinstance(t, str) and t for t in turns):
            return Prompt(tuple(turns), chat="turns" in row)
    except ValueError as error:
        why = cut(str(error))
    except (TypeError, KeyError, AttributeError):
        pass
    line = row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)
    raise ConfigError("dataset_file", line[:60], f"{where}: {why}")


def _fetch(name: str) -> list[Prompt]:
    """A set of `HUB`, which the library `datasets` keeps on disk."""
    import datasets

    dataset = HUB[name]
    # `datasets` would retry for half a minute before it looks into its cache.
    reason = unreachable(dataset.repository)
    if reason is not None:
        datasets.config.HF_HUB_OFFLINE = True
    try:
        rows = datasets.load_dataset(dataset.repository, dataset.config, split=dataset.split)
    # The hub, its client and the network raise many types of errors; the advice is the same.
    except Exception as error:
        required = f"could not be fetched ({cut(reason or str(error))}); give {{dataset_file}}"
        required += f", or one of {', '.join(BUILT_IN)}"
        raise ConfigError("dataset", name, f"{dataset.repository} {required}") from error
    return [Prompt(tuple(dataset.turns(row)), chat=True) for row in rows]


def encode_turn(
    tokenizer: Any, prompt: Prompt, answers: list[str], thinking: str | None
) -> list[int]:
    """Token ids of the next turn of a prompt.

    Args:
        tokenizer: a tokenizer of Transformers.
        thinking: "on" or "off", passed to the chat template; None for the template's default.

    Raises:
        ConfigError: the prompt is a chat, and the tokenizer has no chat template.
    """
    from sglang_dflash.tools.transformers_loop.pair import chat_tokens

    if not prompt.chat:
        return tokenizer(prompt.text(answers))["input_ids"]
    enable_thinking = None if thinking is None else thinking == "on"
    return chat_tokens(tokenizer, prompt.messages(answers), enable_thinking, prompt.tools)


def encoder(source: str | None, thinking: str | None = None) -> Encode:
    """Return a function that encodes prompts: `token_encoder`, or texts and messages as they are if
    no tokenizer is known (a `source` of None)."""
    return _pass_through if source is None else token_encoder(source, thinking)


def token_encoder(
    source: str, thinking: str | None = None
) -> Callable[[Prompt, list[str]], list[int]]:
    """Token ids by the tokenizer of `source`, so that all servers read the same.

    Args:
        source: a folder or a hub name.
        thinking: as in `encode_turn`.

    Raises:
        ConfigError: there is no such tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        required = f"it has no tokenizer that can be loaded ({cut(str(error))})"
        raise ConfigError("target", source, required) from error
    return lambda prompt, answers: encode_turn(tokenizer, prompt, answers, thinking)


def _pass_through(prompt: Prompt, answers: list[str]) -> Input:
    """Pass on texts or messages to a server that applies its own chat template."""
    if prompt.tools:
        required = "conversations with tools are sent as token ids, to SGLang servers"
        raise ConfigError("dataset_file", required=required)
    return (prompt.messages if prompt.chat else prompt.text)(answers)
