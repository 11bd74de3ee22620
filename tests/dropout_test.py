# SPDX-License-Identifier: Apache-2.0
"""Rule 10: dropout from a counter, the same everywhere, and random enough."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ops
from tests.cases import philox, run
from tests.cases.case import Case
from tests.cases.check import check, check_case
from tests.cases.problem import Problem

_CASE = Case(b=2, lq=40, lkv=45, hq=4, hkv=2, d=16, dropout=0.3)


def kept(backend, b, lq, lkv, hq, rate, seed, hkv=None):
    """Reads the keep mask [B, Hq, Lq, Lkv] through values that are the identity."""
    hkv = hkv or hq
    value = np.broadcast_to(np.eye(lkv, dtype=np.float32)[None, :, None], (b, lkv, hkv, lkv))
    problem = Problem(
        np.zeros((b, lq, hq, 4), np.float32),
        np.zeros((b, lkv, hkv, 4), np.float32),
        np.ascontiguousarray(value),
        dropout_rate=rate,
        dropout_seed=np.asarray(seed, np.uint32),
    )
    out = run.forward(problem, backend)["out"]
    return np.swapaxes(out, 1, 2)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_mask_is_the_documented_counter(backend, rate):
    """Entry by entry: Philox on (key, batch, head, row, key position)."""
    seed = np.array([0x12345678, 0x9ABCDEF0], np.uint32)
    weights = kept(backend, 2, 70, 83, 3, rate, seed)
    expected = philox.keep_mask(seed, range(2), range(3), 70, 83, rate)
    np.testing.assert_array_equal(weights != 0, expected)
    np.testing.assert_allclose(
        weights[expected], 1 / (83 * (1 - rate)), rtol=2e-3 if backend.tf32 else 1e-5
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_forward_and_backward_use_the_same_mask(backend, dtype):
    """The gradients are those of the forward pass with the very mask that it used."""
    check_case(dataclasses.replace(_CASE, dtype=dtype, causal=True), backend)


def test_with_every_other_option(backend):
    case = dataclasses.replace(
        _CASE,
        lkv=40,
        bias="h1k",
        mask="b1qk",
        slopes=True,
        soft_cap=3.0,
        segments=2,
        key_lengths=(40, 21),
        causal=True,
        bottom_right=True,
        scale="array",
    )
    check_case(case, backend)


def test_lse_is_without_dropout(backend):
    with_dropout = run.forward(_CASE.problem(), backend)["lse"]
    without = run.forward(dataclasses.replace(_CASE, dropout=0.0).problem(), backend)["lse"]
    np.testing.assert_allclose(with_dropout, without, atol=1e-6)


def test_rate_zero_is_no_dropout_and_rate_one_gives_zero(backend):
    problem = _CASE.problem()
    plain = run.forward(
        problem.with_arrays(dropout_rate=0.0, dropout_seed=None), backend
    )  # no key needed
    zero = run.forward(problem.with_arrays(dropout_rate=0.0), backend)
    np.testing.assert_array_equal(zero["out"], plain["out"])
    results, gradients = check(problem.with_arrays(dropout_rate=1.0), backend, _CASE.cotangents())
    assert (results["out"] == 0).all()
    assert (gradients["value"] == 0).all()


@pytest.mark.parametrize("num_draws", [40])
def test_the_drop_fraction_is_the_rate(backend, num_draws):
    """A two-sided binomial test over many keys; p > 1e-6 for the total and for each head."""
    rate, total = 0.3, np.zeros(2)
    for draw in range(num_draws):
        total += (kept(backend, 1, 64, 64, 2, rate, [draw, 77]) != 0).sum((0, 2, 3))
    n = num_draws * 64 * 64
    # Normal approximation of the binomial: |z| < 4.89 is p > 1e-6.
    for count, size in [*((c, n) for c in total), (total.sum(), 2 * n)]:
        z = (count - size * (1 - rate)) / np.sqrt(size * rate * (1 - rate))
        assert abs(z) < 4.89, f"z = {z:.2f} with {count} of {size} kept"


def test_rows_heads_batches_and_keys_are_independent(backend):
    """No pattern repeats along any axis: correlations between neighbours are noise."""
    x = (kept(backend, 4, 64, 64, 4, 0.5, [5, 6]) != 0) * 2.0 - 1
    for axis in range(4):
        a, b = np.split(x, 2, axis)
        correlation = (a * b).mean()
        assert abs(correlation) < 4.89 / np.sqrt(a.size), f"axis {axis}: {correlation}"


def test_different_keys_give_different_masks_and_one_key_the_same(backend):
    a, again, b = (kept(backend, 1, 16, 32, 1, 0.5, s) for s in ([1, 2], [1, 2], [1, 3]))
    np.testing.assert_array_equal(a, again)
    assert (a != b).any()


def test_typed_and_raw_keys_are_the_same(backend):
    p = dataclasses.replace(_CASE, dropout=0.0).problem()
    q, k, v = (jnp.asarray(x) for x in (p.query, p.key, p.value))

    def attend(key):
        return jax_ops.dot_product_attention(
            q, k, v, dropout_rate=0.5, dropout_key=key, implementation=backend.name
        )

    typed = attend(jax.random.key(3))
    np.testing.assert_array_equal(typed, attend(jax.random.PRNGKey(3)))
    assert (typed != attend(jax.random.key(4))).any()


def test_remat_and_scan_keep_the_mask(backend):
    p, key = dataclasses.replace(_CASE, lkv=40, dropout=0.0).problem(), jax.random.key(9)
    q, k, v = (jnp.asarray(x) for x in (p.query, p.key, p.value))

    def loss(q):
        out = jax_ops.dot_product_attention(
            q, k, v, dropout_rate=0.4, dropout_key=key, implementation=backend.name
        )
        return (out**2).sum()

    plain = jax.jit(jax.grad(loss))(q)
    remat = jax.jit(jax.grad(jax.checkpoint(loss)))(q)
    np.testing.assert_allclose(remat, plain, rtol=1e-5, atol=1e-5)

    def scanned(q):
        return jax.lax.scan(lambda total, _: (total + loss(q), None), 0.0, None, length=2)[0]

    np.testing.assert_allclose(jax.jit(jax.grad(scanned))(q), 2 * plain, rtol=1e-5, atol=1e-5)


def test_vmap_counts_rows_as_a_loop_does(backend):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(3, 2, 8, 2, 4)), jnp.float32) for _ in range(3))
    keys = jax.random.split(jax.random.key(1), 3)

    def attend(q, k, v, key):
        return jax_ops.dot_product_attention(
            q, k, v, dropout_rate=0.5, dropout_key=key, implementation=backend.name
        )

    mapped = jax.jit(jax.vmap(attend))(q, k, v, keys)
    shared = jax.jit(jax.vmap(attend, (0, 0, 0, None)))(q, k, v, keys[0])
    for i in range(3):
        for got, key in ((mapped, keys[i]), (shared, keys[0])):
            expected = attend(q[i], k[i], v[i], key)
            np.testing.assert_allclose(got[i], expected, atol=2e-3 if backend.tf32 else 1e-6)
            np.testing.assert_array_equal(got[i] == 0, expected == 0)


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_rates_outside_zero_and_one_are_refused(backend, rate):
    x = jnp.ones((1, 2, 1, 4))
    with pytest.raises(ValueError, match=r"dropout_rate.*\[0, 1\]"):
        jax_ops.dot_product_attention(
            x, x, x, dropout_rate=rate, dropout_key=jax.random.key(0), implementation=backend.name
        )


def test_a_missing_key_is_refused(backend):
    x = jnp.ones((1, 2, 1, 4))
    with pytest.raises(ValueError, match="dropout_key"):
        jax_ops.dot_product_attention(x, x, x, dropout_rate=0.5, implementation=backend.name)
