# SPDX-License-Identifier: Apache-2.0
"""What the tests of flex_attention share: a case, some masks, the accuracy check of a call."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import jax_ops
from jax_ops import flex
from jax_ops._problem import make_problem
from tests.cases import accuracy
from tests.cases.case import Case
from tests.cases.problem import Problem

_RNG = np.random.default_rng(7)
CASE = Case(b=2, lq=70, lkv=90, hq=4, hkv=2, d=16)
ROW, KEY = np.arange(CASE.lq)[:, None], np.arange(CASE.lkv)
QUERY_IDS = np.sort(_RNG.integers(-1, 3, (2, CASE.lq)), axis=1)
KEY_IDS = np.sort(_RNG.integers(-1, 3, (2, CASE.lkv)), axis=1)
LENGTHS = np.array([37, 90])


def striped(b, h, q_idx, kv_idx):
    return (q_idx // 24 + 2 * kv_idx // 24 + h) % 3 != 0


CAUSAL = jax_ops.CausalMask()
WINDOW = jax_ops.LocalWindowMask(20, 9)
SEGMENTS = jax_ops.SegmentMask(QUERY_IDS, KEY_IDS)
PADDING = jax_ops.KeyPaddingMask(LENGTHS)


def problem_of(**changes) -> Problem:
    return dataclasses.replace(CASE, **changes).problem()


def vjp(problem, backend, call, captured=()):
    """Results and gradients of call(query, key, value, *captured), checked to run on `backend`."""
    arrays = [jnp.asarray(x) for x in (problem.query, problem.key, problem.value, *captured)]
    dout, dlse = CASE.cotangents()

    def both(arrays, dout, dlse):
        results, pullback = jax.vjp(call, *arrays)
        return results, pullback((dout, dlse))

    program = jax.jit(both).lower(arrays, dout, dlse).compile()
    backend.assert_ran(program.as_text())
    (out, lse), gradients = program(arrays, dout, dlse)
    return {"out": np.asarray(out), "lse": np.asarray(lse)}, [np.asarray(g) for g in gradients]


def check(problem, backend, captured=(), names=(), **options):
    """Accuracy of flex_attention against `problem`; `options` may be functions of `captured`."""

    def call(query, key, value, *captured):
        given = {n: x(*captured) if captured else x for n, x in options.items()}
        return jax_ops.flex_attention(
            query,
            key,
            value,
            implementation=backend.name,
            return_residual=True,
            **given,
        )

    results, gradients = vjp(problem, backend, call, captured)
    tf32 = backend.tf32
    accuracy.assert_all_accurate(results, accuracy.expected_forward(problem, tf32=tf32))
    expected = accuracy.expected_backward(problem, *CASE.cotangents(), tf32=tf32)
    got = dict(zip(("query", "key", "value", *names), gradients, strict=True))
    accuracy.assert_all_accurate(got, expected)


def lowered(mask=None, bias=None, **options):
    """The spec and operands that a mask and a bias become, and the functions that are left."""
    problem = problem_of()
    base = make_problem(problem.query, problem.key, problem.value, **options)
    (spec, operands, _), mods = flex._lower(base, None, None, mask, bias)
    return spec, operands, mods
