"""The drafts that a step verifies: the draft model's, or what followed the newest tokens of a
request where they stood before (`text_match`).

The choice depends on the match: how many tokens agree, and whether both drafts begin with the same
token. For each class of matches it is known how often either source was right. A verified step
tells that of both, up to the position that it reached, whichever of them it verified. So the
expected number of accepted drafts is the Kaplan-Meier estimate (Kaplan and Meier 1958) from
observations that a step censors: the sum over positions of the product, up to there, of the share
of drafts that were right where all before them were.

Letters in shapes: R requests; B block positions; W positions of a step, up to B; M classes of
matches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash.drafting.acceptance import Accepted
from sglang_dflash.drafting.draft_counters import DraftCounters
from sglang_dflash.drafting.text_match import LONGEST_MATCH, SHORTEST_MATCH

DRAFT, LOOKUP = 0, 1
# A class for matches of up to 2, 4, 8 and 16 tokens, by whether the drafts begin alike, and one
# for no match.
_LONGEST_OF_CLASS = (2, 4, 8, LONGEST_MATCH)
CLASSES = 1 + 2 * len(_LONGEST_OF_CLASS)
# What an observation is worth after the next one of its class: a choice rests on the last few
# hundred of them.
DECAY = 0.995
# A server's beginning, as if that many steps had been seen: the draft is better than a match until
# its steps show otherwise, and a match of 3 tokens or more, or of 2 if the drafts begin alike, is
# better than a shorter one. In a class of which nothing is known, the draft's figures of all
# classes count as that many steps.
PRIOR_STEPS = 3.0
_PRIOR_DRAFT, _PRIOR_GOOD, _PRIOR_POOR = 0.9, 0.8, 0.4


class DraftsBySource(NamedTuple):
    """The drafts of both sources in one step, and the choice between them.

    Attributes:
        tokens: int64 `[2, R, W - 1]`.
        classes: int64 `[R]`, of each request's match, 0 for none.
        looks_up: bool `[R]`, the requests whose drafts are looked up.
    """

    tokens: Tensor
    classes: Tensor
    looks_up: Tensor


class DraftSource:
    """Counts of how often either source was right, over all requests. All are on the device.

    Attributes:
        totals: float32 `[2, 2, M + 1, B - 1]`, how often a draft was reached, and right: by source,
            class and position. The last class is that of all steps; only the draft's is read.
        class_of_length: int64, the class of a match of each number of tokens whose drafts do not
            begin alike.
        vocab_size: ids from there on are no tokens.
        counts: `DraftCounters.by_source`.
    """

    def __init__(self, verify_block: int, vocab_size: int, counters: DraftCounters) -> None:
        """`verify_block`: B."""
        device, shape = counters.device, (2, CLASSES + 1, verify_block - 1)
        reached, share = torch.full(shape, PRIOR_STEPS), torch.full(shape, _PRIOR_GOOD)
        # The draft's own prior is what it does in all classes.
        reached[DRAFT, :CLASSES] = 0
        share[DRAFT, CLASSES], share[LOOKUP, 1] = _PRIOR_DRAFT, _PRIOR_POOR
        self.totals = torch.stack((reached, reached * share)).to(device)
        self.class_of_length = _class_of_length().to(device)
        self.vocab_size, self.counts = vocab_size, counters.by_source
        self._classes = torch.arange(CLASSES, device=device)
        self._positions = torch.arange(verify_block - 1, device=device)

    def classes(self, lengths: Tensor, begin_alike: Tensor) -> Tensor:
        """The class of each request's match, int64 `[R]`, 0 for none.

        Args:
            lengths: int64 `[R]`, tokens that agree.
            begin_alike: bool `[R]`, whether the first drafts of both sources do.
        """
        of_length = self.class_of_length[lengths]
        return of_length + ((of_length > 0) & begin_alike)

    def expected(self, drafts: int) -> Tensor:
        """Expected accepted drafts of a step of that many, by source and class, `[2, M]`."""
        reached, right = self.totals[:, :, :CLASSES, :drafts]
        all_reached, all_right = self.totals[:, DRAFT, CLASSES, :drafts]
        prior = PRIOR_STEPS * all_right / all_reached
        draft = (right[DRAFT] + prior) / (reached[DRAFT] + PRIOR_STEPS)
        shares = torch.stack((draft, right[LOOKUP] / reached[LOOKUP]))
        return shares.cumprod(-1).sum(-1)

    def prefers_lookup(self, classes: Tensor, drafts: int) -> Tensor:
        """Return the requests whose drafts are looked up, bool `[R]`."""
        draft, lookup = self.expected(drafts)
        return (lookup > draft)[classes] & (classes > 0)


def choose_source(
    source: DraftSource,
    drafted: Tensor,
    likeliest: Tensor,
    lengths: Tensor,
    followed: Tensor,
    width: int,
) -> tuple[Tensor, DraftsBySource]:
    """Return the block that a step verifies, int64 `[R, W]`, and the drafts that it was chosen
    from. Positions after a draft's last token have a token that is rarely accepted.

    Args:
        drafted: int64 `[R, ...]`, the bonus tokens and the draft's.
        likeliest: int64 `[R, ...]`, the bonus tokens and the draft's likeliest. The choice rests on
            these: a draft that was drawn may not decide whether it is used.
        lengths, followed: see `text_match.find_match`; `followed` has W - 1 tokens or more.
        width: W, at least 2.
    """
    drafts = drafted[:, 1:width]
    drafts = F.pad(drafts, (0, width - 1 - drafts.shape[1]))
    followed = followed[:, : width - 1]
    # Ids of images are none of the vocabulary.
    is_token = (followed >= 0) & (followed < source.vocab_size)
    looked_up = followed.where(is_token, drafts)
    begin_alike = (followed[:, 0] == likeliest[:, 1]) | ~is_token[:, 0]
    classes = source.classes(lengths, begin_alike)
    looks_up = source.prefers_lookup(classes, width - 1)
    chosen = looked_up.where(looks_up[:, None], drafts)
    by_source = DraftsBySource(torch.stack((drafts, looked_up)), classes, looks_up)
    return torch.cat((drafted[:, :1], chosen), 1), by_source


def learn_source(source: DraftSource, by_source: DraftsBySource, accepted: Accepted) -> None:
    """Take in which drafts were the target's tokens, whichever of them the step verified."""
    tokens, classes, looks_up = by_source
    drafts = tokens.shape[2]
    is_reached = source._positions[:drafts] < accepted.lengths[:, None]
    right = (tokens == accepted.tokens[:, :drafts]).cumprod(-1)
    # A draft was right or wrong where all before it were right.
    reached = F.pad(right, (1, 0), value=1)[..., :-1]
    observed = torch.stack((reached, right)) * is_reached
    of_class = F.pad(classes == source._classes[:, None], (0, 0, 0, 1), value=True)  # [M + 1, R]
    new = of_class.float() @ observed.float()
    decay = torch.where(new[0] > 0, DECAY, 1.0)
    source.totals[..., :drafts].mul_(decay).add_(new)
    taken = torch.stack((torch.ones_like(accepted.lengths), accepted.lengths - 1), 1)
    source.counts.index_add_(0, looks_up.long(), taken)


def _class_of_length() -> Tensor:
    """The class of a match of each number of tokens whose drafts do not begin alike, int64."""
    longest = torch.tensor(_LONGEST_OF_CLASS)
    lengths = torch.arange(LONGEST_MATCH + 1)
    classes = 1 + 2 * torch.searchsorted(longest, lengths)
    return classes.masked_fill(lengths < SHORTEST_MATCH, 0)
