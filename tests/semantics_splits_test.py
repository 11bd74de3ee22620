# SPDX-License-Identifier: Apache-2.0
"""Rule 14: splitting the keys changes nothing but rounding, and rows do not see each other."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jax_ops
from tests.cases import accuracy, run
from tests.cases.case import Case
from tests.cases.check import check_case
from tests.cases.problem import Problem

_SPLITS = ["auto", 1, 2, 7, 64, 5000]
_CASE = Case(b=2, lq=3, lkv=300, hq=4, hkv=2, d=32)


@pytest.mark.parametrize("num_splits", _SPLITS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_split_count_forward_and_backward(backend, num_splits, dtype):
    case = dataclasses.replace(_CASE, causal=True, dtype=dtype, lq=20)
    check_case(case, backend, entry="mha", num_splits=num_splits)


@pytest.mark.parametrize("num_splits", _SPLITS)
def test_decode_with_any_split_count(backend, num_splits):
    """More splits than keys, and rows with none."""
    case = dataclasses.replace(_CASE, causal=True, bottom_right=True, key_lengths=(300, 2))
    check_case(case, backend, entry="decode_attention", num_splits=num_splits)


def test_a_split_count_is_not_ignored(backend):
    """Parts with maxima and sums of their own: the same numbers, but not the same bits."""
    problem = dataclasses.replace(_CASE, amplitude=2.0).problem()
    whole, split = (run.forward(problem, backend, entry="mha", num_splits=n) for n in (1, 7))
    assert (whole["out"] != split["out"]).any()
    accuracy.assert_all_accurate(split, accuracy.expected_forward(problem, tf32=backend.tf32))


@pytest.mark.parametrize("num_splits", ["auto", 1, 5])
def test_a_row_does_not_depend_on_other_rows_contents_and_lengths(backend, num_splits):
    base = dataclasses.replace(
        _CASE, b=3, causal=True, bottom_right=True, key_lengths=(300, 2, 150)
    ).problem()
    options = {"entry": "decode_attention", "num_splits": num_splits}
    before = run.forward(base, backend, **options)
    key, value, query = (x.copy() for x in (base.key, base.value, base.query))
    for x in (key, value, query):
        x[1:] = 3 * x[1:] + 1
    changed = base.with_arrays(
        key=key, value=value, query=query, key_lengths=np.array([300, 299, 0], np.int32)
    )
    after = run.forward(changed, backend, **options)
    for name in ("out", "lse"):
        np.testing.assert_array_equal(after[name][0], before[name][0])
        assert (after[name][1] != before[name][1]).any()


def test_with_an_explicit_split_count_a_row_does_not_depend_on_the_batch(backend):
    """To the bit where this project's kernels run; XLA picks its products' loops by shape."""
    p = dataclasses.replace(_CASE, b=4, causal=True, bottom_right=True).problem()
    p = p.with_arrays(key_lengths=np.array([300, 7, 64, 150], np.int32))
    options = {"entry": "decode_attention", "num_splits": 4}
    together = run.forward(p, backend, **options)
    for b in range(4):
        alone = Problem(
            p.query[b : b + 1],
            p.key[b : b + 1],
            p.value[b : b + 1],
            key_lengths=p.key_lengths[b : b + 1],
        )
        got = run.forward(alone, backend, **options)
        for name in ("out", "lse"):
            largest = np.abs(together[name][b]).max()
            bound = 4 * np.finfo(np.float32).eps * largest if backend.name == "xla" else 0
            np.testing.assert_allclose(got[name][0], together[name][b], rtol=0, atol=bound)


@pytest.mark.parametrize("parts", [2, 5])
def test_merging_separately_attended_parts_equals_the_whole(backend, parts):
    p = dataclasses.replace(_CASE, lq=17, key_lengths=(300, 40)).problem()
    step = 300 // parts
    outs, lses = [], []
    for start in range(0, 300, step):
        part = Problem(
            p.query,
            p.key[:, start : start + step],
            p.value[:, start : start + step],
            key_lengths=np.clip(p.key_lengths - start, 0, step).astype(np.int32),
        )
        got = run.forward(part, backend)
        outs.append(got["out"])
        lses.append(got["lse"])
    out, lse = jax_ops.merge_attention(jnp.stack(outs), jnp.stack(lses))
    expected = accuracy.expected_forward(p, tf32=backend.tf32)
    accuracy.assert_all_accurate({"out": np.asarray(out), "lse": np.asarray(lse)}, expected)
