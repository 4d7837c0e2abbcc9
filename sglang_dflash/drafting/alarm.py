"""When are drafts of no use? A rule over the acceptance length of recent verify steps."""

from __future__ import annotations

from sglang_dflash.drafting.acceptance_length import VerifySteps

# A verdict is given every so many verify steps: 16 requests make them in 32 forwards, and one
# request in an answer of 512 tokens. The standard error of a length near 1 is below 0.03 then.
WINDOW = 512
# An acceptance length of 1 means that no draft is ever accepted. A step costs more than one of
# plain decoding, so below this bound it does not pay on any machine that we know of.
LOW = 1.2
# Above it the alarm ends. Between the two it stays as it is.
RECOVERED = 1.5
# Below this share of its context in the draft KV cache, a draft is warned of. A prefix-cache hit
# may miss some: what no draft could see was never projected.
LOW_CONTEXT_SHARE = 0.8
# After a warning, no other for so many verify steps, however often the alarm comes and goes.
QUIET = 100_000

CAUSES = (
    "a draft that was trained for another target",
    "text or a context length that the draft was not trained on",
    "a wrong mask_token_id in the draft's config",
    "a broken draft checkpoint",
    "a draft KV cache that is too small",
)


class AcceptanceAlarm:
    """Raised while the acceptance length stays near 1. Steps without drafts do not count.

    Attributes:
        raised: whether the newest verdict is that drafts are of no use.
        recent: acceptance length of the last `window` verify steps that were judged, or None.
    """

    def __init__(self, window: int = WINDOW, quiet: int = QUIET) -> None:
        self.raised = False
        self.recent: float | None = None
        self._window, self._quiet = window, quiet
        self._open = VerifySteps()
        self._since_warning: int | None = None

    def add(self, steps: VerifySteps) -> str | None:
        """Take in verify steps. Returns a warning if it is time for one."""
        self._open += steps
        if self._since_warning is not None:
            self._since_warning += steps.steps
        length = self._open.acceptance_length
        if length is None or self._open.steps < self._window:
            return None
        judged, self._open, self.recent = self._open.steps, VerifySteps(), length
        was_raised, self.raised = self.raised, length < (RECOVERED if self.raised else LOW)
        early = self._since_warning is not None and self._since_warning < self._quiet
        if was_raised or not self.raised or early:
            return None
        self._since_warning = 0
        return (
            f"acceptance length {length:.2f} over the last {judged} verify steps (1 is no draft "
            "accepted): the drafts are of no use, and a step with them takes longer than one of "
            f"plain decoding. Likely causes: {'; '.join(CAUSES)}"
        )
