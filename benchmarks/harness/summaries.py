# SPDX-License-Identifier: Apache-2.0
"""Figures of merit for automatic choices: how far each is from the best that was measured."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

from benchmarks.harness.pool import Pooled, pool

# What chooses in the suites that were made to judge it.
AUTOMATIC = {"splitsweep": "automatic split count", "dispatch": "default"}


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

    Other suites ask another question: they have no choices.

    Only contenders whose products run in the same precision are alternatives.
    """
    problems: dict[tuple[Any, ...], list[Pooled]] = {}
    for one in pooled:
        if one.case.suite == suite and one.median_ms is not None:
            key = (one.case.problem, one.precision, one.tag, one.run)
            problems.setdefault(key, []).append(one)
    found = []
    for contenders in problems.values() if suite in AUTOMATIC else ():
        chosen = [one for one in contenders if _is_automatic(one, suite)]
        if chosen and len(contenders) > 1:
            best = min(contenders, key=lambda one: one.median_ms or math.inf)
            found.append(Choice(chosen[0].case.problem.label(), chosen[0], best))
    return found


def _is_automatic(one: Pooled, suite: str) -> bool:
    return one.case.num_splits == "auto" if suite == "splitsweep" else one.impl == "default"


def record(rows: list[dict[str, Any]], suite: str) -> dict[str, Any] | None:
    """The figures of a suite's rows as JSON values; None where there is no automatic choice.

    {geometric_mean, median, worst, problems: [{problem, distance, best}]}
    """
    found = choices(pool(rows), suite)
    if not found:
        return None
    distances = [choice.distance for choice in found]
    return {
        "geometric_mean": geometric_mean(distances),
        "median": statistics.median(distances),
        "worst": max(distances),
        "problems": [
            {"problem": one.problem, "distance": one.distance, "best": one.best.key}
            for one in found
        ],
    }


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """The figures as text, per problem and overall; empty where there is no automatic choice."""
    out = []
    for suite, name in AUTOMATIC.items():
        figures = record(rows, suite)
        if figures is None:
            continue
        out.append(f"{suite}: {name} over the best of each sweep (1 is perfect)")
        for one in figures["problems"]:
            out.append(f"  {one['distance']:6.3f}  {one['problem']}  best: {one['best']}")
        out.append(
            f"  overall: geometric mean {figures['geometric_mean']:.3f}, "
            f"median {figures['median']:.3f}, worst {figures['worst']:.3f}"
        )
    return out


def geometric_mean(values: list[float]) -> float:
    """Of positive numbers."""
    return math.exp(statistics.fmean(math.log(value) for value in values))
