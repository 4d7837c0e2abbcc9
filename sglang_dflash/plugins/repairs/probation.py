"""Search for the request that makes a step fail.

While all others wait, each suspect is tried alone, the newest first, until it is past the point of
failure. A request that fails twice is guilty. If there is none, suspects are admitted together, one
more at a time: either no request is at fault, or several of them fail together, and then the newest
of these is guilty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Probation:
    """The suspects of a failed step, some of which are admitted."""

    def __init__(self, suspects: list[Any], missing: int) -> None:
        """
        Args:
            suspects: requests of the failed step, oldest first.
            missing: output tokens after which a request is past the point of failure.
        """
        self._suspects, self._missing = suspects, missing
        # `_together`: number of suspects that are admitted together, after each was tried alone.
        # `_failed`: the number at which a step has failed.
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
        """Record that a step of the admitted requests has failed. Returns the guilty one, or None
        if it is not known yet."""
        if self._alone:
            self._failures += 1
            return self.admitted[0] if self._failures == 2 else None
        if self._failed == self._together:
            # No suspect fails alone, and without the newest one they pass.
            return self._suspects[self._together - 1]
        if self._one_by_one:
            self._failed = self._together
        else:
            self._together, self._one_by_one = 1, True
        # A request may have reached another point at which it fails.
        self._try_each()
        return None

    def passed(self, in_flight: Sequence[Any]) -> bool:
        """Return whether all admitted requests are past the point of failure, finished or gone."""
        return all(
            request.finished() or len(request.output_ids) >= until or request not in in_flight
            for request, until in zip(self.admitted, self._until, strict=True)
        )

    def advance(self) -> bool:
        """Admit the next requests. Returns whether all have been admitted before."""
        if self._alone and len(self._suspects) > 1:
            self._alone -= 1
        else:
            self._together += 1
        self._try_admitted()
        return self._together > len(self._suspects)

    @property
    def is_alone(self) -> bool:
        return self._alone > 0
