# SPDX-License-Identifier: Apache-2.0
"""The case base checks itself: the reference against JAX in float64, and the accuracy rule."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.cases import accuracy, philox, reference
from tests.cases.problem import DIFFERENTIABLE, Problem


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def _problem(seed=0, b=2, lq=5, lkv=7, hq=4, hkv=2, d=3, dv=6, **options):
    rng = np.random.default_rng(seed)
    return Problem(
        query=rng.normal(size=(b, lq, hq, d)),
        key=rng.normal(size=(b, lkv, hkv, d)),
        value=rng.normal(size=(b, lkv, hkv, dv)),
        **options,
    )


def _plain_jnp(problem, operands):
    """Softmax attention in jnp, as a function of the differentiable operands."""
    q, k, v = operands["query"], operands["key"], operands["value"]
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
    s = jnp.einsum("bihd,bjhd->bhij", q, k)
    s = s * operands.get(
        "scale", 1 / np.sqrt(q.shape[-1]) if problem.scale is None else problem.scale
    )
    if problem.soft_cap is not None:
        s = problem.soft_cap * jnp.tanh(s / problem.soft_cap)
    if "bias" in operands:
        s = s + operands["bias"]
    if "slopes" in operands:
        s = s - operands["slopes"][:, None, None] * problem.distance()[:, None]
    allowed = problem.allowed()
    alive = allowed.any(-1, keepdims=True)
    s = jnp.where(allowed, s, jnp.where(alive, -jnp.inf, 0.0))
    weights = jnp.where(alive, jax.nn.softmax(s, axis=-1), 0)
    keep = problem.keep()
    dropped = weights if keep is None else weights * keep
    lse = jnp.where(alive[..., 0], jax.nn.logsumexp(s, axis=-1), 0)
    return jnp.einsum("bhij,bjhd->bihd", dropped, v), jnp.swapaxes(lse, 1, 2)


_B, _LQ, _LKV, _H = 2, 5, 7, 4
_RNG = np.random.default_rng(1)
_OPTIONS = {
    "plain": {},
    "scale": {"scale": np.asarray(0.7)},
    "soft_cap": {"soft_cap": 1.5, "scale": np.asarray(2.0)},
    "bias": {"bias": _RNG.normal(size=(_H, 1, _LKV))},
    "slopes": {"slopes": _RNG.uniform(0.1, 1, _H), "bottom_right": True},
    "causal": {"causal": True, "bottom_right": True},
    "empty_rows": {"causal": True, "bottom_right": True, "key_lengths": np.array([3, 7])},
    "window": {"window": (1, 2)},
    "segments": {
        "query_segments": np.array([[0, 0, 1, 1, -1], [2, 2, 2, 3, 3]]),
        "key_segments": np.array([[0, 1, 1, 1, -1, -1, 0], [2, 2, 3, 3, 3, 9, 9]]),
    },
    "dropout": {"dropout_rate": 0.4, "dropout_seed": np.array([1, 2], np.uint32)},
    "all": {
        "scale": np.asarray(0.7),
        "soft_cap": 2.0,
        "bias": _RNG.normal(size=(_B, 1, _LQ, 1)),
        "slopes": _RNG.uniform(0.1, 1, _H),
        "mask": _RNG.random((_LQ, _LKV)) < 0.7,
        "causal": True,
        "prefix": np.array([2, 4]),
        "query_lengths": np.array([4, 9]),
        "dropout_rate": 0.25,
        "dropout_seed": np.array([7, 2**32 - 1], np.uint32),
    },
}


@pytest.mark.parametrize("name", _OPTIONS)
def test_reference_equals_jax_autodiff_of_the_plain_formula(name):
    problem = _problem(**_OPTIONS[name])
    operands = {
        n: jnp.asarray(getattr(problem, n))
        for n in DIFFERENTIABLE
        if isinstance(getattr(problem, n), np.ndarray)
    }
    rng = np.random.default_rng(2)
    f = reference.forward(problem)
    (out, lse), vjp = jax.vjp(lambda o: _plain_jnp(problem, o), operands)
    np.testing.assert_allclose(f.out, out, atol=1e-13)
    np.testing.assert_allclose(np.where(np.isinf(f.lse), 0, f.lse), lse, atol=1e-13)

    dout, dlse = rng.normal(size=out.shape), rng.normal(size=lse.shape)
    (expected,) = vjp((jnp.asarray(dout), jnp.asarray(dlse)))
    got = reference.backward(problem, dout, dlse)
    assert set(got) == set(operands)
    for n, g in got.items():
        np.testing.assert_allclose(g.value, expected[n], atol=1e-12, err_msg=n)
        assert g.value.shape == operands[n].shape

    tangents = {n: rng.normal(size=x.shape) for n, x in operands.items()}
    _, (out_t, lse_t) = jax.jvp(
        lambda o: _plain_jnp(problem, o),
        (operands,),
        ({n: jnp.asarray(t) for n, t in tangents.items()},),
    )
    got_out, got_lse = reference.jvp(problem, tangents)
    np.testing.assert_allclose(got_out, out_t, atol=1e-12)
    np.testing.assert_allclose(got_lse, lse_t, atol=1e-12)


def test_storing_the_output_changes_no_gradient_in_exact_arithmetic():
    problem = _problem(**_OPTIONS["all"])
    rng = np.random.default_rng(3)
    dout = rng.normal(size=(_B, _LQ, _H, 6))
    dlse = rng.normal(size=(_B, _LQ, _H))
    stored = dataclasses.replace(reference.FLOAT64, stored=lambda x: x)
    for name, g in reference.backward(problem, dout, dlse).items():
        again = reference.backward(problem, dout, dlse, stored)[name]
        np.testing.assert_allclose(g.value, again.value, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (2, 1)])
def test_reference_equals_jax_nn(causal, window):
    """Where jax.nn has the same option with the same meaning."""
    lengths = np.array([5, 3], np.int32)
    problem = _problem(
        lq=6, lkv=6, d=4, dv=4, causal=causal, window=window, key_lengths=lengths,
        bias=np.random.default_rng(4).normal(size=(2, 4, 6, 6)),
    )  # fmt: skip
    out = jax.nn.dot_product_attention(
        problem.query,
        problem.key,
        problem.value,
        problem.bias,
        is_causal=causal,
        local_window_size=window,
        key_value_seq_lengths=lengths,
        implementation="xla",
    )
    # jax.nn's softmax is float32 here, and rows with no allowed key are left undefined by it.
    alive = problem.allowed().any((1, 3))
    np.testing.assert_allclose(reference.forward(problem).out[alive], out[alive], atol=1e-6)


def test_philox_known_answers():
    """The published known-answer vectors of Philox-4x32-10 (Random123)."""
    ones = 2**32 - 1
    for counter, key, expected in [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones, ones), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]:
        assert tuple(int(w) for w in philox.philox4x32(counter, key)) == expected


def test_keep_mask_counts_rows_heads_and_batches_apart():
    seed = np.array([3, 4], np.uint32)
    whole = philox.keep_mask(seed, [0, 1, 2], [0, 1], 9, 21, 0.5)
    assert whole.shape == (3, 2, 9, 21)
    part = philox.keep_mask(seed, [2], [1], 5, 10, 0.5)
    np.testing.assert_array_equal(part[0, 0], whole[2, 1, :5, :10])
    assert philox.keep_mask(seed, [0], [0], 4, 4, 0.0).all()
    assert not philox.keep_mask(seed, [0], [0], 4, 4, 1.0).any()
    assert abs(philox.keep_mask(seed, range(8), range(8), 64, 64, 0.3).mean() - 0.7) < 0.004


def test_round_tf32():
    x = np.array([1.0, 1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, -1 - 2**-12, 0.0], np.float32)
    expected = np.array([1.0, 1 + 2**-10, 1.0, 1 + 2**-9, -1.0, 0.0], np.float32)
    np.testing.assert_array_equal(accuracy.round_tf32(x), expected)


def test_poison_in_unseen_keys_and_rows_leaves_the_reference_unchanged():
    problem = _problem(key_lengths=np.array([3, 5]), query_lengths=np.array([2, 5]))
    q, k, v = (np.array(x) for x in (problem.query, problem.key, problem.value))
    dout = np.ones((_B, _LQ, _H, 6))
    k[0, 3:] = v[0, 3:] = k[1, 5:] = np.nan
    v[1, 5:] = np.inf
    q[0, 2:] = np.nan
    poisoned = problem.with_arrays(query=q, key=k, value=v)
    np.testing.assert_array_equal(reference.forward(problem).out, reference.forward(poisoned).out)
    for name, g in reference.backward(problem, dout).items():
        np.testing.assert_array_equal(g.value, reference.backward(poisoned, dout)[name].value)


class TestAccuracyRule:
    """The rule can fail: a check that passes everything would pass a broken kernel."""

    def _expected(self, dtype):
        problem = _problem(lq=16, lkv=16, d=16, dv=16)
        arrays = {n: getattr(problem, n).astype(dtype) for n in ("query", "key", "value")}
        return accuracy.expected_forward(problem.with_arrays(**arrays))

    @pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16, np.float64])
    def test_accepts_the_baseline_and_refuses_an_error_of_eight_roundings(self, dtype):
        expected = self._expected(dtype)["out"]
        accuracy.assert_accurate("out", expected.baselines[0], expected)
        eps = float(ml_dtypes.finfo(dtype).eps)
        scale = float(np.abs(expected.reference).max())
        wrong = expected.reference.copy()
        wrong[1, 2, 3, 4] += 8 * eps * scale
        with pytest.raises(AssertionError, match=r"max error .* at \(1, 2, 3, 4\)"):
            accuracy.assert_accurate("out", wrong.astype(dtype), expected)

    def test_takes_a_second_look_where_the_first_baselines_were_lucky(self):
        """A lucky baseline (no error at all) does not condemn; six other orders are evaluated."""
        expected = self._expected(np.float32)["out"]
        exact = expected.reference.astype(np.float32)
        lucky = dataclasses.replace(expected, baselines=(exact, exact))
        errors = [np.abs(b - expected.reference) for b in expected.more()]
        assert len({e.tobytes() for e in errors}) == 6, "each order has roundings of its own"
        largest = max(float(e.max()) for e in errors)
        for factor, passes in [(2, True), (4, False)]:
            got = expected.reference.copy()
            got[1, 2, 3, 4] += factor * largest
            if passes:
                accuracy.assert_accurate("out", got.astype(np.float32), lucky)
            else:
                with pytest.raises(AssertionError, match="max error"):
                    accuracy.assert_accurate("out", got.astype(np.float32), lucky)

    def test_refuses_nan_and_misplaced_infinities(self):
        expected = self._expected(np.float32)["lse"]
        for bad, message in [(np.nan, "NaN"), (np.inf, "infinities"), (-np.inf, "infinities")]:
            got = expected.baselines[0].copy()
            got[0, 1, 2] = bad
            with pytest.raises(AssertionError, match=message):
                accuracy.assert_accurate("lse", got, expected)

    def test_demands_an_expected_infinity(self):
        ref = np.array([-np.inf, 1.0])
        expected = accuracy.Expected(ref, (ref.astype(np.float32),))
        accuracy.assert_accurate("lse", ref.astype(np.float32), expected)
        with pytest.raises(AssertionError, match="infinities"):
            accuracy.assert_accurate("lse", np.array([-1e30, 1.0], np.float32), expected)

    def test_refuses_a_missing_or_unexpected_result(self):
        expected = self._expected(np.float32)
        with pytest.raises(AssertionError, match="results"):
            accuracy.assert_all_accurate({"out": expected["out"].baselines[0]}, expected)

    def test_reports_every_wrong_result(self):
        expected = self._expected(np.float32)
        got = {n: e.baselines[0] + 1 for n, e in expected.items()}
        with pytest.raises(AssertionError, match=r"(?s)out: .*lse: "):
            accuracy.assert_all_accurate(got, expected)
