# SPDX-License-Identifier: Apache-2.0
"""--plot: one PNG of times, drawn with matplotlib. `//benchmarks:report` makes the full page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.harness.flags import FlagError
from benchmarks.harness.pool import pool


def require(suite: str) -> None:
    """Raises FlagError where nothing can be drawn: before the run, not after it."""
    if suite == "peak":
        raise FlagError("--plot: draws times and suite peak has none; use //benchmarks:report")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise FlagError(
            f"--plot needs matplotlib ({error}); run with --config=peers, "
            "or make a page with //benchmarks:report instead"
        ) from error


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A panel per suite; a point per contender, whiskers from quartile to quartile."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [one for one in pool(rows) if one.median_ms is not None]
    suites = list(dict.fromkeys(one.case.suite for one in timed))
    if not suites:
        suites, timed = ["nothing was timed"], []
    counts = [max(1, sum(one.case.suite == suite for one in timed)) for suite in suites]
    figure, axes = pyplot.subplots(
        len(suites),
        1,
        figsize=(10, 1.2 + 0.24 * sum(counts) + 0.8 * len(suites)),
        height_ratios=counts,
        squeeze=False,
        layout="constrained",
    )
    for axis, suite in zip(axes[:, 0], suites, strict=True):
        bars = [one for one in timed if one.case.suite == suite]
        names = [f"{one.key} · {one.case.problem.label()}" for one in bars]
        medians = [one.median_ms or 0.0 for one in bars]
        below = [max(0.0, m - (one.q1_ms or m)) for one, m in zip(bars, medians, strict=True)]
        above = [max(0.0, (one.q3_ms or m) - m) for one, m in zip(bars, medians, strict=True)]
        # Points, not bars: on a logarithmic axis the length of a bar means nothing.
        axis.errorbar(medians, range(len(bars)), xerr=[below, above], fmt="o", color="#3b6ea8")
        axis.set_yticks(range(len(bars)), names, fontsize=7)
        axis.invert_yaxis()
        axis.set_xlabel("ms per call (median; whiskers: quartiles)")
        axis.set_title(suite, loc="left", fontweight="bold")
        if medians:
            axis.set_xscale("log")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
