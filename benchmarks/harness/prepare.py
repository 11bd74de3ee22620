# SPDX-License-Identifier: Apache-2.0
"""Makes one contender ready for the clock, and proves first that what will be timed is right."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from benchmarks.harness import inputs
from benchmarks.harness.errors import SkippedError, WrongResultError
from benchmarks.harness.gate import relative_error
from benchmarks.harness.implementations import IMPLEMENTATIONS, precision_of
from benchmarks.harness.inputs import Arrays
from benchmarks.harness.operation import different, operation_of
from benchmarks.harness.program import Program
from benchmarks.harness.suites import Contender
from benchmarks.harness.timing import Stopwatch
from benchmarks.harness.yardstick import Yardstick

# Factor on the gate's limits for implementations that are not strict.
PEER_SLACK = 4.0


@dataclasses.dataclass
class Prepared:
    """A program that passed the gate, its stopwatch and the row fields known so far."""

    stopwatch: Stopwatch
    call_ms: float
    fields: dict[str, Any]
    outputs: list[np.ndarray]


def refuse_large(contender: Contender, max_kv_gb: float) -> None:
    """Raises SkippedError when K and V together exceed the limit."""
    if contender.case.kv_mb > max_kv_gb * 1024:
        raise SkippedError(f"K+V > {max_kv_gb:g} GB")


def check_program(
    program: Program,
    contender: Contender,
    arrays: Arrays,
    yardstick: Yardstick | None,
    precision: str,
) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Runs the program twice and returns the error fields and its outputs.

    Raises WrongResultError when an output is outside the gate, is missing, or is the same for other
    inputs (a constant-folded or cached result).
    """
    staged = program.stage(arrays)
    outputs = _run(program, staged)
    del staged
    names = operation_of(contender.case).part_names(contender.case)
    if len(outputs) != len(names):
        raise WrongResultError(f"returned {len(outputs)} outputs, expected {', '.join(names)}")
    fields: dict[str, Any] = {}
    if yardstick is not None:
        verdict = yardstick.judge(outputs, precision)
        if verdict.failure:
            # A peer may be less exact than our own rule asks; it is measured all the same, as a
            # user would run it, and its row says so. Beyond the slack it is wrong like any other.
            lenient = yardstick.judge(outputs, precision, PEER_SLACK)
            if lenient.failure or IMPLEMENTATIONS[contender.impl].strict:
                raise WrongResultError(verdict.failure)
            fields["note"] = f"less exact than the accuracy rule: {verdict.failure}"
        if yardstick.part is None:
            fields["rel_err"] = verdict.rel_err
            fields["rel_err_parts"] = verdict.rel_err_parts
    if not all(np.isfinite(output).all() for output in outputs):
        raise WrongResultError("an output holds values that are not finite")
    others = _run(program, program.stage(different(arrays)))
    for name, output, other in zip(names, outputs, others, strict=True):
        if output.size and np.array_equal(output, other):
            raise WrongResultError(f"{name} is the same for different inputs: it was not computed")
    return fields, outputs


def _run(program: Program, staged: Any) -> list[np.ndarray]:
    outputs = program.run(staged)
    program.wait(outputs)
    return program.to_numpy(outputs)


def prepare(
    contender: Contender,
    arrays: Arrays,
    yardstick: Yardstick | None,
    backend: str,
    cache_bytes: int,
) -> Prepared:
    """Compiles, checks and calibrates; any failure is an exception that errors.describe knows."""
    inputs.check_inputs(arrays)
    case = contender.case
    precision = precision_of(contender.impl, case.dtype, backend)
    program = operation_of(case).program(contender.impl, case, arrays, backend)
    fields = {"kv_mb": case.kv_mb, "compile_s": program.compile_s, **program.memory}
    error_fields, outputs = check_program(program, contender, arrays, yardstick, precision)
    stopwatch = Stopwatch(program, arrays, cache_bytes, queue_calls=backend != "cpu")
    call_ms = stopwatch.calibrate()
    return Prepared(stopwatch, call_ms, fields | error_fields, outputs)


def against_baseline(outputs: list[np.ndarray], baseline: list[np.ndarray]) -> float:
    """The largest ||x - baseline|| / ||baseline|| over the outputs."""
    return max(
        relative_error(x, b.astype(np.float64)) for x, b in zip(outputs, baseline, strict=True)
    )
