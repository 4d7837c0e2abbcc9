"""A grammar backend as a user of SGLang may write it: by `BaseGrammarObject`'s interface alone."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.constrained.base_grammar_backend import (
    BaseGrammarBackend,
    BaseGrammarObject,
    InvalidGrammarObject,
)
from torch import Tensor


class OwnGrammar(BaseGrammarObject):
    """A grammar of XGrammar's behind it tells what is allowed."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.theirs = theirs

    def accept_token(self, token: int) -> None:
        self.theirs.accept_token(token)

    def is_terminated(self) -> bool:
        return self.theirs.is_terminated()

    def copy(self) -> OwnGrammar:
        return OwnGrammar(self.theirs.copy())

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: Any) -> Tensor:
        return torch.zeros(batch_size, vocab_size, dtype=torch.bool, device=device)

    def fill_vocab_mask(self, vocab_mask: Tensor, idx: int) -> None:
        packed = self.theirs.allocate_vocab_mask(vocab_mask.shape[1], 1, "cpu")
        self.theirs.fill_vocab_mask(packed, 0)
        bits = packed[0, :, None] >> torch.arange(32) & 1
        vocab_mask[idx] = bits.flatten()[: vocab_mask.shape[1]] == 0

    @staticmethod
    def move_vocab_mask(vocab_mask: Tensor, device: Any) -> Tensor:
        return vocab_mask

    @staticmethod
    def apply_vocab_mask(logits: Tensor, vocab_mask: Tensor) -> None:
        logits.masked_fill_(vocab_mask, float("-inf"))


class OwnBackend(BaseGrammarBackend):
    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.theirs = theirs

    def _init_value_dispatch(self, key: tuple[str, str], require_reasoning: bool) -> Any:
        made = self.theirs._init_value_dispatch(key, require_reasoning)
        return made if isinstance(made, InvalidGrammarObject) else OwnGrammar(made)
