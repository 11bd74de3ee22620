# SPDX-License-Identifier: Apache-2.0
"""Compares two selections of rows, matched by configuration.

What is compared depends on the suite: the median time; for `peak` the peak memory; for `max_seq`
the longest sequence. A ratio below 1 always means that B is better.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from benchmarks.harness.pool import Pooled, pool
from benchmarks.harness.schema import CASE_FIELDS
from benchmarks.harness.summaries import geometric_mean


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One configuration in both selections: value_b / value_a (inverted for longest lengths).

    low and high bound the ratio by the quartiles: q1 of b over q3 of a, and q3 of b over q1 of a;
    where there are no quartiles they are the ratio itself.
    """

    a: Pooled
    b: Pooled
    value_a: float
    value_b: float
    unit: str
    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Whether the whole interval is on one side of 1."""
        if self.high < 1:
            return "better"
        return "worse" if self.low > 1 else "same"

    @property
    def like_for_like(self) -> bool:
        """Whether the products of both run in the same precision."""
        return self.a.precision == self.b.precision


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Everything that a comparison found."""

    matched: list[Comparison]
    only_a: list[Pooled]
    only_b: list[Pooled]
    errors: list[tuple[str, Pooled]]


def compare(
    rows_a: list[dict[str, Any]],
    rows_b: list[dict[str, Any]],
    ignored: frozenset[str] = frozenset(),
) -> Outcome:
    """Matches rows by every case field but `ignored` ones; rounds, tags and runs are pooled."""
    ours, theirs = _by_configuration(rows_a, ignored), _by_configuration(rows_b, ignored)
    matched, errors = [], []
    for key, a in ours.items():
        if key not in theirs:
            continue
        b = theirs[key]
        failed = [(side, one) for side, one in (("A", a), ("B", b)) if _without_number(one)]
        if failed:
            errors += failed
        else:
            matched.append(_comparison(a, b))
    return Outcome(
        matched,
        [one for key, one in ours.items() if key not in theirs],
        [one for key, one in theirs.items() if key not in ours],
        errors,
    )


def ignored_fields(wanted_a: dict[str, str], wanted_b: dict[str, str]) -> frozenset[str]:
    """Fields that both selectors set, to different values: they are what is being compared.

    Comparing precisions that follow from it, as between two implementations, is allowed too.
    """
    different = {
        name for name in wanted_a.keys() & wanted_b.keys() if wanted_a[name] != wanted_b[name]
    }
    if different & {"impl", "dtype"}:
        different.add("precision")
    return frozenset(different)


def _without_number(one: Pooled) -> str | None:
    """Why there is nothing to divide: the error, or a search in which not even one length ran."""
    if one.error is None and one.case.suite == "max_seq" and not one.longest_seq:
        return f"no length ran, the limit was {one.limit}"
    return one.error


def _by_configuration(
    rows: list[dict[str, Any]], ignored: frozenset[str]
) -> dict[tuple[Any, ...], Pooled]:
    merged = [{k: v for k, v in row.items() if k not in ("tag", "run")} for row in rows]
    return {_key_of(one, ignored): one for one in pool(merged)}


def _key_of(one: Pooled, ignored: frozenset[str]) -> tuple[Any, ...]:
    fields = one.case.row_fields() | {"impl": one.impl, "precision": one.precision}
    return tuple(None if name in ignored else fields.get(name) for name in CASE_FIELDS)


def _comparison(a: Pooled, b: Pooled) -> Comparison:
    if a.case.suite == "max_seq":
        longest_a, longest_b = float(a.longest_seq or 0), float(b.longest_seq or 0)
        ratio = longest_a / longest_b
        return Comparison(a, b, longest_a, longest_b, "tokens", ratio, ratio, ratio)
    if a.case.suite == "peak":
        assert a.peak_mb and b.peak_mb
        ratio = b.peak_mb / a.peak_mb
        return Comparison(a, b, a.peak_mb, b.peak_mb, "MiB", ratio, ratio, ratio)
    assert a.median_ms and b.median_ms and a.q1_ms and a.q3_ms and b.q1_ms and b.q3_ms
    return Comparison(
        a,
        b,
        a.median_ms,
        b.median_ms,
        "ms",
        b.median_ms / a.median_ms,
        b.q1_ms / a.q3_ms,
        b.q3_ms / a.q1_ms,
    )


def render(outcome: Outcome) -> str:
    """The comparison as text: a line per configuration, then a summary by suite."""
    lines = []
    unlike = False
    by_suite: dict[str, list[Comparison]] = {}
    for one in outcome.matched:
        by_suite.setdefault(one.a.case.suite, []).append(one)
    for suite, comparisons in by_suite.items():
        lines.append(f"{suite}: B / A (interval from the quartiles)")
        width = max(len(_name(one)) for one in comparisons)
        for one in comparisons:
            mark = "" if one.like_for_like else "*"
            unlike |= not one.like_for_like
            change = f"{one.value_a:10.4g} -> {one.value_b:<10.4g} {one.unit}"
            interval = f"{one.ratio:.3f}{mark} [{one.low:.3f}, {one.high:.3f}] {one.verdict}"
            lines.append(f"  {_name(one).ljust(width)}  {change}  {interval}")
        lines.append("")
    lines.append("summary (B / A, below 1: B is better)")
    for suite, comparisons in by_suite.items():
        lines.append("  " + _summary(suite, comparisons))
    if len(by_suite) > 1:
        lines.append("  " + _summary("all", outcome.matched))
    if unlike:
        lines.append("* computed in different precisions: not a like-for-like ratio")
    for side in ("A", "B"):
        failed = [one for where, one in outcome.errors if where == side]
        if failed:
            lines.append(
                f"errors in {side}: {len(failed)} configurations have no numbers, the first: "
                f"{_only(failed[0])}: {_without_number(failed[0])}"
            )
    for side, rest in (("A", outcome.only_a), ("B", outcome.only_b)):
        if rest:
            lines.append(f"only in {side}: {len(rest)} configurations, the first: {_only(rest[0])}")
    return "\n".join(lines)


def _name(one: Comparison) -> str:
    impl = one.a.impl if one.a.impl == one.b.impl else f"{one.a.impl} -> {one.b.impl}"
    return f"{impl} {one.a.case.label()}"


def _only(one: Pooled) -> str:
    return f"{one.case.suite} {one.impl} {one.case.label()}"


def _summary(name: str, comparisons: list[Comparison]) -> str:
    ratios = [one.ratio for one in comparisons]
    verdicts = [one.verdict for one in comparisons]
    worst = max(comparisons, key=lambda one: one.ratio)
    return (
        f"{name}: {len(ratios)} configurations, geometric mean {geometric_mean(ratios):.3f}, "
        f"median {statistics.median(ratios):.3f}\n"
        f"    better {verdicts.count('better')}, worse {verdicts.count('worse')}, "
        f"within noise {verdicts.count('same')}; worst {worst.ratio:.3f} ({_name(worst)})"
    )
