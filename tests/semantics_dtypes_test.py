# SPDX-License-Identifier: Apache-2.0
"""Rules 11 and 13: dtypes, precision, and logits of any size."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ops
from tests.cases import accuracy, run
from tests.cases.accuracy import DTYPES
from tests.cases.backends import BACKENDS
from tests.cases.case import Case
from tests.cases.check import check, check_case
from tests.cases.problem import Problem

_CASE = Case(b=2, lq=33, lkv=40, hq=4, hkv=2, d=16)
FUSED_DTYPES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("dtype", FUSED_DTYPES)
@pytest.mark.parametrize("amplitude", [8.0, 60.0])
def test_large_logits(backend, dtype, amplitude):
    """Products past float16's range, scores of thousands, where exp underflows for most keys."""
    case = dataclasses.replace(_CASE, dtype=dtype, amplitude=amplitude)
    problem = case.problem()
    top = np.abs(np.einsum("bihd,bjhd->bijh", *(
        x.astype(np.float64)[:, :, :2] for x in (problem.query, problem.key)
    ))).max()  # fmt: skip
    assert top > 65504 or amplitude < 60
    if not (backend.tf32 and dtype == "float32" and amplitude == 60):
        check(problem, backend, case.cotangents())
        return
    # tf32 is off by tens at such scores: the softmax of that is noise, whoever computes it. With
    # three tf32 products the rule holds for lse and all gradients. Where one weight is 1, the
    # baseline copies the value; as the sum of two tf32 numbers it may lose its last bit.
    results, gradients = run.vjp(problem, backend, *case.cotangents(), precision="highest")
    expected = accuracy.expected_forward(problem)
    accuracy.assert_accurate("lse", results["lse"], expected["lse"])
    bound = np.abs(problem.value).max() * 2.0**-23
    np.testing.assert_allclose(results["out"], expected["out"].reference, rtol=0, atol=bound)
    accuracy.assert_all_accurate(gradients, accuracy.expected_backward(problem, *case.cotangents()))


@pytest.mark.parametrize("lq", [17, 64])
def test_weights_of_large_logits_sum_to_one(backend, lq):
    """Equal keys: the running maximum stays, so no rescaling may leave a trace, tile after tile."""
    rng = np.random.default_rng(5)
    query, key = (np.float32(30 * rng.normal(size=(1, n, 1, 16))) for n in (lq, 1))
    problem = Problem(
        query=query, key=np.repeat(key, 512, axis=1), value=np.ones((1, 512, 1, 16), np.float32)
    )
    out = run.forward(problem, backend, precision="highest")["out"]
    np.testing.assert_allclose(out, 1, rtol=5e-7)


@pytest.mark.parametrize("shift", [-1e30, -1e5, 1e5, 1e30])
def test_rows_of_very_small_or_large_scores(backend, shift):
    """A running maximum that starts at a finite floor would lose such rows."""
    problem = _CASE.problem()
    problem = problem.with_arrays(bias=np.full((1, 40), shift, np.float32))
    got = run.forward(problem, backend)
    accuracy.assert_all_accurate(got, accuracy.expected_forward(problem, tf32=backend.tf32))


def test_out_and_gradients_take_their_inputs_dtype(backend):
    for dtype in FUSED_DTYPES:
        case = dataclasses.replace(_CASE, dtype=dtype, bias="1hqk", slopes=True, scale="array")
        results, gradients = check_case(case, backend)
        assert results["out"].dtype == DTYPES[dtype]
        assert results["lse"].dtype == np.float32
        assert gradients["bias"].dtype == gradients["slopes"].dtype == np.float32


def test_a_python_scale_promotes_nothing(backend):
    case = dataclasses.replace(_CASE, dtype="bfloat16", scale=0.25)
    results, _ = check_case(case, backend)
    assert results["out"].dtype == DTYPES["bfloat16"]


@pytest.mark.parametrize("dtype", FUSED_DTYPES)
def test_x64_mode_changes_no_bit_and_no_dtype(backend, dtype):
    case = dataclasses.replace(
        _CASE, dtype=dtype, causal=True, bias="hqk", slopes=True, soft_cap=3.0, key_lengths=(40, 9)
    )
    problem, cotangents = case.problem(), case.cotangents()
    plain, plain_gradients = run.vjp(problem, backend, *cotangents)
    run._compiled.cache_clear()
    with jax.enable_x64(True):
        wide, wide_gradients = run.vjp(problem, backend, *cotangents)
    run._compiled.cache_clear()
    for name, x in (plain | plain_gradients).items():
        y = (wide | wide_gradients)[name]
        assert x.dtype == y.dtype, name
        np.testing.assert_array_equal(x, y, err_msg=name)


@pytest.mark.parametrize("dtype", FUSED_DTYPES)
def test_precision_highest(backend, dtype):
    """True float32 accuracy for float32; documented as without effect for 16-bit inputs."""
    case = dataclasses.replace(_CASE, dtype=dtype, causal=True, d=64)
    results, gradients = check_case(case, backend, precision="highest")
    if dtype != "float32":
        default, default_gradients = run.vjp(case.problem(), backend, *case.cotangents())
        for name, x in (default | default_gradients).items():
            np.testing.assert_array_equal((results | gradients)[name], x, err_msg=name)


def test_precision_follows_the_default_matmul_precision(backend):
    case = dataclasses.replace(_CASE, d=64)
    explicit = run.forward(case.problem(), backend, precision="highest")
    run._compiled.cache_clear()
    with jax.default_matmul_precision("highest"):
        implicit = run.forward(case.problem(), backend)
    run._compiled.cache_clear()
    for name in ("out", "lse"):
        np.testing.assert_array_equal(explicit[name], implicit[name])


def test_float64_is_true_float64_and_auto_goes_to_xla():
    case = dataclasses.replace(_CASE, dtype="float64", causal=True, slopes=True)
    with jax.enable_x64(True):
        check_case(case, BACKENDS["xla"])
        p = case.problem()
        arguments = [jnp.asarray(x) for x in (p.query, p.key, p.value)]
        auto = jax_ops.dot_product_attention(*arguments, is_causal=True)
        xla = jax_ops.dot_product_attention(*arguments, is_causal=True, implementation="xla")
        assert auto.dtype == np.float64
        np.testing.assert_array_equal(auto, xla)


def test_mixed_dtypes_are_refused(backend):
    p = _CASE.problem()
    for name in ("query", "key", "value"):
        arrays = {n: jnp.asarray(getattr(p, n)) for n in ("query", "key", "value")}
        arrays[name] = arrays[name].astype(jnp.bfloat16)
        with pytest.raises(TypeError, match=r"bfloat16") as caught:
            jax_ops.dot_product_attention(**arrays, implementation=backend.name)
        assert isinstance(caught.value, ValueError)


def test_integer_operands_get_float0_cotangents(backend):
    """Lengths, ids and masks ride along through grad with respect to everything."""
    p = Problem(*(np.ones((1, 4, 1, 8), np.float32) for _ in range(3)))

    def loss(arrays):
        return jax_ops.dot_product_attention(
            arrays["q"],
            arrays["q"],
            arrays["q"],
            mask=arrays["mask"],
            key_value_seq_lengths=arrays["lengths"],
            query_segment_ids=arrays["ids"],
            implementation=backend.name,
        ).sum()

    arrays = {
        "q": jnp.asarray(p.query),
        "mask": jnp.ones((4, 4), bool),
        "lengths": jnp.array([3]),
        "ids": jnp.zeros((1, 4), jnp.int32),
    }
    gradients = jax.grad(loss, allow_int=True)(arrays)
    for name in ("mask", "lengths", "ids"):
        assert gradients[name].dtype == jax.dtypes.float0, name
    assert np.isfinite(gradients["q"]).all()
