# SPDX-License-Identifier: Apache-2.0
"""The accuracy rule, after flash-attention's: never a fixed tolerance.

    max|got - ref| <= 2 * max|baseline - ref| + atol

`ref` is float64 (longdouble for float64 inputs). `baseline` is unfused attention of the same
precision: float32 accumulation and softmax, product operands (P and dS too) rounded to the input's
dtype, or to 10 mantissa bits for tf32; the output rounded to the input's dtype before the backward
pass reads it; float64 throughout for float64. atol is the rounding noise
of the result itself: 2 * max|(ref + 0.3 - 0.3) - ref| in the result's dtype, 3 * with a soft cap.

Results that are long sums of score gradients (bias, slopes, scale) may hold one number only, where
a lucky baseline has no error at all. For them the textbook bound of a float32 sum is added:
2**-23 * sum|terms|.
"""

import dataclasses

import ml_dtypes
import numpy as np

from tests.cases import reference
from tests.cases.problem import DIFFERENTIABLE, Problem

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float64": np.dtype(np.float64),
}


def round_tf32(x):
    """Rounds float32 to 10 explicit mantissa bits, to nearest, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    odd = (bits >> np.uint32(13)) & np.uint32(1)
    return ((bits + np.uint32(0xFFF) + odd) & np.uint32(0xFFFFE000)).view(np.float32)


def _round_to(dtype):
    return lambda x: np.asarray(x).astype(dtype).astype(np.float32)


def baseline_arithmetic(dtype, tf32=False) -> reference.Arithmetic:
    """The fixed same-precision arithmetic for inputs of `dtype`."""
    dtype = np.dtype(dtype)
    if dtype == np.float64:
        return reference.FLOAT64
    if dtype == np.float32:
        return reference.Arithmetic(np.float32, round_tf32 if tf32 else lambda x: x)
    rounded = _round_to(dtype)
    return reference.Arithmetic(np.float32, rounded, rounded)


def reference_arithmetic(dtype) -> reference.Arithmetic:
    return reference.LONGDOUBLE if np.dtype(dtype) == np.float64 else reference.FLOAT64


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a result is checked against."""

    reference: np.ndarray
    baseline: np.ndarray  # rounded to the result's dtype
    slack: float = 0.0  # bound of a long sum, see the module's text


def _noise(ref, dtype):
    """max|(ref + 0.3 - 0.3) - ref| in `dtype`."""
    finite = ref[np.isfinite(ref)].astype(dtype)
    if finite.size == 0:
        return 0.0
    shifted = (finite + dtype.type(0.3)).astype(dtype)
    shifted = (shifted - dtype.type(0.3)).astype(dtype)
    return float(np.abs(shifted.astype(np.float64) - finite.astype(np.float64)).max())


def assert_accurate(name, got, expected: Expected, *, soft_cap=False, factor=2.0):
    """Fails, saying where and by how much, unless `got` obeys the accuracy rule.

    Infinities must stand where the reference has them, with their sign; NaN never passes.
    """
    got = np.asarray(got)
    ref, base = expected.reference, expected.baseline
    assert got.shape == ref.shape, f"{name}: shape {got.shape}, expected {ref.shape}"
    if ref.size == 0:
        return
    wide = ref.dtype if ref.dtype == np.longdouble else np.dtype(np.float64)
    values = got.astype(wide)
    infinite = np.isinf(ref)
    assert not np.isnan(values).any(), (
        f"{name}: {int(np.isnan(values).sum())} NaN of {values.size}, "
        f"the first at {tuple(np.argwhere(np.isnan(values))[0])}"
    )
    same = np.where(infinite, values == ref, np.isfinite(values))
    assert same.all(), (
        f"{name}: infinities differ, first at {tuple(np.argwhere(~same)[0])}: got "
        f"{values[tuple(np.argwhere(~same)[0])]}, expected {ref[tuple(np.argwhere(~same)[0])]}"
    )
    zero = np.zeros((), wide)
    error = np.abs(np.where(infinite, zero, values) - np.where(infinite, zero, ref))
    with np.errstate(invalid="ignore"):
        base_error = np.where(infinite, zero, np.abs(base.astype(wide) - ref))
    atol = (3 if soft_cap else 2) * _noise(ref, got.dtype) + expected.slack
    bound = factor * base_error.max() + atol
    if not error.max() <= bound:
        where = np.unravel_index(int(error.argmax()), error.shape)
        where = tuple(int(i) for i in where)
        raise AssertionError(
            f"{name}: max error {float(error.max()):.3e} at {where} (got {values[where]}, "
            f"reference {ref[where]}); the bound is {float(bound):.3e} = {factor:g} * baseline's "
            f"{float(base_error.max()):.3e} + {atol:.3e}"
        )


def expected_forward(problem: Problem, *, tf32=False) -> dict[str, Expected]:
    """What out (in the input's dtype) and lse (float32; float64 for float64) must be."""
    dtype = problem.query.dtype
    ref = reference.forward(problem, reference_arithmetic(dtype))
    base = reference.forward(problem, baseline_arithmetic(dtype, tf32))
    lse_dtype = np.float64 if dtype == np.float64 else np.float32
    return {
        "out": Expected(ref.out, base.out.astype(dtype)),
        "lse": Expected(ref.lse, base.lse.astype(lse_dtype)),
    }


def expected_backward(problem: Problem, dout, dlse=None, *, tf32=False) -> dict[str, Expected]:
    """What the gradient of each differentiable operand must be, in the operand's dtype."""
    dtype = problem.query.dtype
    ref = reference.backward(problem, dout, dlse, reference_arithmetic(dtype))
    base = reference.backward(problem, dout, dlse, baseline_arithmetic(dtype, tf32))
    result = {}
    for name in DIFFERENTIABLE:
        if name not in ref:
            continue
        slack = 0.0
        if ref[name].magnitude is not None and ref[name].magnitude.size:
            eps = 2.0**-52 if dtype == np.float64 else 2.0**-23
            slack = eps * float(ref[name].magnitude.max())
        operand = np.asarray(getattr(problem, name)).dtype
        result[name] = Expected(ref[name].value, base[name].value.astype(operand), slack)
    return result


def assert_all_accurate(got: dict, expected: dict[str, Expected], *, soft_cap=False):
    """The rule for each named result; reports every one that fails, not just the first."""
    assert set(got) == set(expected), f"results {sorted(got)}, expected {sorted(expected)}"
    failures = []
    for name, value in expected.items():
        try:
            assert_accurate(name, got[name], value, soft_cap=soft_cap)
        except AssertionError as e:
            failures.append(str(e))
    assert not failures, "\n".join(failures)
