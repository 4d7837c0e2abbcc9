"""An event of several tokens as events of one token each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.tokenizer_manager import _INCREMENTAL_STREAMING_META_INFO_KEYS
from sglang.utils import find_printable_text

# How a text ends that is cut inside a character.
INCOMPLETE = "�"
# So many tokens at most wait for the end of a character.
MOST_WAITING = 256
# Of a whole answer so far, in its `meta_info`.
COUNTS = ("completion_tokens", "output_token_logprobs_length", "output_token_sampling_mask_length")


class TokenEnds:
    """The ends of each token's text in an answer, as if SGLang's detokenizer got every token alone:
    part of a character adds nothing, and the token that completes it adds all of it.

    Attributes:
        sent: characters that the detokenizer has sent.
        is_whole: whether the text ends with a whole character.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self.sent, self.is_whole = 0, True
        # Tokens of the last whole characters, before which nothing is read again, and later ones.
        self._tokens: list[int] = []
        self._known = self._known_length = self._complete = 0

    def add(self, token: int) -> int:
        """Returns `sent` after the token."""
        self._tokens.append(token)
        new = self._decode(self._tokens)[self._known_length :]
        self.is_whole = not new.endswith(INCOMPLETE)
        if new and self.is_whole:
            self.sent = self._complete = self._complete + len(new)
            del self._tokens[: self._known]
            self._known, self._known_length = len(self._tokens), len(self._decode(self._tokens))
        else:
            self.sent = max(self.sent, self._complete + len(find_printable_text(new)))
        return self.sent


class TokenEvents:
    """The events of one answer, token by token. Texts are cut, and never changed."""

    def __init__(self, manager: Any, obj: Any) -> None:
        """
        Args:
            manager: SGLang's `TokenizerManager`.
            obj: the request, a `GenerateReqInput`.
        """
        self._coalesce = manager._coalesce_streaming_chunks
        # Whether an event has what is new, and not the answer so far.
        self._incremental = manager.incremental_streaming_output
        self._ends = TokenEnds(_decoder(manager, obj))
        # Tokens that came alone, and are read only if a later one needs it.
        self._unread: list[int] = []
        # Of the answer, what was passed on: tokens, characters, characters by `_ends`.
        self._tokens = self._length = self._begin = 0
        # An event whose text ends inside a character, of which the detokenizer may hold back whole
        # words; the ends of its tokens.
        self._held: list[dict[str, Any]] = []
        self._waiting: list[int] = []

    def split(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        """Events of one token each, in order; none if the event has to wait."""
        finish = event["meta_info"].get("finish_reason")
        if not isinstance(event.get("text"), str) or (finish and finish["type"] == "abort"):
            # An aborted answer repeats a token.
            return [*self._held, event]
        tokens = event["output_ids"]
        if self._incremental:
            if self._held:
                event = self._coalesce([*self._held, event], event["meta_info"]["id"])
            text = event["text"]
        else:
            # SGLang may have added to the list since.
            known, count = (
                self._tokens + len(self._waiting),
                event["meta_info"]["completion_tokens"],
            )
            tokens, text = tokens[known:count], event["text"][self._length :]
        if not self._waiting and len(tokens) < 2:
            self._unread += tokens
            return self._passed_on(event, [len(text)], len(tokens))
        if not self._waiting:
            for token in self._unread:
                self._ends.add(token)
            self._unread, self._begin = [], self._ends.sent
        self._waiting += map(self._ends.add, tokens)
        whole = self._ends.is_whole
        if not whole and not finish and len(self._waiting) <= MOST_WAITING:
            self._held = [event]
            return []
        ends = [end - self._begin for end in self._waiting]
        # A first token may have lost a space before it; a text that has ended lost its stop.
        late = len(text) - ends[-1] if whole and not finish else 0
        ends = [min(max(end + late, 0), len(text)) for end in ends[:-1]] + [len(text)]
        return self._passed_on(event, ends, len(ends))

    def _passed_on(
        self, event: dict[str, Any], ends: list[int], tokens: int
    ) -> list[dict[str, Any]]:
        parts = list(self._parts(event, ends))
        self._held, self._waiting = [], []
        self._tokens, self._length = self._tokens + tokens, self._length + ends[-1]
        return parts

    def _parts(self, event: dict[str, Any], ends: list[int]) -> Iterator[dict[str, Any]]:
        """Events whose new texts end there. The last has what an event has besides tokens."""
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


def _decoder(manager: Any, obj: Any) -> Callable[[list[int]], str]:
    """Token ids -> text, as SGLang's detokenizer makes it for the request."""
    params = obj.sampling_params
    params = params[0] if isinstance(params, list) else params
    params = {**(manager.preferred_sampling_params or {}), **params}
    skip = params.get("skip_special_tokens", True)
    spaces = params.get("spaces_between_special_tokens", True)

    def decode(ids: list[int]) -> str:
        # Of its object, the method reads the tokenizer only.
        return str(DetokenizerManager._grouped_batch_decode(manager, [ids], [skip], [spaces])[0])

    return decode
