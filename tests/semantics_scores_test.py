# SPDX-License-Identifier: Apache-2.0
"""Rules 8, 9, 16 and 17: ALiBi, soft cap, static or array arguments; no option is ignored."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ops
from tests.cases import run
from tests.cases.case import Case
from tests.cases.check import check, check_case

_CASE = Case(b=2, lq=33, lkv=40, hq=4, hkv=2, d=16)


@pytest.mark.parametrize("bottom_right", [False, True])
def test_alibi_with_its_gradient(backend, bottom_right):
    """Slopes belong to query heads; distances are |i' - j|."""
    case = dataclasses.replace(_CASE, slopes=True, bottom_right=bottom_right, causal=bottom_right)
    check_case(case, backend)


@pytest.mark.parametrize("cap", [0.5, 3.0, 50.0])
def test_soft_cap_with_its_derivative(backend, cap):
    case = dataclasses.replace(_CASE, soft_cap=cap, amplitude=2.0)
    check_case(case, backend)


def test_masked_keys_stay_masked_under_a_soft_cap(backend):
    """A cap applied to a masked score would bring it back from -inf."""
    case = dataclasses.replace(_CASE, soft_cap=1.0, causal=True, key_lengths=(40, 3))
    check_case(case, backend)


def test_soft_cap_comes_before_bias_and_alibi(backend):
    case = dataclasses.replace(_CASE, soft_cap=1.0, slopes=True, bias="hqk", amplitude=2.0)
    check_case(case, backend)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.7, -0.5])
def test_scale_as_a_number(backend, scale):
    check_case(dataclasses.replace(_CASE, scale=scale), backend)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scale_as_an_array_is_the_same_and_has_a_gradient(backend, dtype):
    case = dataclasses.replace(_CASE, scale="array", soft_cap=4.0, dtype=dtype)
    results, gradients = check_case(case, backend)
    number = dataclasses.replace(case, scale=0.3)
    static = run.forward(number.problem(), backend)
    for name in ("out", "lse"):
        np.testing.assert_array_equal(static[name], results[name])
    assert gradients["scale"] != 0


def test_the_default_scale_is_that_of_the_true_head_dim(backend):
    """Head dim 19 is padded by most kernels."""
    case = dataclasses.replace(_CASE, d=19)
    default = run.forward(case.problem(), backend)
    given = run.forward(dataclasses.replace(case, scale=19**-0.5).problem(), backend)
    for name in ("out", "lse"):
        np.testing.assert_allclose(default[name], given[name], rtol=1e-5, atol=1e-6)


# Every option, with a setting that must matter.
_OPTIONS = {
    "bias": {"bias": "hqk"},
    "mask": {"mask": "qk"},
    "scale": {"scale": 1.5},
    "scale_array": {"scale": "array"},
    "is_causal": {"causal": True},
    "query_seq_lengths": {"query_lengths": (33, 5)},
    "key_value_seq_lengths": {"key_lengths": (40, 5)},
    "local_window_size": {"window": (3, 3)},
    "segment_ids": {"segments": 3},
    "logits_soft_cap": {"soft_cap": 0.5},
    "alibi_slopes": {"slopes": True},
    "dropout_rate": {"dropout": 0.5},
}


@pytest.mark.parametrize("name", _OPTIONS)
def test_every_option_changes_the_result(backend, name):
    plain = run.forward(_CASE.problem(), backend)
    with_option = run.forward(dataclasses.replace(_CASE, **_OPTIONS[name]).problem(), backend)
    assert (plain["out"] != with_option["out"]).any()


def test_alignment_changes_the_result(backend):
    case = dataclasses.replace(_CASE, causal=True)
    other = dataclasses.replace(case, bottom_right=True)
    assert (
        run.forward(case.problem(), backend)["out"] != run.forward(other.problem(), backend)["out"]
    ).any()


def test_debug_nans_accepts_empty_rows(backend):
    """An lse of -inf is no NaN, and no NaN appears on the way, forward or backward."""
    q = jnp.ones((1, 4, 2, 8))
    kv = jnp.ones((1, 2, 2, 8))

    def loss(q, k, v):
        out, lse = jax_ops.dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            alignment="bottom_right",
            implementation=backend.name,
            return_residual=True,
        )
        return out.sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    with jax.debug_nans(True):
        value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, kv, kv)
        tangents = (jnp.ones_like(q), jnp.ones_like(kv), jnp.ones_like(kv))
        jax.jit(lambda *x: jax.jvp(loss, x, tangents))(q, kv, kv)
    assert np.isfinite(value) and all(np.isfinite(g).all() for g in gradients)


def test_results_are_the_same_without_jit(backend):
    case = dataclasses.replace(_CASE, causal=True, bias="hqk", key_lengths=(40, 11))
    problem, cotangents = case.problem(), case.cotangents()
    jitted, jitted_gradients = check(problem, backend, cotangents)
    eager, eager_gradients = run.eager(problem, backend, *cotangents)
    tolerance = {"rtol": 1e-5, "atol": 1e-5}  # XLA fuses differently around the kernels.
    for name, x in (jitted | jitted_gradients).items():
        np.testing.assert_allclose((eager | eager_gradients)[name], x, err_msg=name, **tolerance)
