"""Time of decode steps by part, by the host's clock."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Shown by name; all other time of a step is the host's.
PARTS = ("verify", "propose", "commit")


class StepTimes:
    """Seconds of decode steps, and of the time between two of a busy scheduler.

    A CPU's work is done when the host goes on. An accelerator's is launched by then: a part's
    seconds are those of its launches, and the host waits for results between steps.

    Attributes:
        seconds: since the start, by phase.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock`: seconds."""
        self.seconds: dict[str, float] = defaultdict(float)
        self._clock = clock
        self._within = self._between = 0.0
        self._steps = self._pauses = 0
        # When the last step ended; None if something else ran since.
        self._ended: float | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time within to that phase."""
        began = self._clock()
        yield
        self.seconds[name] += self._clock() - began

    @contextmanager
    def step(self) -> Iterator[None]:
        """A decode step."""
        began = self._clock()
        if self._ended is not None:
            self._between += began - self._ended
            self._pauses += 1
        yield
        self._ended = self._clock()
        self._within += self._ended - began
        self._steps += 1

    def drop_pause(self) -> None:
        """Leave out the time until the next step: something else than decode steps runs, or nothing
        did."""
        self._ended = None

    @property
    def step_milliseconds(self) -> float | None:
        """Average time from the beginning of a step to the beginning of the next; None without a
        step."""
        if not self._steps:
            return None
        whole = self._within / self._steps + self._between / max(1, self._pauses)
        return round(1e3 * whole, 3)

    def shares(self) -> dict[str, float]:
        """Return each part's share of `step_milliseconds`; "host" is the rest. Empty without a
        step."""
        whole = self.step_milliseconds
        if not whole:
            return {}
        spent = {part: 1e3 * self.seconds[part] / self._steps / whole for part in PARTS}
        shares = spent | {"host": 1 - sum(spent.values())}
        return {part: round(share, 4) for part, share in shares.items()}
