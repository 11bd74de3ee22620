# SPDX-License-Identifier: Apache-2.0
"""The CUDA gradient kernels' two forms, each asked for: both within the accuracy rule."""

import dataclasses
import re

import pytest

from jax_ops import _plan
from tests.cases import accuracy, run
from tests.cases.case import Case

# Query rows of a tile at head dim 64 and 128: two kernels, one kernel.
_FORMS = {64: (128, 64), 128: (128, 32)}

# What the one-kernel form knows: causal, window, lengths; several key tiles, odd groups.
_CASES = {
    "plain": Case(lq=67, lkv=261),
    "causal": Case(lq=130, lkv=130, causal=True),
    "bottom_right": Case(lq=70, lkv=300, causal=True, bottom_right=True),
    "empty_rows": Case(lq=200, lkv=130, causal=True, bottom_right=True),
    "window": Case(lq=200, lkv=300, window=(40, 10)),
    "lengths": Case(lq=100, lkv=300, query_lengths=(100, 33), key_lengths=(0, 257)),
    "odd_group": Case(lq=65, lkv=257, hq=6, causal=True),
}


def _gradients(problem, backend, dout, dlse, block_q):
    run.forget()
    with _plan.backward_block_q(block_q):
        program, _ = run.compile_problem(problem, backend, "vjp", dout, dlse)
    (call,) = re.findall(rf'"attention_bwd_{backend.target}_v.*', program.as_text())
    assert f"block_q = {block_q} :" in call
    _, got = run.vjp(problem, backend, dout, dlse)
    return got


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("d", _FORMS)
@pytest.mark.parametrize("name", _CASES)
def test_both_forms_are_accurate(backend, name, d, dtype):
    case = dataclasses.replace(_CASES[name], d=d, dtype=dtype)
    problem = case.problem()
    dout, dlse = case.cotangents()
    expected = accuracy.expected_backward(problem, dout, dlse, tf32=backend.tf32)
    for block_q in _FORMS[d]:
        got = _gradients(problem, backend, dout, dlse, block_q)
        accuracy.assert_all_accurate(got, expected, soft_cap=False)


def test_a_form_that_does_not_exist_is_refused(backend):
    case = Case(d=64, dtype="float32")
    with pytest.raises(ValueError, match=r"block_q of a gradient: got 64; allowed: 128"):
        _gradients(case.problem(), backend, *case.cotangents(), 64)
