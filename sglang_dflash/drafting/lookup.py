"""Blocks that continue what a request has already seen.

The tokens of every running request stand in a table on the device. In each step its newest ones are
looked up among its earlier ones; what followed there is a draft that costs no forward.

Letters in shapes: R requests, B block positions, C positions of the longest request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sglang_dflash.drafting.attention.table import RequestSlots

if TYPE_CHECKING:
    from sglang_dflash.drafting.drafter import Proposer
    from sglang_dflash.drafting.groups import KVGroup, Written
    from sglang_dflash.drafting.ops import TorchOps

# Newest tokens that are compared, at most.
LONGEST_MATCH = 16
# A match of so many tokens replaces the draft.
LONG_MATCH = 3
# So does one of at least two tokens if the draft begins as it goes on.
SHORT_MATCH = 2
# What stands for ids that the table does not hold, such as hashes of images.
_NO_TOKEN = 2**31 - 1


class Seen(NamedTuple):
    """What the newest tokens of R requests stood before, the last time.

    Attributes:
        lengths: int64 `[R, 1]`, how many of them stood there, up to `LONGEST_MATCH`.
        tokens: int64 `[R, N]`, what followed; anything if none stood there.
    """

    lengths: Tensor
    tokens: Tensor


def continue_seen(block: Tensor, texts: Tensor, requests: RequestSlots, vocab_size: int) -> Tensor:
    """Replace drafts by what followed the newest tokens of a request where they stood before.

    Of the earlier places in a request's text, the one that agrees with the end of the text in the
    most tokens is taken, the latest of several. Reads nothing on the host.

    Args:
        block: int64 `[R, B]`, bonus tokens and drafts; the drafts are overwritten.
        texts: int32 `[rows, positions]`, the tokens of each row's request. What it holds from
            `seq_lens` on is not read.
        requests: the bonus tokens' positions are their `seq_lens`.
        vocab_size: tokens from there on, of images, are not proposed.

    Returns:
        bool `[R]`: whose drafts are replaced.
    """
    lengths, seen = seen_before(block[:, :1], texts, requests, block.shape[1] - 1)
    agrees = seen[:, :1] == block[:, 1:2]
    taken = (lengths >= LONG_MATCH) | ((lengths >= SHORT_MATCH) & agrees)
    is_token = (seen >= 0) & (seen < vocab_size)
    block[:, 1:] = seen.where(taken & is_token, block[:, 1:])
    return taken[:, 0]


def seen_before(bonus: Tensor, texts: Tensor, requests: RequestSlots, count: int) -> Seen:
    """The `count` tokens after the longest match. A text that repeats its end goes on so.

    Args:
        bonus: int64 `[R, 1]`, newest tokens.
        texts, requests: see `continue_seen`.
    """
    seq_lens, device = requests.seq_lens[:, None], bonus.device
    columns = min(requests.longest, texts.shape[1] - 1) + 1
    text = texts[requests.rows, :columns].scatter_(1, seq_lens, bonus.int())  # [R, C]
    positions = torch.arange(columns, device=device)
    back = seq_lens - torch.arange(LONGEST_MATCH, device=device)
    newest = text.gather(1, back.clamp(min=0)).where(back >= 0, -1)  # [R, LONGEST_MATCH]
    agrees = (text == newest[:, :1]) & (positions < seq_lens)
    lengths = agrees.to(torch.uint8)
    for k in range(1, min(LONGEST_MATCH, columns)):
        agrees[:, k:] &= text[:, :-k] == newest[:, k : k + 1]
        agrees[:, k - 1].fill_(False)
        lengths += agrees
    key = (lengths.int() * columns + positions.int()).amax(1, keepdim=True).long()
    length = key // columns
    end = (key % columns).where(length > 0, 0)
    period = (seq_lens - end).clamp(min=1)
    return Seen(
        length, text.gather(1, end + 1 + torch.arange(count, device=device) % period).long()
    )


class Texts:
    """The tokens of running requests.

    Attributes:
        tokens: int32 `[rows, positions]`, beside SGLang's request-to-token table: at a row and a
            position the token whose slot that table has there.
    """

    def __init__(self, req_to_token: Tensor) -> None:
        self.tokens = torch.zeros_like(req_to_token, dtype=torch.int32)

    def write(self, rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Enter tokens. Of a block it may be drafts, too: those that are not accepted are
        overwritten by the next block before anything reads them.

        Args:
            rows, positions, tokens: int64, of shapes that broadcast.
        """
        self.tokens[rows, positions] = tokens.clamp(max=_NO_TOKEN).int()


class LookupDrafter:
    """A `Proposer`: another one's drafts, or what the request has seen (`continue_seen`).

    Attributes:
        texts: of all requests. The caller writes to them what it computes of prompts, and every
            block that it verifies.
    """

    def __init__(self, drafter: Proposer, ops: TorchOps, texts: Texts, vocab_size: int) -> None:
        self._drafter, self._ops, self._vocab_size = drafter, ops, vocab_size
        self.groups: Sequence[KVGroup] = drafter.groups
        self.counters, self.texts = drafter.counters, texts
        self._seen: Tensor | None = None

    def propose(self, bonus: Tensor, requests: RequestSlots) -> Tensor:
        block = self._drafter.propose(bonus, requests)
        self._seen = self._ops.continue_seen(block, self.texts.tokens, requests, self._vocab_size)
        return block

    def absorb(
        self,
        target_hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
        keep: Tensor | None = None,
        written: Sequence[Written] | None = None,
    ) -> None:
        if keep is not None and self._seen is not None:
            # Of the step's block: the bonus token and accepted drafts.
            self.counters.add_sources(self._seen, keep.view(len(self._seen), -1).sum(1) - 1)
        self._drafter.absorb(target_hidden, positions, slots, keep, written)

    def describe(self) -> Mapping[str, Any]:
        return {**self._drafter.describe(), "lookup_bytes": self.texts.tokens.nbytes}

    def report(self) -> Mapping[str, Any]:
        """Steps of a request and accepted drafts by where the drafts came from, also those of a
        step that ran after its request had ended."""
        counts = self.counters.read()
        steps = {"draft": counts.drafted_steps, "lookup": counts.seen_steps}
        accepted = {"draft": counts.drafted_accepted, "lookup": counts.seen_accepted}
        sources = {"steps_by_source": steps, "accepted_drafts_by_source": accepted}
        return {**self._drafter.report(), **sources}
