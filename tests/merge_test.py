# SPDX-License-Identifier: Apache-2.0
"""merge_attention: exact merging of partial results, its neutral element and its gradients."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ops
from tests.cases import accuracy
from tests.cases.backends import XLA
from tests.cases.case import Case

_CASE = Case(b=2, lq=9, lkv=60, hq=4, hkv=2, d=16, mask="bhqk")


def _parts(problem, cuts, backend):
    """Attention over the keys between consecutive cuts."""
    results = [
        jax_ops.dot_product_attention(
            problem.query,
            problem.key[:, start:end],
            problem.value[:, start:end],
            mask=problem.mask[..., start:end],
            implementation=backend.name,
            return_residual=True,
        )
        for start, end in itertools.pairwise(cuts)
    ]
    return tuple(jnp.stack(x) for x in zip(*results, strict=True))


def test_equals_attention_over_all_keys(backend):
    problem = _CASE.problem()
    out, lse = jax_ops.merge_attention(*_parts(problem, (0, 1, 20, 20, 60), backend))
    accuracy.assert_all_accurate(
        {"out": np.asarray(out), "lse": np.asarray(lse)},
        accuracy.expected_forward(problem, tf32=backend.tf32),
    )


def test_gradients_are_those_of_attention_over_all_keys():
    problem = _CASE.problem()
    dout, dlse = _CASE.cotangents()

    @jax.jit
    def gradients(query, key, value):
        def merged(query, key, value):
            moved = problem.with_arrays(query=query, key=key, value=value)
            return jax_ops.merge_attention(*_parts(moved, (0, 25, 60), XLA))

        return jax.vjp(merged, query, key, value)[1]((dout, dlse))

    got = gradients(problem.query, problem.key, problem.value)
    expected = accuracy.expected_backward(problem, dout, dlse)
    accuracy.assert_all_accurate(
        {n: np.asarray(g) for n, g in zip(("query", "key", "value"), got, strict=True)}, expected
    )


def test_closed_form():
    """Weights e^lse = 1 and 3."""
    outs = np.array([[[8.0]], [[4.0]]], np.float32)
    out, lse = jax_ops.merge_attention(outs, np.array([[0.0], [np.log(3)]], np.float32))
    np.testing.assert_allclose(out, [[5.0]], rtol=1e-6)
    np.testing.assert_allclose(lse, [np.log(4)], rtol=1e-6)


def test_large_residuals_do_not_overflow():
    out, lse = jax_ops.merge_attention(
        np.array([[1.0], [3.0]], np.float32), np.array([1e4, 1e4], np.float32)
    )
    np.testing.assert_allclose(out, [2.0], rtol=1e-6)
    np.testing.assert_allclose(lse, 1e4 + np.log(2), rtol=1e-6)


@pytest.mark.parametrize("parts", [0, 1, 2, 3])
def test_empty_parts_give_the_neutral_element(parts):
    outs = np.zeros((parts, 2, 3, 4, 5), np.float32)
    out, lse = jax_ops.merge_attention(outs, np.full((parts, 2, 3, 4), -np.inf, np.float32))
    np.testing.assert_array_equal(out, np.zeros((2, 3, 4, 5)))
    np.testing.assert_array_equal(lse, np.full((2, 3, 4), -np.inf))


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("filler", [0.0, np.nan, np.inf])
def test_neutral_element_changes_nothing(place, filler):
    rng = np.random.default_rng(0)
    out, lse = rng.normal(size=(3, 4)).astype(np.float32), rng.normal(size=3).astype(np.float32)
    outs, residuals = [out, out], [lse, lse]
    outs[place], residuals[place] = np.full_like(out, filler), np.full_like(lse, -np.inf)
    merged = jax_ops.merge_attention(np.stack(outs), np.stack(residuals))
    np.testing.assert_array_equal(merged[0], out)
    np.testing.assert_allclose(merged[1], lse, rtol=1e-6)


def test_gradients_stay_finite_with_empty_parts():
    outs = np.array([[[np.nan], [np.nan]], [[2.0], [np.nan]]], np.float32)
    residuals = np.array([[-np.inf, -np.inf], [1.0, -np.inf]], np.float32)
    _, pullback = jax.vjp(jax_ops.merge_attention, outs, residuals)
    douts, dresiduals = pullback((jnp.ones((2, 1)), jnp.ones(2)))
    np.testing.assert_array_equal(douts[..., 0], [[0, 0], [1, 0]])
    np.testing.assert_array_equal(dresiduals, [[0, 0], [1, 0]])


def test_derivatives_of_both_orders():
    """Two parts with residuals r and 0: out = sigmoid(r), lse = log(1 + e^r)."""
    outs = np.array([[1.0], [0.0]])

    def merged(r):
        out, lse = jax_ops.merge_attention(outs, jnp.stack([r, jnp.zeros_like(r)]))
        return jnp.stack([out[0], lse])

    s = 1 / (1 + np.exp(-0.7))
    first = jax.jit(jax.jacfwd(merged))(jnp.float32(0.7))
    np.testing.assert_allclose(first, [s * (1 - s), s], rtol=1e-5)
    second = jax.jit(jax.jacfwd(jax.jacrev(merged)))(jnp.float32(0.7))
    np.testing.assert_allclose(second, [s * (1 - s) * (1 - 2 * s), s * (1 - s)], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes(dtype):
    outs, residuals = jnp.ones((2, 3, 4), dtype), jnp.zeros((2, 3), jnp.float32)
    out, lse = jax_ops.merge_attention(outs, residuals)
    assert (out.dtype, lse.dtype) == (jnp.dtype(dtype), jnp.float32)


@pytest.mark.parametrize(
    ("outs", "residuals", "error", "words"),
    [
        (np.ones((2, 3, 4)), np.ones((2, 4)), ValueError, "residuals: got shape"),
        (np.ones(2), np.ones(()), ValueError, "outs: got shape"),
        (np.ones((2, 3), int), np.ones(2), TypeError, "outs: got dtype"),
        (np.ones((2, 3)), np.ones(2, int), TypeError, "residuals: got dtype"),
        ("outs", np.ones(2), TypeError, "outs"),
    ],
)
def test_refusals_name_the_argument(outs, residuals, error, words):
    with pytest.raises(error, match=words):
        jax_ops.merge_attention(outs, residuals)
