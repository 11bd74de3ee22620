# SPDX-License-Identifier: Apache-2.0
"""--time_budget_s: spends a run's time evenly and drops rounds, never checks or cases."""

from __future__ import annotations

import time
from collections.abc import Callable


class Budget:
    """Decides before each round whether it is still affordable. The first round always is."""

    def __init__(
        self, seconds: float | None, groups: int, clock: Callable[[], float] = time.monotonic
    ):
        self._seconds = seconds
        self._clock = clock
        self._started = clock()
        self._groups_left = groups
        self._group_ends = 0.0
        self.dropped_rounds = 0

    @property
    def elapsed(self) -> float:
        return self._clock() - self._started

    def start_group(self) -> None:
        """Gives the next group an equal share of the time that is left."""
        if self._seconds is not None:
            share = max(0.0, self._seconds - self.elapsed) / max(1, self._groups_left)
            self._group_ends = self.elapsed + share
        self._groups_left -= 1

    def affords(self, round_index: int, round_seconds: float) -> bool:
        """Whether a further round of about `round_seconds` fits the group's share."""
        if self._seconds is None or round_index == 0:
            return True
        return self.elapsed + round_seconds <= self._group_ends

    def drop(self, rounds: int) -> None:
        self.dropped_rounds += rounds

    def summary(self) -> str | None:
        """What was given up, in words; None if nothing."""
        if self._seconds is None:
            return None
        parts = []
        if self.dropped_rounds:
            parts.append(f"{self.dropped_rounds} rounds were dropped; every case ran once")
        if self.elapsed > self._seconds:
            parts.append(
                f"took {self.elapsed:.0f} s of {self._seconds:.0f} s: one checked round of "
                "every case takes that long"
            )
        return f"time budget: {'; '.join(parts)}" if parts else None
