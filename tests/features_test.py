# SPDX-License-Identifier: Apache-2.0
"""Every feature on every backend in every direction, against the float64 reference.

What a backend declares missing is tested to be refused in words. The outcomes make the README's
support matrix.
"""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest

from tests.cases import accuracy, run, support_matrix
from tests.cases.backends import BACKENDS, MISSING
from tests.cases.features import DIRECTIONS, FEATURES
from tests.cases.problem import DIFFERENTIABLE

_RUNS = [
    pytest.param(feature, direction, dtype, id=f"{name}-{direction}-{dtype}")
    for name, feature in FEATURES.items()
    for direction in DIRECTIONS
    # Forward mode runs the same formulas for every dtype: once is enough.
    for dtype in (feature.dtypes[:1] if direction == "jvp" else feature.dtypes)
]


def _x64(dtype):
    return jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()


def _uses_tf32(backend, feature):
    return backend.tf32 and ("precision", "highest") not in feature.options


def _tangents(problem):
    rng = np.random.default_rng(5)
    return {
        name: np.asarray(rng.normal(size=x.shape)).astype(x.dtype)
        for name in DIFFERENTIABLE
        if isinstance(x := getattr(problem, name), np.ndarray)
    }


def _check(feature, direction, dtype, backend):

    problem = feature.problem(dtype)
    extra = dict(feature.options, entry=feature.entry)
    soft_cap = problem.soft_cap is not None
    tf32 = _uses_tf32(backend, feature)
    if direction == "forward":
        got = run.forward(problem, backend, **extra)
        expected = accuracy.expected_forward(problem, tf32=tf32)
    elif direction == "gradient":
        dout, dlse = dataclasses.replace(feature.case, dtype=dtype).cotangents()
        _, got = run.vjp(problem, backend, dout, dlse, **extra)
        expected = accuracy.expected_backward(problem, dout, dlse, tf32=tf32)
    else:
        tangents = _tangents(problem)
        _, got = run.jvp(problem, backend, tangents, **extra)
        expected = accuracy.expected_jvp(problem, tangents, tf32=tf32)
    accuracy.assert_all_accurate(got, expected, soft_cap=soft_cap)


@pytest.mark.parametrize(("feature", "direction", "dtype"), _RUNS)
def test_feature(backend, feature, direction, dtype, record_feature, request):
    with _x64(dtype):
        if backend.missing(feature.name) is None:
            _check(feature, direction, dtype, backend)
            outcome = support_matrix.PASSED
        else:
            with pytest.raises((NotImplementedError, ValueError), match=backend.name):
                _check(feature, direction, dtype, backend)
            outcome = support_matrix.REFUSED
    record_feature(backend, feature, direction, outcome)
    if request.config.getoption("--write-support-matrix"):
        return
    column = support_matrix.load().get(backend.name)
    if column is not None:  # A backend without a column: the table says "not run yet".
        assert column[feature.name][direction] == outcome, "tests/support_matrix.json is stale"


def test_the_readme_shows_the_committed_record(pytestconfig):
    if pytestconfig.getoption("--write-support-matrix"):
        return  # Both are about to be rewritten.
    assert support_matrix.committed_table() == support_matrix.render(support_matrix.load())


def test_the_record_covers_exactly_the_features(pytestconfig):
    if pytestconfig.getoption("--write-support-matrix"):
        return
    for backend, column in support_matrix.load().items():
        assert list(column) == list(FEATURES), backend
        for outcomes in column.values():
            assert list(outcomes) == list(DIRECTIONS)


def test_no_argument_is_left_out():
    """Each argument of each public function is given by a feature that passes somewhere."""
    assert support_matrix.missing_arguments(support_matrix.load()) == []


def test_a_feature_that_does_not_pass_leaves_its_arguments_missing():
    """The control: without the rows that give them, arguments are missed."""
    record = support_matrix.load()
    for column in record.values():
        for name in ("score_mod", "soft_cap_object"):
            column[name] = dict.fromkeys(DIRECTIONS, support_matrix.REFUSED)
    assert support_matrix.missing_arguments(record) == ["flex_attention.score_mod"]


def test_every_declared_gap_is_a_feature_with_a_reason():
    assert set(MISSING) <= set(FEATURES)
    for reasons in MISSING.values():
        assert set(reasons) <= set(BACKENDS)
        assert all(len(reason.split()) >= 3 for reason in reasons.values())
        assert "xla" not in reasons, "the xla path has every feature"
