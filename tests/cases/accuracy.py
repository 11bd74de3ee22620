# SPDX-License-Identifier: Apache-2.0
"""The accuracy rule, after flash-attention's: never a fixed tolerance.

    max|got - ref| <= 2 * max|baseline - ref| + atol

`ref` is float64 (longdouble for float64 inputs). `baseline` is unfused attention of the same
precision (cases/reference.py): float32 accumulation and softmax, product operands (P and dS too)
rounded to the input's dtype, or to 10 mantissa bits for tf32; the backward pass sees the output in
the input's dtype and lse in float32; float64 throughout for float64. The error of one evaluation of
a small problem is a matter of luck, so it is evaluated twice, with every sum taken from its first
term and from its last; the larger error counts. Where that is not enough, six shuffled orders are
added: of a thousand checks of a kernel as accurate as the baseline, some meet two lucky ones.

atol is the rounding noise of the result itself: 2 * max|(x + 0.3 - 0.3) - x| in the result's dtype,
3 * with a soft cap. x runs over ref and over shrunken copies of it, so that a result of few numbers
has no lucky zero there.

A gradient that sums over rows (bias, slopes, scale) may be one number, of which the baseline's
error says little: it can be zero by luck. For those, 4 standard deviations of the baseline's error
are added, with the errors of its rows, which are measured, taken as independent.
"""

import dataclasses
import functools
from collections.abc import Callable

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


def _same(x):
    return x


def _round_to(dtype):
    return lambda x: np.asarray(x).astype(dtype).astype(np.float32)


# Orders of summation (reference.Arithmetic): those always evaluated, and those of a second look.
_ORDERS = (1, -1)
_MORE_ORDERS = (2, 3, 4, 5, 6, 7)


def baseline_arithmetics(dtype, tf32=False, orders=_ORDERS) -> list[reference.Arithmetic]:
    """The fixed same-precision arithmetic for inputs of `dtype`, in each order of summation."""
    dtype = np.dtype(dtype)
    if dtype == np.float64:
        working, rounded, stored = np.float64, _same, _same
    elif dtype == np.float32:
        working, rounded, stored = np.float32, round_tf32 if tf32 else _same, _same
    else:
        working, rounded, stored = np.float32, _round_to(dtype), _round_to(dtype)
    return [reference.Arithmetic(working, rounded, order, stored) for order in orders]


def reference_arithmetic(dtype) -> reference.Arithmetic:
    return reference.LONGDOUBLE if np.dtype(dtype) == np.float64 else reference.FLOAT64


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a result is checked against."""

    reference: np.ndarray
    baselines: tuple[np.ndarray, ...]  # rounded to the result's dtype
    deviation: float = 0.0  # of the baseline's error, for sums over rows
    more: Callable[[], tuple[np.ndarray, ...]] = tuple  # further baselines, for a second look


def _noise(ref, dtype):
    """max|(x + 0.3 - 0.3) - x| in `dtype`, for x of the sizes that ref has."""
    finite = ref[np.isfinite(ref)]
    if finite.size == 0:
        return 0.0
    finite = np.multiply.outer(np.linspace(0.75, 1, 16), finite).astype(dtype)
    shifted = (finite + dtype.type(0.3)).astype(dtype)
    shifted = (shifted - dtype.type(0.3)).astype(dtype)
    return float(np.abs(shifted.astype(np.float64) - finite.astype(np.float64)).max())


def assert_accurate(name, got, expected: Expected, *, soft_cap=False, factor=2.0):
    """Fails, saying where and by how much, unless `got` obeys the accuracy rule.

    Infinities must stand where the reference has them, with their sign; NaN never passes.
    """
    got = np.asarray(got)
    ref = expected.reference
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

    def largest(baselines):
        with np.errstate(invalid="ignore"):
            errors = (np.where(infinite, zero, np.abs(b.astype(wide) - ref)) for b in baselines)
            return max((e.max() for e in errors), default=zero)

    atol = (3 if soft_cap else 2) * _noise(ref, got.dtype) + 4 * expected.deviation
    base_error = largest(expected.baselines)
    if not error.max() <= factor * base_error + atol:
        base_error = max(base_error, largest(expected.more()))
    bound = factor * base_error + atol
    if not error.max() <= bound:
        where = np.unravel_index(int(error.argmax()), error.shape)
        where = tuple(int(i) for i in where)
        raise AssertionError(
            f"{name}: max error {float(error.max()):.3e} at {where} (got {values[where]}, "
            f"reference {ref[where]}); the bound is {float(bound):.3e} = {factor:g} * baseline's "
            f"{float(base_error):.3e} + {atol:.3e}"
        )


def expected_forward(problem: Problem, *, tf32=False) -> dict[str, Expected]:
    """What out (in the input's dtype) and lse (float32; float64 for float64) must be."""
    exact = reference.forward(problem, reference_arithmetic(problem.query.dtype))

    def evaluate(arithmetic):
        f = reference.forward(problem, arithmetic)
        return {"out": f.out, "lse": f.lse}

    return _expected_results(problem, {"out": exact.out, "lse": exact.lse}, evaluate, tf32)


def expected_jvp(problem: Problem, tangents, *, tf32=False) -> dict[str, Expected]:
    """What the tangents of out and lse must be, in the results' dtypes."""
    exact = reference.jvp(problem, tangents, reference_arithmetic(problem.query.dtype))

    def evaluate(arithmetic):
        return dict(zip(("out", "lse"), reference.jvp(problem, tangents, arithmetic), strict=True))

    return _expected_results(problem, dict(zip(("out", "lse"), exact, strict=True)), evaluate, tf32)


def _expected_results(problem, exact, evaluate, tf32):
    """`Expected` of {'out', 'lse'}; evaluate: arithmetic -> the same results in it."""
    dtype = problem.query.dtype
    dtypes = {"out": dtype, "lse": np.float64 if dtype == np.float64 else np.float32}

    @functools.cache
    def baselines(orders):
        return [evaluate(a) for a in baseline_arithmetics(dtype, tf32, orders)]

    def values(name, orders):
        return tuple(b[name].astype(dtypes[name]) for b in baselines(orders))

    return {
        name: Expected(
            exact[name],
            values(name, _ORDERS),
            more=functools.partial(values, name, _MORE_ORDERS),
        )
        for name in dtypes
    }


def expected_backward(problem: Problem, dout, dlse=None, *, tf32=False) -> dict[str, Expected]:
    """What the gradient of each differentiable operand must be, in the operand's dtype."""
    dtype = problem.query.dtype
    ref = reference.backward(problem, dout, dlse, reference_arithmetic(dtype))

    @functools.cache
    def baselines(orders):
        arithmetics = baseline_arithmetics(dtype, tf32, orders)
        return [reference.backward(problem, dout, dlse, a) for a in arithmetics]

    def values(name, orders):
        operand = np.asarray(getattr(problem, name)).dtype
        return tuple(base[name].value.astype(operand) for base in baselines(orders))

    result = {}
    for name in DIFFERENTIABLE:
        if name not in ref:
            continue
        deviation = 0.0
        if ref[name].rows is not None and ref[name].value.size and ref[name].rows.shape[-1] > 1:
            errors = [b[name].rows - ref[name].rows for b in baselines(_ORDERS)]
            deviation = max(float(np.sqrt((e.astype(float) ** 2).sum(-1)).max()) for e in errors)
        more = functools.partial(values, name, _MORE_ORDERS)
        result[name] = Expected(ref[name].value, values(name, _ORDERS), deviation, more)
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
