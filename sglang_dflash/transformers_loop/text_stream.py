"""Token ids to text while they are generated."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from tokenizers.decoders import DecodeStream

logger = logging.getLogger(__name__)


class TextStream:
    """Token ids to text, piece by piece. Text that was written does not change later.

    A tokenizer without a Rust backend cannot decode a part of a text: all of it is written by
    `end`. `write` is called with each new piece.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], Any]) -> None:
        self._tokenizer, self._write = tokenizer, write
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is None:
            logger.warning(
                "%s has no backend of the tokenizers library: the text is written at the end",
                type(tokenizer).__name__,
            )
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids, self._written = list[int](), 0

    def add(self, new: list[int]) -> None:
        """Append ids, and write the text if it ends with a whole character."""
        self._ids += new
        if self._backend is None:
            return
        # One by one: of a list, whole characters wait for an incomplete one at its end.
        for token in new:
            piece = self._stream.step(self._backend, token)
            if piece:
                self._put(piece)

    def end(self) -> None:
        """Write what is left, incomplete characters included."""
        decode = (self._backend or self._tokenizer).decode
        rest = decode(self._ids, skip_special_tokens=True)[self._written :]
        if rest:
            self._put(rest)

    def _put(self, text: str) -> None:
        self._written += len(text)
        self._write(text)
