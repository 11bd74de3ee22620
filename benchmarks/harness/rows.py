# SPDX-License-Identifier: Apache-2.0
"""Builds result rows: case, implementation, numbers or the error in their place."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.errors import CRASHED
from benchmarks.harness.implementations import IMPLEMENTATIONS, precision_of
from benchmarks.harness.schema import CASE_FIELDS
from benchmarks.harness.suites import Contender
from benchmarks.harness.timing import Quartiles


def base(contender: Contender, backend: str, tag: str | None, run: str) -> dict[str, Any]:
    """The fields that every row of a contender has."""
    row = contender.case.row_fields()
    row["impl"] = contender.impl
    name = contender.impl if contender.impl in IMPLEMENTATIONS else "default"
    row["precision"] = precision_of(name, contender.case.dtype, backend)
    row["tag"] = tag
    row["run"] = run
    return row


def failed(row: dict[str, Any], error: str) -> dict[str, Any]:
    """The row with an error in the numbers' place."""
    return row | {"error": error}


def timed(
    row: dict[str, Any],
    fields: dict[str, Any],
    round_index: int,
    inner: int,
    samples: list[float],
    baseline: str,
) -> dict[str, Any]:
    """One round's row; a round without samples is an error, never a silent gap."""
    if not samples:
        return failed(row, f"{CRASHED}: nothing was timed in round {round_index}")
    fields = dict(fields)
    if "rel_vs_baseline" in fields:
        fields[f"rel_vs_{baseline}"] = fields.pop("rel_vs_baseline")
    quartiles = Quartiles.of(samples)
    return (
        row
        | fields
        | {
            "round": round_index,
            "inner": inner,
            "median_ms": quartiles.median_ms,
            "q1_ms": quartiles.q1_ms,
            "q3_ms": quartiles.q3_ms,
        }
    )


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    """What makes a row the same measurement within a run, for --resume."""
    return tuple(row.get(name) for name in CASE_FIELDS)
