# SPDX-License-Identifier: Apache-2.0
"""Results that can be worked out by hand, on every backend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ops
from tests.cases import run
from tests.cases.accuracy import DTYPES
from tests.cases.problem import Problem
from tests.cases.uniform import means, uniform

FUSED_DTYPES = ("float32", "bfloat16", "float16")


def _ln3(dtype="float32"):
    """Weights 1/4 and 3/4: q = [1], k = [0, ln 3], v = [0, 1], scale 1."""
    kind = DTYPES[dtype]
    return Problem(
        query=np.ones((1, 1, 1, 1), kind),
        key=np.array([0, np.log(3)]).reshape(1, 2, 1, 1).astype(kind),
        value=np.array([0, 1]).reshape(1, 2, 1, 1).astype(kind),
        scale=1.0,
    )


class TestLogSumExp:
    def test_value(self, backend):
        got = run.forward(_ln3(), backend)
        np.testing.assert_allclose(got["out"].ravel(), [0.75], rtol=2e-4 if backend.tf32 else 1e-6)
        np.testing.assert_allclose(
            got["lse"].ravel(), [1.386294], rtol=2e-4 if backend.tf32 else 1e-6
        )

    def test_gradient(self, backend):
        zero, one = np.zeros((1, 1, 1, 1), np.float32), np.ones((1, 1, 1), np.float32)
        _, g = run.vjp(_ln3(), backend, zero, one)
        tolerance = 1e-3 if backend.tf32 else 1e-6
        np.testing.assert_allclose(g["query"].ravel(), [0.823959], rtol=tolerance)
        np.testing.assert_allclose(g["key"].ravel(), [0.25, 0.75], rtol=tolerance)
        np.testing.assert_array_equal(g["value"], np.zeros((1, 2, 1, 1)))

    def test_second_derivative(self, backend):
        p = _ln3()

        def lse(key):
            return jax_ops.dot_product_attention(
                jnp.asarray(p.query),
                key.reshape(1, 2, 1, 1),
                jnp.asarray(p.value),
                scale=1.0,
                implementation=backend.name,
                return_residual=True,
            )[1].sum()

        hessian = jax.hessian(lse)(jnp.asarray(p.key).ravel())
        np.testing.assert_allclose(
            hessian, 0.1875 * np.array([[1, -1], [-1, 1]]), atol=1e-3 if backend.tf32 else 1e-6
        )


def _assert_means(out, expected):
    """Exact in 16-bit types; within two roundings of 1 / n in float32."""
    if np.asarray(out).dtype == np.float32:
        np.testing.assert_allclose(means(out), expected, rtol=2.4e-7)
    else:
        np.testing.assert_array_equal(means(out), expected)


@pytest.mark.parametrize("dtype", FUSED_DTYPES)
class TestUniformWeights:
    """Small integers and few keys: every number has an exact 16-bit value."""

    @pytest.mark.parametrize(
        ("lq", "lkv", "bottom_right", "expected"),
        [
            (2, 5, False, [0, 0.5]),
            (2, 5, True, [1.5, 2]),
            (5, 2, False, [0, 0.5, 0.5, 0.5, 0.5]),
            (5, 2, True, [0, 0, 0, 0, 0.5]),
        ],
    )
    def test_causal(self, backend, dtype, lq, lkv, bottom_right, expected):
        problem = uniform(lq, lkv, dtype=dtype, causal=True, bottom_right=bottom_right)
        got = run.forward(problem, backend)
        _assert_means(got["out"], [expected])
        if (lq, bottom_right) == (5, True):
            np.testing.assert_allclose(
                got["lse"].ravel(), [-np.inf, -np.inf, -np.inf, 0, np.log(2)], atol=1e-6
            )

    def test_window(self, backend, dtype):
        problem = uniform(6, 6, dtype=dtype, causal=True, window=(2, 0))
        out = run.forward(problem, backend)["out"]
        _assert_means(out, [[0, 0.5, 1, 2, 3, 4]])

    def test_mask(self, backend, dtype):
        mask = np.array([True, True, False, False])
        out = run.forward(uniform(1, 4, dtype=dtype, mask=mask), backend)["out"]
        _assert_means(out, [[0.5]])

    @pytest.mark.parametrize(
        ("window", "expected"),
        [(None, [[0.5, 1.0], [3.0, 3.5]]), ((1, 0), [[0.5, 1.5], [5.5, 6.5]])],
    )
    def test_decode(self, backend, dtype, window, expected):
        """Two sequences of lengths 3 and 8 in a cache of 8 whose tail holds 1e4."""
        problem = uniform(2, 8, b=2, dtype=dtype, window=window)
        lengths = np.array([3, 8], np.int32)
        value, key = problem.value.copy(), problem.key.copy()
        value[0, 3:] = key[0, 3:] = 1e4
        problem = problem.with_arrays(key=key, value=value, key_lengths=lengths)
        out = run.forward(problem, backend, entry="decode_attention")["out"]
        _assert_means(out, expected)
        # The same, said with the general function.
        general = problem.with_arrays(causal=True, bottom_right=True)
        _assert_means(run.forward(general, backend)["out"], expected)

    def test_one_key_is_the_value(self, backend, dtype):
        rng = np.random.default_rng(0)
        q = rng.normal(size=(2, 3, 4, 8)).astype(DTYPES[dtype])
        k = rng.normal(size=(2, 1, 2, 8)).astype(DTYPES[dtype])
        v = rng.normal(size=(2, 1, 2, 8)).astype(DTYPES[dtype])
        out = run.forward(Problem(q, k, v), backend)["out"]
        expected = np.broadcast_to(np.repeat(v, 2, 2), q.shape)
        if backend.tf32 and dtype == "float32":
            np.testing.assert_allclose(out, expected, rtol=2**-10)
        else:
            np.testing.assert_array_equal(out, expected)


def test_identity_values_read_the_weights(backend):
    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(2, 1, 7, 1, 16)).astype(np.float32)
    v = np.eye(7, dtype=np.float32).reshape(1, 7, 1, 7)
    out = run.forward(Problem(q, k, v), backend)["out"][0, :, 0]
    s = q[0, :, 0].astype(np.float64) @ k[0, :, 0].T.astype(np.float64) / 4
    weights = np.exp(s) / np.exp(s).sum(1, keepdims=True)
    np.testing.assert_allclose(out, weights, atol=2e-3 if backend.tf32 else 1e-6)
    np.testing.assert_allclose(out.sum(1), 1, rtol=2e-3 if backend.tf32 else 1e-6)


def test_zero_cotangents_give_zero_gradients(backend):
    rng = np.random.default_rng(2)
    q, k, v = rng.normal(size=(3, 1, 9, 2, 16)).astype(np.float32)
    problem = Problem(
        q,
        k,
        v,
        bias=rng.normal(size=(2, 9, 9)).astype(np.float32),
        slopes=np.array([0.1, 0.2], np.float32),
        scale=np.asarray(0.5, np.float32),
    )
    zeros = np.zeros_like(q), np.zeros((1, 9, 2), np.float32)
    _, gradients = run.vjp(problem, backend, *zeros)
    assert len(gradients) == 6
    for name, g in gradients.items():
        np.testing.assert_array_equal(g, np.zeros_like(g), err_msg=name)


@pytest.mark.parametrize("num_splits", ["auto", 1, 2, 7, 64, 5000])
def test_splits_of_a_long_cache(backend, num_splits):
    """Lengths 0, 1, 3 and 4096 of a cache of 4096, whatever the split count."""
    problem = uniform(1, 4096, b=4)
    lengths = np.array([0, 1, 3, 4096], np.int32)
    problem = problem.with_arrays(key_lengths=lengths)
    got = run.forward(problem, backend, entry="decode_attention", num_splits=num_splits)
    # tf32 rounds values over 2048 to even numbers.
    np.testing.assert_allclose(
        means(got["out"])[:, 0], [0, 0, 1, 2047.5], rtol=2e-3 if backend.tf32 else 1e-6
    )
    np.testing.assert_allclose(got["lse"].ravel(), [-np.inf, 0, np.log(3), np.log(4096)], atol=1e-5)


def test_merging_two_empty_parts_is_empty():
    """(0, -inf) is the neutral element: never NaN."""
    outs, lses = jnp.zeros((2, 1, 3, 2, 4)), jnp.full((2, 1, 3, 2), -jnp.inf)
    out, lse = jax_ops.merge_attention(outs, lses)
    np.testing.assert_array_equal(out, np.zeros((1, 3, 2, 4)))
    np.testing.assert_array_equal(lse, np.full((1, 3, 2), -np.inf))


def test_alibi_of_uniform_scores(backend):
    """With slope ln 2 each step away from the diagonal halves the weight."""
    slopes = np.array([np.log(2)], np.float32)
    out = run.forward(uniform(2, 3, slopes=slopes, bottom_right=True), backend)["out"]
    # Rows 0 and 1 stand at positions 1 and 2: weights (1/2, 1, 1/2) / 2 and (1/4, 1/2, 1) / 1.75.
    np.testing.assert_allclose(means(out)[0], [1, 2.5 / 1.75], rtol=2e-3 if backend.tf32 else 1e-6)


def test_soft_cap_bounds_the_scores(backend):
    """Scores of +-1e4 become +-cap: weights differ by e^(2 cap) and no more."""
    problem = Problem(
        query=np.full((1, 1, 1, 1), 100, np.float32),
        key=np.array([-100, 100], np.float32).reshape(1, 2, 1, 1),
        value=np.array([0, 1], np.float32).reshape(1, 2, 1, 1),
        scale=1.0,
        soft_cap=0.5,
    )
    out = run.forward(problem, backend)["out"].ravel()
    np.testing.assert_allclose(out, [np.e / (1 + np.e)], rtol=1e-3 if backend.tf32 else 1e-6)
