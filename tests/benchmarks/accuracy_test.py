# SPDX-License-Identifier: Apache-2.0
"""The yardsticks themselves: reference, baseline, rounding and gate by independent formulas."""

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest

from benchmarks.harness import gate, inputs, operation, reference, yardstick
from benchmarks.harness.case import Case
from benchmarks.harness.precision import round_to

CASE = Case("gqa", "float32", "fwd", 2, 5, 7, 4, 2, 3)


def naive(case, q, k, v):
    """Attention by loops over every query and key, in float64."""
    out = np.zeros(q.shape)
    for b, i, h in np.ndindex(case.batch, case.lq, case.hq):
        kv = h // (case.hq // case.hkv)
        allowed = [j for j in range(case.lkv) if not case.causal or j <= i + case.lkv - case.lq]
        if not allowed:
            continue
        scores = [float(q[b, i, h] @ k[b, j, kv]) / math.sqrt(case.head_dim) for j in allowed]
        weights = np.exp(np.array(scores) - max(scores))
        weights /= weights.sum()
        out[b, i, h] = sum(w * v[b, j, kv] for w, j in zip(weights, allowed, strict=True))
    return out


def float64_inputs(case):
    return [array.astype(np.float64) for array in inputs.attention_inputs(case)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(5, 7), (7, 5), (6, 6), (1, 9)])
def test_reference_forward_equals_loops(causal, lengths):
    case = dataclasses.replace(CASE, causal=causal, lq=lengths[0], lkv=lengths[1])
    q, k, v, _ = float64_inputs(case)
    (out,) = reference.attention(case, q, k, v, None)
    np.testing.assert_allclose(out, naive(case, q, k, v), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(4, 6), (6, 4)])
def test_reference_gradients_equal_finite_differences(causal, lengths):
    case = dataclasses.replace(CASE, batch=1, causal=causal, lq=lengths[0], lkv=lengths[1])
    q, k, v, cotangent = float64_inputs(case)
    grads = reference.attention(case, q, k, v, cotangent)
    step = 1e-6
    for which, grad in enumerate(grads):
        rng = np.random.default_rng(which)
        for _ in range(6):
            operands = [q.copy(), k.copy(), v.copy()]
            at = tuple(rng.integers(0, n) for n in grad.shape)
            values = []
            for sign in (1, -1):
                operands[which][at] = (q, k, v)[which][at] + sign * step
                values.append(float((naive(case, *operands) * cotangent).sum()))
            slope = (values[0] - values[1]) / (2 * step)
            assert grad[at] == pytest.approx(slope, rel=1e-6, abs=1e-8)


def test_reference_does_not_depend_on_its_block_size(monkeypatch):
    case = dataclasses.replace(CASE, lq=33, causal=True)
    q, k, v, cotangent = float64_inputs(case)
    whole = reference.attention(case, q, k, v, cotangent)
    monkeypatch.setattr(reference, "_BLOCK_ELEMENTS", 1)
    parts = reference.attention(case, q, k, v, cotangent)
    for x, y in zip(whole, parts, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_baseline_error_is_that_of_its_precision(dtype):
    case = dataclasses.replace(CASE, dtype=dtype, lq=64, lkv=64, head_dim=16)
    q, k, v, _ = inputs.attention_inputs(case)
    (exact,) = reference.attention(case, q, k, v, None)
    (baseline,) = reference.attention(
        case, q, k, v, None, reference.baseline_arithmetic(dtype, dtype)
    )
    unit = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-12}[dtype]
    assert 0.1 * unit < gate.relative_error(baseline, exact) < 8 * unit


def test_rounding_agrees_with_the_types_and_tf32_keeps_ten_bits():
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    for name, dtype in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)):
        expected = values.astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(round_to(values, name), expected)
    assert round_to(values, "float32") is not values
    tf32 = round_to(values, "tf32")
    assert not np.any(tf32.view(np.uint32) & np.uint32(0x1FFF))
    assert np.max(np.abs(tf32 - values) / np.abs(values)) <= 2.0**-11
    # Ties go to even: 1 + 2^-11 lies between 1 and 1 + 2^-10.
    assert round_to(np.float32([1 + 2.0**-11]), "tf32")[0] == 1.0
    assert round_to(np.float32([1 + 3 * 2.0**-11]), "tf32")[0] == np.float32(1 + 2.0**-9)


def test_gate_passes_the_baseline_and_fails_beyond_its_limits():
    ref = np.random.default_rng(1).normal(size=(4, 100))
    baseline = round_to(ref, "bfloat16")
    limit = gate.tolerance(ref, [ref, baseline], "bfloat16")
    assert gate.judge([baseline], [ref], [limit], ("out",)).failure is None
    off = ref * (1 + 1.5 * limit.relative)
    verdict = gate.judge([off], [ref], [limit], ("out",))
    assert verdict.failure is not None and "out" in verdict.failure
    assert verdict.rel_err == pytest.approx(1.5 * limit.relative)


def test_gate_looks_at_the_largest_error_too():
    """One bad element hides in a norm over many."""
    ref = np.random.default_rng(2).normal(size=1_000_000)
    limit = gate.tolerance(ref, [round_to(ref, "bfloat16")], "bfloat16")
    off = ref.copy()
    off[17] += 3 * limit.maximum
    verdict = gate.judge([off], [ref], [limit], ("dk",))
    assert verdict.rel_err < limit.relative
    assert verdict.failure is not None


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([np.ones(3)], "returned 1 outputs, expected 2"),
        ([np.ones(3), np.ones(4)], "shape"),
        ([np.ones(3), np.full(3, np.nan)], "dk"),
    ],
)
def test_gate_names_missing_misshapen_and_nan_outputs(outputs, message):
    limit = gate.Tolerance(1e-3, 1e-3)
    verdict = gate.judge(outputs, [np.ones(3)] * 2, [limit] * 2, ("dq", "dk"))
    assert verdict.failure is not None and message in verdict.failure


@pytest.mark.parametrize("mode", ["fwd", "fwd_bwd"])
@pytest.mark.parametrize("model_dim", [None, 12])
@pytest.mark.parametrize("variant", [1, 2])
def test_a_reordered_problem_has_the_reordered_answer(mode, model_dim, variant):
    """In float64 nothing else changes, causal mask and grouped heads included."""
    case = Case("gqa", "float32", mode, 2, 6, 6, 4, 2, 5, True, model_dim=model_dim)
    made = operation.operation_of(case)
    arrays = made.inputs(case)
    straight = made.reference(case, arrays, reference.FLOAT64)
    other = made.reference(case, made.reordered(arrays, variant), reference.FLOAT64)
    for x, y in zip(straight, made.reordered(other, variant, back=True), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-14)
    assert not np.allclose(straight[0], other[0])


def test_the_limits_do_not_depend_on_the_luck_of_few_numbers():
    """Another honest order of summation, on 60 draws of 3 queries, always passes."""
    made = operation.operation_of(CASE)
    case = dataclasses.replace(CASE, mode="fwd_bwd", batch=1, lq=3, lkv=3, hq=1, hkv=1, head_dim=32)
    arithmetic = reference.baseline_arithmetic("float32", "float32")
    for seed in range(60):
        rng = np.random.default_rng(seed)
        arrays = tuple(rng.standard_normal((1, 3, 1, 32)).astype(np.float32) for _ in range(4))
        judged = yardstick.make_yardstick(case, arrays, {"float32"}, ref_max_seq=8)
        q, k, v, cotangent = made.reordered(arrays, 99)
        dq, dk, dv = reference.attention(case, q, k[:, ::-1], v[:, ::-1], cotangent, arithmetic)
        honest = made.reordered((dq, dk[:, ::-1], dv[:, ::-1]), 99, back=True)
        assert judged.judge(list(honest), "float32").failure is None, seed


def test_a_layer_is_judged_by_more_orders_of_summation(monkeypatch):
    """A weight gradient sums over all tokens, and which order its largest error comes from is luck.

    With two orders a limit was 1.5 % short for an honest layer of 8 sequences.
    """
    monkeypatch.setattr(yardstick, "_SMALL_PROBLEM", 0)
    limits = {}
    for model_dim in (None, 16):
        case = Case("layer", "float32", "fwd_bwd", 2, 16, 16, 2, 2, 8, True, model_dim=model_dim)
        arrays = operation.operation_of(case).inputs(case)
        for orders in (2, 8):
            monkeypatch.setattr(yardstick, "_EVALUATIONS_SMALL", orders)
            made = yardstick.make_yardstick(case, arrays, {"float32"}, ref_max_seq=64)
            limits[model_dim, orders] = [t.maximum for t in made.tolerances["float32"]]
    assert limits[None, 8] == limits[None, 2]
    pairs = list(zip(limits[16, 8], limits[16, 2], strict=True))
    assert all(more >= few for more, few in pairs) and any(more > few for more, few in pairs)


def test_yardstick_survives_the_way_to_another_process(tmp_path):
    case = dataclasses.replace(CASE, mode="fwd_bwd")
    arrays = operation.operation_of(case).inputs(case)
    made = yardstick.make_yardstick(case, arrays, {"float32", "tf32"}, ref_max_seq=64)
    assert made.part is None
    made.save(tmp_path / "y.npz")
    read = yardstick.Yardstick.load(tmp_path / "y.npz")
    assert read.names == made.names == ("dq", "dk", "dv")
    assert read.tolerances == made.tolerances
    assert read.tolerances["tf32"][0].relative > 50 * read.tolerances["float32"][0].relative
    for x, y in zip(read.references, made.references, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("mode", ["fwd", "fwd_bwd"])
@pytest.mark.parametrize("hkv", [4, 2])
def test_layer_reference_equals_jax(mode, hkv):
    """The layer's reference against autodiff of a plain jax.numpy layer, and the gate's limits."""
    import jax
    import jax.numpy as jnp

    case = Case("layer", "float32", mode, 2, 16, 16, 4, hkv, 8, True, model_dim=32)
    layer_operation = operation.operation_of(case)
    arrays = layer_operation.inputs(case)

    def layer(x, w_q, w_k, w_v, w_o):
        q, k, v = (jnp.einsum("blm,mhd->blhd", x, w) for w in (w_q, w_k, w_v))
        k, v = (jnp.repeat(a, case.group, axis=2) for a in (k, v))
        s = jnp.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(case.head_dim)
        s = jnp.where(jnp.tril(jnp.ones((16, 16), bool)), s, -jnp.inf)
        o = jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(s), v)
        return jnp.einsum("blhd,hdm->blm", o, w_o)

    backward = mode == "fwd_bwd"
    results = jax.vjp(layer, *arrays[:5])[1](arrays[5]) if backward else [layer(*arrays)]
    made = yardstick.make_yardstick(case, arrays, {"float32"}, ref_max_seq=64)
    verdict = made.judge([np.asarray(x) for x in results], "float32")
    assert verdict.failure is None
    assert len(verdict.rel_err_parts) == (1 if mode == "fwd" else 5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mode", ["fwd", "fwd_bwd"])
@pytest.mark.parametrize("affordable", [True, False])
def test_beyond_the_reference_a_part_is_judged(causal, mode, affordable, monkeypatch, tmp_path):
    """The part's references equal that part of the whole ones, and errors there are found."""
    case = Case("gqa", "float32", mode, 2, 96, 96, 4, 2, 8, causal)
    arrays = operation.operation_of(case).inputs(case)
    if not affordable:
        monkeypatch.setattr(yardstick, "_PART_PAIRS", 0)
    whole = yardstick.make_yardstick(case, arrays, {"float32"}, ref_max_seq=96)
    made = yardstick.make_yardstick(case, arrays, {"float32"}, ref_max_seq=95)
    made.save(tmp_path / "y.npz")
    made = yardstick.Yardstick.load(tmp_path / "y.npz")
    assert made.part is not None and made.part.whole == affordable
    for x, y in zip(made.references, made.part.outputs(whole.names, whole.references), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)
    right = [x.astype(np.float32) for x in whole.references]
    assert made.judge(right, "float32").failure is None
    names = made.part.names(whole.names)
    assert (
        names == ("out",)
        if mode == "fwd"
        else names == (("dq", "dk", "dv") if affordable else ("dq",))
    )
    for name in names:
        wrong = [x.copy() for x in right]
        wrong[whole.names.index(name)][-1, -1, -1] *= 1.01
        assert name in made.judge(wrong, "float32").failure


def test_the_baseline_cancels_no_better_than_a_kernel_can():
    """The first causal row has one key: dq is 0, and both terms of it are rounded apart."""
    case = Case("gqa", "float32", "fwd_bwd", 8, 4, 4, 4, 4, 64, True)
    arrays = inputs.attention_inputs(case)
    exact, *_ = reference.attention(case, *arrays)
    arithmetic = reference.baseline_arithmetic("float32", "float32")
    baseline, *_ = reference.attention(case, *arrays, arithmetic)
    assert np.abs(exact[:, 0]).max() < 1e-12
    assert 0 < np.abs(baseline[:, 0]).max() < 1e-4
