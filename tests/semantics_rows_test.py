# SPDX-License-Identifier: Apache-2.0
"""Rules 1 and 2: rows with no allowed key, and keys that nobody may see."""

import dataclasses

import numpy as np
import pytest

from tests.cases import accuracy, run
from tests.cases.case import Case
from tests.cases.problem import Problem

# Every way in which rows lose all their keys, and the rows [B, Lq] that do.
_CASE = Case(b=2, lq=40, lkv=35, hq=4, hkv=2, d=16)


def _emptied(kind, dtype):
    """A problem of which some rows are empty; the arrays that do not matter stay as they are."""
    case = dataclasses.replace(_CASE, dtype=dtype)
    problem = case.problem()
    full = np.ones((2, 1, 40, 35), bool)
    if kind == "mask":
        full[0, :, 5:9] = False
        full[1, :, 39] = False
        return problem.with_arrays(mask=full)
    if kind == "all_masked":
        return problem.with_arrays(mask=np.zeros((1, 1, 1, 1), bool))
    if kind == "causal":
        return problem.with_arrays(causal=True, bottom_right=True)
    if kind == "window":
        # Rows far past the keys have their whole window outside.
        return problem.with_arrays(window=(2, None), key_lengths=np.array([35, 20], np.int32))
    if kind == "query_lengths":
        return problem.with_arrays(query_lengths=np.array([0, 17], np.int32))
    if kind == "key_lengths":
        return problem.with_arrays(key_lengths=np.array([0, 3], np.int32))
    if kind == "segments":
        q_ids = np.repeat([[0, 1, -1, 5]], 10, 1).reshape(1, 40, order="A")
        q_ids = np.sort(q_ids, 1)
        kv_ids = np.zeros((1, 35), np.int32)
        kv_ids[:, 20:] = 1
        return problem.with_arrays(
            query_segments=np.repeat(q_ids, 2, 0).astype(np.int32),
            key_segments=np.repeat(kv_ids, 2, 0),
        )
    if kind == "bias":
        bias = np.zeros((2, 4, 40, 35), np.float32)
        bias[0, 1, 3] = -np.inf
        bias[1, :, 7] = -np.inf
        return problem.with_arrays(bias=bias)
    raise AssertionError(kind)


_KINDS = (
    "mask",
    "all_masked",
    "causal",
    "window",
    "query_lengths",
    "key_lengths",
    "segments",
    "bias",
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", _KINDS)
def test_empty_rows_are_zero_and_carry_no_gradient(backend, kind, dtype):
    problem = _emptied(kind, dtype)
    dout, dlse = dataclasses.replace(_CASE, dtype=dtype).cotangents()
    empty = ~problem.allowed().any(3).swapaxes(1, 2)  # [B, Lq, Hq]
    assert empty.any() and (kind == "all_masked" or not empty.all())

    results, gradients = run.vjp(problem, backend, dout, dlse)
    assert (results["out"][empty] == 0).all()
    assert (results["lse"][empty] == -np.inf).all()
    assert (gradients["query"][empty] == 0).all()
    accuracy.assert_all_accurate(results, accuracy.expected_forward(problem, tf32=backend.tf32))
    accuracy.assert_all_accurate(
        gradients, accuracy.expected_backward(problem, dout, dlse, tf32=backend.tf32)
    )

    # Whatever stands in the cotangents of empty rows adds nothing anywhere, by not one bit.
    dout, dlse = dout.copy(), dlse.copy()
    dout[empty] = 3
    dlse[empty] = -7
    _, again = run.vjp(problem, backend, dout, dlse)
    for name, g in gradients.items():
        np.testing.assert_array_equal(again[name], g, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bias_of_finfo_min_is_no_mask(backend, dtype):
    """A row of finfo.min stays a uniform softmax: finite, not empty, not NaN."""
    problem = dataclasses.replace(_CASE, dtype=dtype).problem()
    bias = np.zeros((40, 35), np.float32)
    bias[3] = np.finfo(np.float32).min
    problem = problem.with_arrays(
        query=np.zeros_like(problem.query), bias=bias.astype(accuracy.DTYPES[dtype])
    )
    if dtype != "float32":  # Rounding to bf16 gives -inf.
        bias[3] = float(np.asarray(accuracy.ml_dtypes.finfo(dtype).min, np.float32))
        problem = problem.with_arrays(bias=bias.astype(accuracy.DTYPES[dtype]))
    dout, dlse = dataclasses.replace(_CASE, dtype=dtype).cotangents()
    results, gradients = run.vjp(problem, backend, dout, dlse)
    accuracy.assert_all_accurate(results, accuracy.expected_forward(problem, tf32=backend.tf32))
    for name, g in gradients.items():
        assert np.isfinite(g.astype(np.float32)).all(), name
    assert not np.isinf(results["lse"]).any()


def _poison(problem, dout, dlse):
    """NaN and Inf wherever no query looks, and in query rows past their length."""
    b, lq, lkv, hq, hkv, *_ = problem.sizes
    allowed = problem.allowed()
    seen = allowed.reshape(b, hkv, hq // hkv, lq, lkv).any((2, 3)).swapaxes(1, 2)
    past = np.arange(lq)[None] >= problem.lengths()[0][:, None]
    key, value, query = (x.copy() for x in (problem.key, problem.value, problem.query))
    dout, dlse = dout.copy(), dlse.copy()
    key[~seen], value[~seen] = np.nan, np.inf
    query[past], dout[past], dlse[past] = np.nan, np.nan, np.nan
    clean_key, clean_value, clean_query = (x.copy() for x in (key, value, query))
    clean_key[~seen] = clean_value[~seen] = clean_query[past] = 0
    clean_dout, clean_dlse = dout.copy(), dlse.copy()
    clean_dout[past] = clean_dlse[past] = 0
    poisoned = (problem.with_arrays(query=query, key=key, value=value), dout, dlse)
    clean = problem.with_arrays(query=clean_query, key=clean_key, value=clean_value)
    return poisoned, (clean, clean_dout, clean_dlse), ~seen, past


_UNSEEN = {
    "key_lengths": {"key_lengths": np.array([50, 7], np.int32)},
    "both_lengths": {
        "query_lengths": np.array([3, 66], np.int32),
        "key_lengths": np.array([64, 71], np.int32),
    },
    "causal": {"causal": True},
    "causal_bottom_right": {
        "causal": True,
        "bottom_right": True,
        "query_lengths": np.array([60, 20], np.int32),
        "key_lengths": np.array([64, 30], np.int32),
    },
    "window": {"window": (3, 2), "query_lengths": np.array([20, 5], np.int32)},
    "segments": {
        "query_segments": np.repeat(np.array([[0, 1], [2, -1]], np.int32), 35, 1)[:, :66],
        "key_segments": np.repeat(np.array([[0, 7, 1], [2, -1, -1]], np.int32), 30, 1)[:, :72],
    },
    "mask": {"mask": (np.arange(72) % 5 != 2)[None, None, None]},
    "mask_per_head": {
        "mask": (np.arange(72) % 5 != 2)[None, None] & (np.arange(4) < 2)[:, None, None]
    },
    "bias": {"bias": np.where(np.arange(72) < 69, 0.5, -np.inf).astype(np.float32)},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", _UNSEEN)
def test_poison_where_nobody_looks_changes_no_bit(backend, kind, dtype):
    case = Case(b=2, lq=66, lkv=72, hq=4, hkv=2, d=24, dtype=dtype)
    problem = case.problem().with_arrays(**_UNSEEN[kind])
    poisoned, clean, unseen, past = _poison(problem, *case.cotangents())
    assert unseen.any()
    results, gradients = run.vjp(poisoned[0], backend, *poisoned[1:])
    expected, expected_gradients = run.vjp(clean[0], backend, *clean[1:])
    for name, x in (expected | expected_gradients).items():
        np.testing.assert_array_equal((results | gradients)[name], x, err_msg=name)
    assert (gradients["key"][unseen] == 0).all()
    assert (gradients["value"][unseen] == 0).all()
    assert (gradients["query"][past] == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("position", [0, 31, 64, 70])
def test_changing_a_key_moves_only_the_rows_that_see_it(backend, position, dtype):
    """Causal: rows before the key keep every bit; the others change (else nothing was tested)."""
    problem = Case(b=1, lq=72, lkv=72, hq=2, d=16, causal=True, dtype=dtype).problem()
    before = run.forward(problem, backend)
    key, value = problem.key.copy(), problem.value.copy()
    key[:, position] = 5
    value[:, position] = -100
    after = run.forward(problem.with_arrays(key=key, value=value), backend)
    for name in ("out", "lse"):
        np.testing.assert_array_equal(after[name][:, :position], before[name][:, :position])
        assert (after[name][:, position:] != before[name][:, position:]).any(), name


# Weights of one row and of another change by powers of ten, over several blocks of keys.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_changing_a_query_moves_only_its_own_row(backend, dtype):
    problem = Case(b=1, lq=40, lkv=300, hq=1, hkv=1, d=32, dtype=dtype).problem()
    before = run.forward(problem, backend)
    query = problem.query.copy()
    query[:, 1] = 8 * problem.key[:, 290]
    after = run.forward(problem.with_arrays(query=query), backend)
    others = np.arange(40) != 1
    for name in ("out", "lse"):
        np.testing.assert_array_equal(after[name][:, others], before[name][:, others])
        assert (after[name][:, 1] != before[name][:, 1]).any(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [1.0, 1.37, 1000.0])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("size", [317.0, 1e5, 1e15])
def test_one_key_has_weight_one_whatever_its_score(backend, size, sign, scale, dtype):
    """Out is v, dv is dout, dq and dk are 0, lse is the score: for scores from 1e5 to 1e33."""
    case = Case(b=1, lq=2, lkv=1, hq=1, hkv=1, d=1, dv=4, dtype=dtype)
    problem = case.problem()
    problem = problem.with_arrays(
        query=np.full_like(problem.query, size),
        key=np.full_like(problem.key, sign * 1.04 * size),
        scale=scale,
    )
    dout, dlse = case.cotangents()
    results, gradients = run.vjp(problem, backend, dout, np.zeros_like(dlse))
    score = np.float64(problem.query[0, 0, 0, 0]) * np.float64(problem.key[0, 0, 0, 0]) * scale
    value, dvalue = np.float64(problem.value), np.float64(dout).sum(1, keepdims=True)
    # tf32 rounds q, k, v and dout: out is a rounded v, and dP - delta a difference of roundings.
    rounds = backend.tf32 and dtype == "float32"
    np.testing.assert_allclose(np.float64(results["out"]), value.repeat(2, 1), 1e-3 * rounds)
    np.testing.assert_allclose(results["lse"], score, 2e-3 if rounds else 3e-7)
    digits = 1e-3 if rounds else 1e-6 if dtype == "float32" else 2**-8
    np.testing.assert_allclose(np.float64(gradients["value"]), dvalue, digits, digits)
    if not rounds:
        assert (gradients["query"] == 0).all()
        assert (gradients["key"] == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("lkv", [40, 200])
@pytest.mark.parametrize("lq", [2, 40])
def test_one_key_has_weight_one_in_every_path(backend, lq, lkv, dtype):
    """The same with scores of 64 products: few rows may be streamed, and add in another order."""
    case = Case(b=2, lq=lq, lkv=lkv, hq=4, hkv=2, d=64, dtype=dtype, amplitude=20, scale=0.7)
    # Query i sees key lkv - lq + i alone.
    problem = case.problem().with_arrays(causal=True, bottom_right=True, window=(0, 0))
    dout, dlse = case.cotangents()
    results, gradients = run.vjp(problem, backend, dout, np.zeros_like(dlse))
    query = np.float64(problem.query).reshape(2, lq, 2, 2, 64)
    key = np.float64(problem.key)[:, lkv - lq :, :, None]
    score = 0.7 * (query * key).sum(-1).reshape(2, lq, 4)
    largest = np.abs(score).max()
    assert largest > 4000
    rounds = backend.tf32 and dtype == "float32"
    digits = 2e-3 if rounds else {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
    # A sum of large products of both signs: its rounding is measured by the largest.
    np.testing.assert_allclose(results["lse"], score, 0, (2e-3 if rounds else 1e-6) * largest)
    dvalue = np.zeros((2, lkv, 2, 64))
    dvalue[:, lkv - lq :] = np.float64(dout).reshape(2, lq, 2, 2, 64).sum(3)
    np.testing.assert_allclose(np.float64(gradients["value"]), dvalue, digits, digits)


def test_no_keys_and_no_queries(backend):
    """Lkv = 0: the identities of an empty row. Lq = 0 and B = 0: empty results, zero gradients."""
    for b, lq, lkv in [(2, 3, 0), (2, 0, 5), (0, 3, 5), (1, 0, 0)]:
        problem = Problem(
            np.ones((b, lq, 4, 8), np.float32),
            np.ones((b, lkv, 2, 8), np.float32),
            np.ones((b, lkv, 2, 6), np.float32),
        )
        dout = np.ones((b, lq, 4, 6), np.float32)
        dlse = np.ones((b, lq, 4), np.float32)
        # An empty program may have no kernel call at all, so the check of the target is off here.
        results, gradients = run.eager(problem, backend, dout, dlse)
        assert results["out"].shape == (b, lq, 4, 6) and (results["out"] == 0).all()
        assert results["lse"].shape == (b, lq, 4) and (results["lse"] == -np.inf).all()
        for name, g in gradients.items():
            assert g.shape == getattr(problem, name).shape and (g == 0).all(), name
