"""Acceptance length, defined once. Every count and figure of this package follows it.

The **acceptance length** is the mean number of tokens that a request gets from a verify step:

    acceptance length = tokens kept from verify steps / verify steps

- A *verify step* is one forward of the target over a block of a request, with at least one draft.
  It counts if its result reaches the request: the step of a request that has finished or was
  retracted meanwhile does not count. Overlap scheduling runs one such step per request.
- A *token* counts if the request keeps it: the accepted drafts and the bonus token, as far as
  `max_new_tokens`, a stop token or string, or a grammar's end leave them in the answer.
- Tokens of prefills do not count: the first token of a request, one more if it was retracted, and
  those that `--enable-mixed-chunk` decodes along with another request's prompt.
- Steps *without drafts* (a request that takes one token per step, or width 1) are counted
  separately: they say nothing about the draft.

The integers are the data; a ratio is taken at the end, so that differences between two readings are
exact. Other definitions go by other names: SGLang's `spec_accept_length` divides all tokens of an
answer, the first included, by its steps; SGLang's log ("accept len") and vLLM's counters include
tokens that the request does not keep; so do the per-step lists of z-lab's benchmark.
"""

from __future__ import annotations

from dataclasses import dataclass

# A verdict is given every so many verify steps: 16 requests make them in 32 forwards, and one
# request in an answer of 512 tokens. The standard error of a length near 1 is below 0.03 then.
JUDGED_STEPS = 512
# An acceptance length of 1 means that no draft is ever accepted. A step costs more than one of
# plain decoding, so below this bound it does not pay on any machine that we know of.
LOW = 1.2
# Above it the alarm ends. Between the two it stays as it is.
RECOVERED = 1.5
# Below this share of its context in the draft KV cache, a draft is warned of. A prefix-cache hit
# may miss some: what no draft could see was never projected. Sessions that return to the default
# ring find two thirds, which costs them next to nothing (docs/results.md).
LOW_CONTEXT_SHARE = 0.5
# After a warning, no other for so many verify steps, however often the alarm comes and goes.
QUIET = 100_000

CAUSES = (
    "a draft that was trained for another target",
    "text or a context length that the draft was not trained on",
    "a wrong mask_token_id in the draft's config",
    "a broken draft checkpoint",
    "a draft KV cache that is too small",
)


@dataclass(frozen=True)
class VerifySteps:
    """Verify steps, and the tokens that were kept from them."""

    steps: int = 0
    tokens: int = 0

    def __add__(self, other: VerifySteps) -> VerifySteps:
        return VerifySteps(self.steps + other.steps, self.tokens + other.tokens)

    def __sub__(self, earlier: VerifySteps) -> VerifySteps:
        return VerifySteps(self.steps - earlier.steps, self.tokens - earlier.tokens)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per step; None without a step."""
        return self.tokens / self.steps if self.steps else None


def of_answer(verify_steps: int, tokens: int) -> VerifySteps:
    """The count of one answer that has `tokens` tokens.

    Exact for a request with drafts that was neither retracted nor decoded along with a prompt: its
    first token comes from its prefill, all others from verify steps.
    """
    return VerifySteps(verify_steps, tokens - 1 if verify_steps else 0)


class AcceptanceAlarm:
    """Raised while the acceptance length stays near 1. Steps without drafts do not count.

    Attributes:
        raised: whether the newest verdict is that drafts are of no use.
        recent: acceptance length of the newest verify steps that were judged, or None.
    """

    def __init__(self) -> None:
        self.raised = False
        self.recent: float | None = None
        self._open = VerifySteps()
        self._since_warning: int | None = None

    def add(self, steps: VerifySteps) -> str | None:
        """Take in verify steps. Returns a warning if it is time for one."""
        self._open += steps
        if self._since_warning is not None:
            self._since_warning += steps.steps
        length = self._open.acceptance_length
        if length is None or self._open.steps < JUDGED_STEPS:
            return None
        judged, self._open, self.recent = self._open.steps, VerifySteps(), length
        was_raised, self.raised = self.raised, length < (RECOVERED if self.raised else LOW)
        early = self._since_warning is not None and self._since_warning < QUIET
        if was_raised or not self.raised or early:
            return None
        self._since_warning = 0
        return (
            f"acceptance length {length:.2f} over the last {judged} verify steps (1 is no draft "
            "accepted): the drafts are of no use, and a step with them takes longer than one of "
            f"plain decoding. Likely causes: {'; '.join(CAUSES)}"
        )
