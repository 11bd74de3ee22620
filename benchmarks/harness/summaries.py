# SPDX-License-Identifier: Apache-2.0
"""Figures of merit for automatic choices: how far each is from the best that was measured."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

from benchmarks.harness.pool import Pooled, pool


@dataclasses.dataclass(frozen=True)
class Choice:
    """One problem in which an automatic choice ran beside the alternatives.

    `distance` is its time over the best alternative's (itself included): 1 is a perfect choice.
    """

    problem: str
    chosen: Pooled
    best: Pooled

    @property
    def distance(self) -> float:
        assert self.chosen.median_ms is not None and self.best.median_ms is not None
        return self.chosen.median_ms / self.best.median_ms


def choices(pooled: list[Pooled], suite: str) -> list[Choice]:
    """splitsweep: the automatic split count against every count; dispatch: default against all.

    Only contenders whose products run in the same precision are alternatives.
    """
    problems: dict[tuple[Any, ...], list[Pooled]] = {}
    for one in pooled:
        if one.case.suite == suite and one.median_ms is not None:
            key = (one.case.problem, one.precision, one.tag, one.run)
            problems.setdefault(key, []).append(one)
    found = []
    for contenders in problems.values():
        chosen = [one for one in contenders if _is_automatic(one, suite)]
        if chosen and len(contenders) > 1:
            best = min(contenders, key=lambda one: one.median_ms or math.inf)
            found.append(Choice(chosen[0].case.problem.label(), chosen[0], best))
    return found


def _is_automatic(one: Pooled, suite: str) -> bool:
    return one.case.num_splits == "auto" if suite == "splitsweep" else one.impl == "default"


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """The figures as text, per problem and overall; empty where there is no automatic choice."""
    pooled = pool(rows)
    out = []
    for suite, name in (("splitsweep", "automatic split count"), ("dispatch", "default")):
        found = choices(pooled, suite)
        if not found:
            continue
        out.append(f"{suite}: {name} over the best of each sweep (1 is perfect)")
        for choice in found:
            out.append(f"  {choice.distance:6.3f}  {choice.problem}  best: {choice.best.key}")
        distances = [choice.distance for choice in found]
        out.append(
            f"  overall: geometric mean {geometric_mean(distances):.3f}, "
            f"median {statistics.median(distances):.3f}, worst {max(distances):.3f}"
        )
    return out


def geometric_mean(values: list[float]) -> float:
    """Of positive numbers."""
    return math.exp(statistics.fmean(math.log(value) for value in values))
