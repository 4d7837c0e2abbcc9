"""Search for the request, of several, that makes a step fail.

While others wait, each suspect is tried alone, the newest first, until it is past the point of
failure. A request with which a step fails twice is guilty. If there is none, they are tried
together: the failure was no request's fault, or needs some of them together, and then the newest of
these is guilty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Probation:
    """The suspects of a failed step, and which of them are admitted."""

    def __init__(self, suspects: list[Any], missing: int) -> None:
        """
        Args:
            suspects: the oldest first.
            missing: output tokens after which a request is past the point of failure.
        """
        self._suspects, self._missing = suspects, missing
        # How many are admitted together, once each was alone; and of how many a step has failed.
        self._together, self._failed, self._one_by_one = len(suspects), 0, False
        self._try_each()

    def _try_each(self) -> None:
        self._alone = len(self._suspects)
        self._try_admitted()

    def _try_admitted(self) -> None:
        self._failures = 0
        self._until = [len(request.output_ids) + self._missing for request in self.admitted]

    @property
    def admitted(self) -> list[Any]:
        if self._alone:
            return [self._suspects[self._alone - 1]]
        return self._suspects[: self._together]

    def failed(self) -> Any:
        """A step with those admitted failed. Returns the guilty one, None if it is not known."""
        if self._alone:
            self._failures += 1
            return self.admitted[0] if self._failures == 2 else None
        if self._failed == self._together:
            # None fails alone, and without the newest they pass.
            return self._suspects[self._together - 1]
        if self._one_by_one:
            self._failed = self._together
        else:
            self._together, self._one_by_one = 1, True
        # One may have reached another point at which it fails.
        self._try_each()
        return None

    def passed(self, in_flight: Sequence[Any]) -> bool:
        """Return whether all admitted requests are past the point of failure, have finished or are
        gone."""
        return all(
            request.finished() or len(request.output_ids) >= until or request not in in_flight
            for request, until in zip(self.admitted, self._until, strict=True)
        )

    def advance(self) -> bool:
        """Admit others, after a pass. Returns whether all have been admitted."""
        if self._alone and len(self._suspects) > 1:
            self._alone -= 1
        else:
            self._together += 1
        self._try_admitted()
        return self._together > len(self._suspects)

    @property
    def is_alone(self) -> bool:
        return self._alone > 0
