# SPDX-License-Identifier: Apache-2.0
"""Rule 12: any head dim, any length, unequal head dims, rank three, every GQA group."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jax_ops
from tests.cases import run
from tests.cases.case import Case
from tests.cases.check import check_case

_CASE = Case(b=1, lq=33, lkv=40, hq=2, hkv=1, d=16)

# Every bucket of the kernels, its edges, and pairs that fall into different ones.
_HEAD_DIMS = (
    *((1, 1), (3, 5), (8, 8), (40, 24), (64, 64), (65, 63), (80, 80), (96, 96), (128, 128)),
    *((192, 128), (72, 200), (255, 256), (256, 17)),
)


@pytest.mark.parametrize(
    ("d", "dv"),
    _HEAD_DIMS,
)
def test_head_dims(backend, d, dv):
    dtype = ("float32", "bfloat16", "float16")[(d + dv) % 3]
    check_case(dataclasses.replace(_CASE, d=d, dv=dv, dtype=dtype, causal=True), backend)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_common_head_dims_in_every_dtype(backend, dtype):
    for d in (64, 128):
        check_case(dataclasses.replace(_CASE, d=d, dtype=dtype, lkv=97), backend)


@pytest.mark.parametrize(("hq", "hkv"), [(1, 1), (6, 6), (6, 3), (6, 2), (5, 1), (12, 4)])
def test_groups(backend, hq, hkv):
    check_case(dataclasses.replace(_CASE, hq=hq, hkv=hkv, b=2, causal=True), backend)


@pytest.mark.parametrize("b", [1, 3, 5])
def test_batches(backend, b):
    check_case(dataclasses.replace(_CASE, b=b, mask="b1qk"), backend)


def test_rank_three_equals_a_batch_of_one(backend):
    p = dataclasses.replace(_CASE, causal=True, bias="hqk").problem()
    batched = run.forward(p, backend)
    out, lse = jax_ops.dot_product_attention(
        *(jnp.asarray(x[0]) for x in (p.query, p.key, p.value)),
        jnp.asarray(p.bias),
        is_causal=True,
        implementation=backend.name,
        return_residual=True,
    )
    np.testing.assert_array_equal(out, batched["out"][0])
    np.testing.assert_array_equal(lse, batched["lse"][0])


@pytest.mark.parametrize("length", [1, 1500])
def test_long_and_short_keys(backend, length):
    """More keys than any tile, and fewer."""
    for lq in (1, 130):
        check_case(dataclasses.replace(_CASE, lq=lq, lkv=length, dtype="bfloat16"), backend)
