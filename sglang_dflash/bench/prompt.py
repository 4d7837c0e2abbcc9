"""`Prompt`, what a client sends, and how its turns become requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sglang_dflash.facts.errors import ConfigError, cut

# What is sent: a text, or token ids.
Input = str | list[int]


class Prompt(NamedTuple):
    """A user's turns.

    `chat`: whether they go through the chat template; otherwise they are one text to continue, to
    which each later turn is added after the answer to the turn before.
    """

    turns: tuple[str, ...]
    chat: bool


# A prompt and the answers to its turns so far -> what is sent next.
Encode = Callable[[Prompt, list[str]], Input]


def encode_turn(
    tokenizer: Any, prompt: Prompt, answers: list[str], thinking: bool | None
) -> list[int]:
    """Token ids of the next turn of a prompt.

    Args:
        tokenizer: of Transformers.
        thinking: the template's `enable_thinking`; None for the template's default.

    Raises:
        ConfigError: a chat, and the tokenizer has no chat template.
    """
    from sglang_dflash.transformers_loop.pair import chat_tokens

    if not prompt.chat:
        return tokenizer(continued(prompt, answers))["input_ids"]
    messages = []
    for turn, answer in zip(prompt.turns, answers, strict=False):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": prompt.turns[len(answers)]})
    return chat_tokens(tokenizer, messages, thinking)


def continued(prompt: Prompt, answers: list[str]) -> str:
    """The text of a prompt without chats, up to its next turn."""
    before = "".join(turn + answer for turn, answer in zip(prompt.turns, answers, strict=False))
    return before + prompt.turns[len(answers)]


def encoder(source: str | None, thinking: str | None) -> Encode:
    """How prompts are sent: token ids by the tokenizer of `source`, so that all servers read the
    same; the text of a prompt without chats if no tokenizer is known.

    Args:
        source: a folder or a hub name.
        thinking: what the chat template is told, "on" or "off"; None to leave it to the template.

    Raises:
        ConfigError: there is no such tokenizer.
    """
    if source is None:
        return continued
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        required = f"it has no tokenizer that can be loaded ({cut(str(error))})"
        raise ConfigError("target", source, required) from error
    asked = None if thinking is None else thinking == "on"
    return lambda prompt, answers: encode_turn(tokenizer, prompt, answers, asked)
