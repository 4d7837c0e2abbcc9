"""Splitting of an event of several tokens into events of one token each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.tokenizer_manager import _INCREMENTAL_STREAMING_META_INFO_KEYS
from sglang.utils import find_printable_text

# The end of a text that is cut inside a character.
INCOMPLETE = "�"
# The most tokens that wait for the end of a character.
MOST_WAITING = 256
# Fields of `meta_info` that count tokens of the answer so far.
COUNTS = ("completion_tokens", "output_token_logprobs_length", "output_token_sampling_mask_length")


class TokenEnds:
    """The position in an answer's text at which each token ends, as if SGLang's detokenizer got
    every token alone: the token that completes a character adds all of it.

    Attributes:
        sent: characters that the detokenizer has sent.
        is_whole: whether the text ends with a whole character.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self.sent, self.is_whole = 0, True
        # The tokens that are decoded together: those of the last whole characters, and later ones.
        self._tokens: list[int] = []
        self._decoded_tokens = self._decoded_length = self._complete = 0

    def add(self, token: int) -> int:
        """Add a token. Returns `sent` after it."""
        self._tokens.append(token)
        new = self._decode(self._tokens)[self._decoded_length :]
        self.is_whole = not new.endswith(INCOMPLETE)
        if new and self.is_whole:
            self.sent = self._complete = self._complete + len(new)
            del self._tokens[: self._decoded_tokens]
            self._decoded_tokens = len(self._tokens)
            self._decoded_length = len(self._decode(self._tokens))
        else:
            self.sent = max(self.sent, self._complete + len(find_printable_text(new)))
        return self.sent


class TokenEvents:
    """The events of one answer, token by token. Texts are split, never changed."""

    def __init__(self, manager: Any, obj: Any) -> None:
        """
        Args:
            manager: SGLang's `TokenizerManager`.
            obj: the request, a `GenerateReqInput`.
        """
        self._coalesce = manager._coalesce_streaming_chunks
        # True if an event holds new tokens only, False if it holds the answer so far.
        self._incremental = manager.incremental_streaming_output
        self._ends = TokenEnds(_decoder(manager, obj))
        # Tokens that came alone. They are decoded only if a later event has to be split.
        self._unread: list[int] = []
        # How much of the answer was passed on: tokens, characters, characters according to `_ends`.
        self._tokens = self._length = self._begin = 0
        # An event that ends inside a character waits: the detokenizer may hold back whole words.
        # `_waiting`: the ends of its tokens.
        self._held_events: list[dict[str, Any]] = []
        self._waiting: list[int] = []

    def split(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        """Split an event into events of one token, in order; an empty list if it has to wait."""
        finish = event["meta_info"].get("finish_reason")
        if not isinstance(event.get("text"), str) or (finish and finish["type"] == "abort"):
            # An aborted answer repeats a token.
            return [*self._held_events, event]
        tokens = event["output_ids"]
        if self._incremental:
            if self._held_events:
                event = self._coalesce([*self._held_events, event], event["meta_info"]["id"])
            text = event["text"]
        else:
            # SGLang may have appended to the list since it made the event.
            passed, count = (
                self._tokens + len(self._waiting),
                event["meta_info"]["completion_tokens"],
            )
            tokens, text = tokens[passed:count], event["text"][self._length :]
        if not self._waiting and len(tokens) < 2:
            self._unread += tokens
            return self._pass_on(event, [len(text)], len(tokens))
        if not self._waiting:
            for token in self._unread:
                self._ends.add(token)
            self._unread, self._begin = [], self._ends.sent
        self._waiting += map(self._ends.add, tokens)
        is_whole = self._ends.is_whole
        if not is_whole and not finish and len(self._waiting) <= MOST_WAITING:
            self._held_events = [event]
            return []
        ends = [end - self._begin for end in self._waiting]
        # The text may lack a space before the first token. A finished text may lack its stop.
        late = len(text) - ends[-1] if is_whole and not finish else 0
        ends = [min(max(end + late, 0), len(text)) for end in ends[:-1]] + [len(text)]
        return self._pass_on(event, ends, len(ends))

    def _pass_on(self, event: dict[str, Any], ends: list[int], tokens: int) -> list[dict[str, Any]]:
        parts = list(self._parts(event, ends))
        self._held_events, self._waiting = [], []
        self._tokens, self._length = self._tokens + tokens, self._length + ends[-1]
        return parts

    def _parts(self, event: dict[str, Any], ends: list[int]) -> Iterator[dict[str, Any]]:
        """Yield events whose new texts end at `ends`. The last one keeps the other fields."""
        begin, last_index = 0, len(ends) - 1
        for i, end in enumerate(ends):
            meta_info, later = dict(event["meta_info"]), last_index - i
            span = slice(i, i + 1) if later else slice(i, None)
            if self._incremental:
                ids, text = event["output_ids"][span], event["text"][begin:end]
                for key in meta_info.keys() & set(_INCREMENTAL_STREAMING_META_INFO_KEYS):
                    meta_info[key] = meta_info[key][span]
            else:
                ids, text = event["output_ids"], event["text"][: self._length + end]
            if later:
                meta_info["finish_reason"] = None
                ids = ids if self._incremental else ids[: meta_info["completion_tokens"] - later]
                for key in meta_info.keys() & set(COUNTS):
                    meta_info[key] -= later
                # An answer begins with its reasoning.
                if reasoning := meta_info.get("reasoning_tokens"):
                    meta_info["reasoning_tokens"] = min(reasoning, meta_info["completion_tokens"])
            yield {**event, "text": text, "output_ids": ids, "meta_info": meta_info}
            begin = end


def _decoder(manager: Any, obj: Any) -> Callable[[list[int]], str]:
    """Return a function that decodes token ids as SGLang's detokenizer does for the request."""
    params = obj.sampling_params
    params = params[0] if isinstance(params, list) else params
    params = {**(manager.preferred_sampling_params or {}), **params}
    skip = params.get("skip_special_tokens", True)
    spaces = params.get("spaces_between_special_tokens", True)

    def decode(ids: list[int]) -> str:
        # The method reads only the tokenizer of its object, and `manager` has one, too.
        return str(DetokenizerManager._grouped_batch_decode(manager, [ids], [skip], [spaces])[0])

    return decode
