"""An event of several tokens as events of one token each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.tokenizer_manager import _INCREMENTAL_STREAMING_META_INFO_KEYS
from sglang.utils import find_printable_text

# How a text ends that is cut inside a character.
INCOMPLETE = "�"
# Tokens before an event that tell where the text of its first one begins: more than a character
# has.
CONTEXT = 5
# So many tokens at most wait for the end of a character.
MOST_WAITING = 64
# Of a whole answer so far, in its `meta_info`.
COUNTS = ("completion_tokens", "output_token_logprobs_length", "output_token_sampling_mask_length")
Decode = Callable[[list[list[int]]], list[str]]


def token_ends(decode: Decode, context: list[int], tokens: list[int]) -> tuple[list[int], bool]:
    """Where the text of each token ends if every token is sent alone: part of a character adds
    nothing, and the token that completes it adds all of it.

    Args:
        decode: token ids of several texts -> the texts.
        context: the tokens before.

    Returns:
        Characters from the end of the context's text; whether the last token completes a
        character.
    """
    every = context + tokens
    texts = decode([every[: i + 1] for i in range(len(every))])
    complete, sent, ends = 0, 0, [0]
    for text in texts:
        if text.endswith(INCOMPLETE):
            sent = max(sent, complete + len(find_printable_text(text[complete:])))
        else:
            complete = sent = len(text)
        ends.append(sent)
    begin = ends[len(context)]
    return [end - begin for end in ends[len(context) + 1 :]], not texts[-1].endswith(INCOMPLETE)


class TokenEvents:
    """The events of one answer, token by token. Texts are cut, and never changed."""

    def __init__(self, manager: Any, obj: Any) -> None:
        """
        Args:
            manager: SGLang's `TokenizerManager`.
            obj: the request, a `GenerateReqInput`.
        """
        params = obj.sampling_params
        params = params[0] if isinstance(params, list) else params
        params = {**(manager.preferred_sampling_params or {}), **params}
        skip = params.get("skip_special_tokens", True)
        spaces = params.get("spaces_between_special_tokens", True)
        self._decode = partial(_decode, manager, skip, spaces)
        self._coalesce = manager._coalesce_streaming_chunks
        # Whether an event has what is new, and not the answer so far.
        self._incremental = manager.incremental_streaming_output
        # Of the answer, what was passed on: tokens, characters, the last tokens.
        self._tokens = self._length = 0
        self._context: list[int] = []
        # An event whose text ends inside a character: the detokenizer holds back what it likes.
        self._waiting: list[dict[str, Any]] = []

    def split(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        """Events of one token each, in order, whose last is `event`; none if it has to wait."""
        finish = event["meta_info"].get("finish_reason")
        if not isinstance(event.get("text"), str) or (finish and finish["type"] == "abort"):
            # An aborted answer repeats a token.
            return [*self._waiting, event]
        if self._waiting and self._incremental:
            event = self._coalesce([*self._waiting, event], event["meta_info"]["id"])
        tokens, text = event["output_ids"], event["text"]
        if not self._incremental:
            # SGLang may have added to the list since.
            tokens = tokens[self._tokens : event["meta_info"]["completion_tokens"]]
            text = text[self._length :]
        ends = [len(text)]
        if len(tokens) > 1:
            ends, complete = token_ends(self._decode, self._context, tokens)
            if not complete and not finish and len(tokens) <= MOST_WAITING:
                self._waiting = [event]
                return []
            # A first token may have lost a space before it, a text that has ended its stop.
            late = len(text) - ends[-1] if complete and not finish else 0
            ends = [min(max(end + late, 0), len(text)) for end in ends[:-1]] + [len(text)]
        parts = list(self._parts(event, ends))
        self._waiting, self._context = [], [*self._context, *tokens][-CONTEXT:]
        self._tokens, self._length = self._tokens + len(tokens), self._length + len(text)
        return parts

    def _parts(self, event: dict[str, Any], ends: list[int]) -> Iterator[dict[str, Any]]:
        """Events whose new texts end there; the last is `event`, without what the others have."""
        begin, last = 0, len(ends) - 1
        for i, end in enumerate(ends):
            info, left = dict(event["meta_info"]), last - i
            one = slice(i, i + 1) if left else slice(i, None)
            if self._incremental:
                ids, text = event["output_ids"][one], event["text"][begin:end]
                for key in info.keys() & set(_INCREMENTAL_STREAMING_META_INFO_KEYS):
                    info[key] = info[key][one]
            else:
                ids, text = event["output_ids"], event["text"][: self._length + end]
            if left:
                info["finish_reason"] = None
                ids = ids if self._incremental else ids[: info["completion_tokens"] - left]
                for key in info.keys() & set(COUNTS):
                    info[key] -= left
            yield {**event, "text": text, "output_ids": ids, "meta_info": info}
            begin = end


def _decode(manager: Any, skip: bool, spaces: bool, texts: list[list[int]]) -> list[str]:
    """As SGLang's detokenizer does it, whose method reads the tokenizer only."""
    flags = [skip] * len(texts), [spaces] * len(texts)
    return DetokenizerManager._grouped_batch_decode(manager, texts, *flags)
