"""The drafts that a step verifies: the draft model's, or what followed the newest tokens of a
request where they stood before (`lookup.py`).

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

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash.drafting.acceptance import Accepted
from sglang_dflash.drafting.lookup import LONGEST_MATCH, SHORTEST_MATCH

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
_PRIOR_STEPS, _PRIOR_DRAFT, _PRIOR_GOOD, _PRIOR_POOR = 3.0, 0.9, 0.8, 0.4


class DraftSource:
    """Chooses between the two sources by what was right before, over all requests.

    All of it is computed on the device.
    """

    def __init__(self, verify_block: int, device: torch.device) -> None:
        """`verify_block`: B."""
        share = torch.full((2, CLASSES, 1), _PRIOR_GOOD)
        share[LOOKUP, 1] = _PRIOR_POOR
        reached = torch.full((2, CLASSES, verify_block - 1), _PRIOR_STEPS)
        # The draft's own prior is what it does in all classes.
        reached[DRAFT] = 0
        all_reached = torch.full((verify_block - 1,), _PRIOR_STEPS)
        # How often a draft was reached, and right: of both sources, by class and position; and of
        # the draft model, by position.
        self._totals = torch.stack((reached, reached * share)).to(device)
        self._draft_totals = torch.stack((all_reached, all_reached * _PRIOR_DRAFT)).to(device)
        self._class_of_length = _class_of_length().to(device)
        self._classes = torch.arange(CLASSES, device=device)
        self._positions = torch.arange(verify_block - 1, device=device)

    def classes(self, lengths: Tensor, drafts: Tensor, looked_up: Tensor) -> Tensor:
        """The class of each request's match, int64 `[R]`, 0 for none.

        Args:
            lengths: int64 `[R]`, tokens that agree.
            drafts, looked_up: int64 `[R, W - 1]`, the drafts of both sources.
        """
        of_length = self._class_of_length[lengths]
        return of_length + ((of_length > 0) & (drafts[:, 0] == looked_up[:, 0]))

    def expected(self, drafts: int) -> Tensor:
        """Expected accepted drafts of a step of that many, by source and class, `[2, M]`."""
        reached, right = self._totals[..., :drafts]
        all_reached, all_right = self._draft_totals[..., :drafts]
        prior = _PRIOR_STEPS * all_right / all_reached
        draft = (right[DRAFT] + prior) / (reached[DRAFT] + _PRIOR_STEPS)
        shares = torch.stack((draft, right[LOOKUP] / reached[LOOKUP]))
        return shares.cumprod(-1).sum(-1)

    def looks_up(self, classes: Tensor, drafts: int) -> Tensor:
        """The requests whose drafts are looked up, bool `[R]`."""
        draft, lookup = self.expected(drafts)
        return (lookup > draft)[classes] & (classes > 0)

    def learn(self, classes: Tensor, by_source: Tensor, accepted: Accepted) -> None:
        """Take in which drafts were the target's tokens.

        Args:
            classes: int64 `[R]`.
            by_source: int64 `[2, R, W - 1]`.
            accepted: of the step, whichever of them it verified.
        """
        drafts = by_source.shape[2]
        is_reached = self._positions[:drafts] < accepted.lengths[:, None]
        right = (by_source == accepted.tokens[:, :drafts]).cumprod(-1)
        # A draft was right or wrong where all before it were right.
        reached = F.pad(right, (1, 0), value=1)[..., :-1]
        observed = torch.stack((reached, right)) * is_reached
        of_class = classes == self._classes[:, None]  # [M, R]
        counts = of_class.float() @ observed.float()
        for totals, new in (
            (self._totals, counts),
            (self._draft_totals, counts[:, DRAFT].sum(1)),
        ):
            decay = torch.where(new[0] > 0, DECAY, 1.0)
            totals[..., :drafts].mul_(decay).add_(new)


def _class_of_length() -> Tensor:
    """The class of a match of each number of tokens whose drafts do not begin alike, int64."""
    longest = torch.tensor(_LONGEST_OF_CLASS)
    lengths = torch.arange(LONGEST_MATCH + 1)
    classes = 1 + 2 * torch.searchsorted(longest, lengths)
    return classes.masked_fill(lengths < SHORTEST_MATCH, 0)
