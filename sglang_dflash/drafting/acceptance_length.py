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
