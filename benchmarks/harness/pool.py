# SPDX-License-Identifier: Apache-2.0
"""Pools the rounds of one measurement: what tables, comparisons and charts show."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from benchmarks.harness.case import Case
from benchmarks.harness.schema import CASE_FIELDS


@dataclasses.dataclass
class Pooled:
    """All rounds of one contender of one run.

    Times are medians over the rounds of the rounds' own quartiles. `error` is set where there is
    no number. The memory and accuracy fields are those of the first round that has them.
    """

    case: Case
    impl: str
    precision: str
    tag: str | None
    run: str
    rounds: int
    median_ms: float | None = None
    q1_ms: float | None = None
    q3_ms: float | None = None
    error: str | None = None
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> str:
        """The contender within its problem."""
        return self.case.contender(self.impl)

    @property
    def rel_err(self) -> float | None:
        return self.fields.get("rel_err")

    @property
    def xla_temp_mb(self) -> float | None:
        return self.fields.get("xla_temp_mb")

    @property
    def peak_mb(self) -> float | None:
        return self.fields.get("peak_mb")

    @property
    def inputs_mb(self) -> float | None:
        return self.fields.get("inputs_mb")

    @property
    def longest_seq(self) -> int | None:
        return self.fields.get("longest_seq")

    @property
    def limit(self) -> str | None:
        return self.fields.get("limit")


_NOT_POOLED = frozenset(CASE_FIELDS) | {"round", "tag", "run", "error"}
_TIMES = ("median_ms", "q1_ms", "q3_ms")


def case_of(row: dict[str, Any]) -> Case:
    """The case that a row of the current schema describes."""
    names = {field.name for field in dataclasses.fields(Case)}
    return Case(**{name: value for name, value in row.items() if name in names})


def pool(rows: list[dict[str, Any]]) -> list[Pooled]:
    """Pools rows of equal case, implementation, tag and run, in order of first appearance."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = tuple(row.get(name) for name in (*CASE_FIELDS, "tag", "run"))
        groups.setdefault(key, []).append(row)
    return [_pool_one(group) for group in groups.values()]


def _pool_one(rows: list[dict[str, Any]]) -> Pooled:
    first = rows[0]
    good = [row for row in rows if "error" not in row]
    pooled = Pooled(
        case=case_of(first),
        impl=first["impl"],
        precision=first.get("precision", first["dtype"]),
        tag=first.get("tag"),
        run=first.get("run", ""),
        rounds=len(good),
    )
    if not good:
        pooled.error = first["error"]
        return pooled
    timed = [row for row in good if "median_ms" in row]
    if timed:
        pooled.median_ms = statistics.median(row["median_ms"] for row in timed)
        pooled.q1_ms = statistics.median(row["q1_ms"] for row in timed)
        pooled.q3_ms = statistics.median(row["q3_ms"] for row in timed)
    for row in reversed(good):
        pooled.fields |= {
            name: value
            for name, value in row.items()
            if name not in _NOT_POOLED and name not in _TIMES
        }
    return pooled
