# SPDX-License-Identifier: Apache-2.0
"""The error gate: a timed result must also be right.

With a float64 reference and an unfused baseline of the same precision, each output x must satisfy

    |x - ref| <= 2 |baseline - ref| + atol

in two norms. In the Euclidean one, which is that of rel_err, atol is twice the rounding of the
output to its dtype plus twice that of (ref + 0.3 - 0.3) in float32. In the maximum norm, which
finds what is wrong in one place only, atol is twice the largest rounding of (ref + 0.3 - 0.3) in
the output's dtype, as in flash-attention's tests. The baseline is evaluated with sums over
features in several orders, and its largest error counts: that of one evaluation of few numbers is
a matter of luck (an honest float32 result of 96 numbers was 1.9 times its limit).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from benchmarks.harness.precision import round_to


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Allowed error of one output: relative in the Euclidean norm, absolute in the maximum."""

    relative: float
    maximum: float

    def times(self, factor: float) -> Tolerance:
        return Tolerance(self.relative * factor, self.maximum * factor)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """rel_err per output and, when the gate is shut, the sentence that says why."""

    rel_err_parts: list[float]
    failure: str | None = None

    @property
    def rel_err(self) -> float:
        return max(self.rel_err_parts)


def relative_error(x: np.ndarray, reference: np.ndarray) -> float:
    """||x - reference|| / ||reference||, with 0 / 0 = 0."""
    norm = float(np.linalg.norm(reference))
    distance = float(np.linalg.norm(x.astype(np.float64) - reference))
    if norm == 0.0:
        return 0.0 if distance == 0.0 else float("inf")
    return distance / norm


def tolerance(reference: np.ndarray, baselines: Sequence[np.ndarray], dtype: str) -> Tolerance:
    """The gate's limits for one output, from its reference and evaluations of its baseline."""
    rounding = relative_error(round_to(reference, dtype), reference)
    shift = relative_error(_shifted(reference, "float32"), reference)
    largest_shift = float(np.abs(_shifted(reference, dtype) - reference).max(initial=0.0))
    relative = max(relative_error(baseline, reference) for baseline in baselines)
    maximum = max(float(np.abs(x - reference).max(initial=0.0)) for x in baselines)
    return Tolerance(
        relative=2 * relative + 2 * (shift + rounding),
        maximum=2 * maximum + 2 * largest_shift,
    )


def _shifted(reference: np.ndarray, dtype: str) -> np.ndarray:
    """(reference + 0.3) - 0.3 with every step rounded to `dtype`."""
    up = round_to(round_to(reference, dtype) + 0.3, dtype)
    return round_to(up - 0.3, dtype)


def judge(
    outputs: list[np.ndarray],
    references: list[np.ndarray],
    tolerances: list[Tolerance],
    names: tuple[str, ...],
) -> Verdict:
    """Compares every output with its reference; the first one outside its limits is named."""
    if len(outputs) != len(references):
        return Verdict(
            [float("inf")],
            f"returned {len(outputs)} outputs, expected {len(references)} ({', '.join(names)})",
        )
    parts: list[float] = []
    failure = None
    for x, reference, limit, name in zip(outputs, references, tolerances, names, strict=True):
        if x.shape != reference.shape:
            return Verdict(
                [float("inf")], f"{name} has shape {x.shape}, expected {reference.shape}"
            )
        error = relative_error(x, reference)
        largest = float(np.abs(x.astype(np.float64) - reference).max(initial=0.0))
        parts.append(error)
        # Written so that NaN fails.
        if failure is None and not (error <= limit.relative and largest <= limit.maximum):
            failure = (
                f"{name}: relative error {error:.3g} (limit {limit.relative:.3g}), "
                f"largest error {largest:.3g} (limit {limit.maximum:.3g})"
            )
    return Verdict(parts, failure)
