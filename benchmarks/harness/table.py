# SPDX-License-Identifier: Apache-2.0
"""The table at the end of a run: time, ratio to the baseline, work done, share of the peak."""

from __future__ import annotations

import math
import textwrap
from typing import Any

from benchmarks.harness import ceilings as ceilings_module
from benchmarks.harness import work
from benchmarks.harness.implementations import IMPLEMENTATIONS
from benchmarks.harness.pool import Pooled, pool

_COLUMNS = (
    "impl",
    "ms",
    "+-%",
    "ratio",
    "TFLOP/s",
    "%peak",
    "GB/s",
    "%read",
    "rel_err",
    "temp MiB",
)

# The width of everything but the columns, which take about 80.
_WIDTH = 100


def render(rows: list[dict[str, Any]], baselines: dict[str, str], ceilings: dict[str, Any]) -> str:
    """One block a problem, one line a contender; rounds are pooled."""
    lines = []
    marked = False
    for problem, contenders in _by_problem(pool(rows)).items():
        lines.append("")
        lines.append(problem)
        baseline = _baseline(contenders, baselines)
        cells = [_COLUMNS]
        for contender in contenders:
            line, mark = _cells(contender, baseline, ceilings)
            marked |= mark
            cells.append(line)
        lines += _aligned(cells)
    lines.append("")
    lines.append(_legend(ceilings))
    if marked:
        lines.append(
            "* the products of the two run in different precisions: not a like-for-like ratio"
        )
    return "\n".join(lines)


def _legend(ceilings: dict[str, Any]) -> str:
    peaks = ", ".join(f"{name} {value:.4g}" for name, value in ceilings["gflops"].items())
    text = (
        f"ceilings ({ceilings['method']}): GFLOP/s {peaks}; read {ceilings['read_gb_s']:.4g} GB/s. "
        "+-%: half the quartiles' distance. ratio: to the baseline (its line has 1), below 1 is "
        "faster. temp: what XLA allocates beside arguments and results."
    )
    return textwrap.fill(text, _WIDTH)


def _by_problem(pooled: list[Pooled]) -> dict[str, list[Pooled]]:
    problems: dict[str, list[Pooled]] = {}
    for contender in pooled:
        problem = f"{contender.case.suite} {contender.case.problem.label()}"
        problems.setdefault(problem, []).append(contender)
    order = list(IMPLEMENTATIONS)
    for contenders in problems.values():
        contenders.sort(key=lambda one: order.index(one.impl) if one.impl in order else len(order))
    return problems


def _baseline(contenders: list[Pooled], baselines: dict[str, str]) -> Pooled | None:
    timed = [contender for contender in contenders if contender.median_ms is not None]
    named = [c for c in timed if c.impl == baselines.get(c.run)]
    # A baseline that could not run leaves the ratios to the first one that could.
    return next(iter(named or timed), None)


def _cells(
    contender: Pooled, baseline: Pooled | None, ceilings: dict[str, Any]
) -> tuple[tuple[str, ...], bool]:
    name = contender.key
    if contender.error is not None:
        # Whole in the file, and on stderr when it happened.
        return (name, textwrap.shorten(contender.error, _WIDTH - 24, placeholder=" ...")), False
    if contender.longest_seq is not None:
        return (name, f"longest {contender.longest_seq}", f"limit: {contender.limit}"), False
    if contender.peak_mb is not None and contender.median_ms is None:
        return (
            name,
            f"peak {contender.peak_mb:.1f} MiB",
            f"inputs {contender.inputs_mb:.1f}",
        ), False
    assert contender.median_ms and contender.q1_ms and contender.q3_ms
    spread = 50 * (contender.q3_ms - contender.q1_ms) / contender.median_ms
    ratio, mark = "", False
    if baseline is not None and baseline.median_ms:
        mark = baseline.precision != contender.precision
        ratio = f"{contender.median_ms / baseline.median_ms:.3f}{'*' if mark else ''}"
    amount = work.count(contender.case)
    tflops = amount.tflops(contender.median_ms)
    gb_per_s = amount.gb_per_s(contender.median_ms)
    peak = ceilings_module.compute_gflops(ceilings, contender.precision)
    read = ceilings.get("read_gb_s")
    line = (
        name,
        _significant(contender.median_ms, 4),
        f"{spread:.1f}",
        ratio,
        _significant(tflops, 3),
        f"{100e3 * tflops / peak:.0f}" if peak else "",
        _significant(gb_per_s, 3),
        f"{100 * gb_per_s / read:.0f}" if read else "",
        "" if contender.rel_err is None else f"{contender.rel_err:.1e}",
        "" if contender.xla_temp_mb is None else f"{contender.xla_temp_mb:.1f}",
    )
    return line, mark


def _significant(value: float, digits: int) -> str:
    """A positive number with this many digits, zeros at the end included."""
    if value < 1e-4:
        return f"{value:.1e}"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(value)))}f}"


def _aligned(cells: list[tuple[str, ...]]) -> list[str]:
    """Columns padded to their widest cell; texts of error lines do not widen a column."""
    full = [line for line in cells if len(line) == len(_COLUMNS)]
    if len(full) == 1:
        # Nothing under the heads: memory, lengths and errors say themselves what they are.
        cells = cells[1:]
    widths = [max(len(line[i]) for line in full) for i in range(len(_COLUMNS))]
    widths[0] = max(len(line[0]) for line in cells)
    lines = []
    for line in cells:
        if len(line) == len(_COLUMNS):
            rest = "  ".join(
                cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)
            )
        else:
            rest = "  ".join(line[1:])
        lines.append(f"  {line[0].ljust(widths[0])}  {rest}".rstrip())
    return lines
