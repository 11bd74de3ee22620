# SPDX-License-Identifier: Apache-2.0
"""flex_attention outside of jit: what was compiled for functions is found again, if it fits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ops
from jax_ops import _program, block_mask, flex
from tests.cases.uniform import means, uniform

_PROBLEM = uniform(1, 4)
_ARRAYS = (_PROBLEM.query, _PROBLEM.key, _PROBLEM.value)


@pytest.fixture
def compilations(monkeypatch):
    """A list that grows with each program that is compiled."""
    made, bind = [], _program.Program.bind

    def counted(program, captured):
        made.append(program)
        return bind(program, captured)

    monkeypatch.setattr(_program.Program, "bind", counted)
    flex._compiled.cache_clear()
    block_mask._compiled.cache_clear()
    return made


def lse(score_mod):
    """log(sum over 4 keys of exp(score)) where all scores are 0 before the function."""
    _, result = jax_ops.flex_attention(*_ARRAYS, score_mod=score_mod, return_residual=True)
    return result.sum()


def test_new_functions_of_new_arrays(compilations):
    for shift in (1.0, 2.0, 5.0):
        array = jnp.full(4, shift)
        got = lse(lambda s, b, h, i, j, array=array: s + array[j])
        assert got == pytest.approx(shift + np.log(4))
    assert len(compilations) == 1


def test_a_method_whose_object_has_changed(compilations):
    class Table:
        array = jnp.zeros(4)

        def add(self, score, b, h, q_idx, kv_idx):
            return score + self.array[kv_idx]

    table = Table()
    for value in (0.0, 1.0, 3.0):
        table.array = jnp.full(4, value)
        assert lse(table.add) == pytest.approx(value + np.log(4))
    assert len(compilations) == 1


def test_another_python_number_is_another_program(compilations):
    for shift in (1.0, 2.0, 1.0):
        got = lse(lambda s, b, h, i, j, shift=shift: s + shift)
        assert got == pytest.approx(shift + np.log(4))
    assert len(compilations) == 2


def test_gradients(compilations):
    """Lse = log(1 + e^x + e^2x + e^3x): its derivative at 0 is the mean of 0, 1, 2, 3."""
    for _ in range(3):
        slope = jax.grad(lambda x: lse(lambda s, b, h, i, j: s + x * j))(0.0)
        assert slope == pytest.approx(1.5)
    assert len(compilations) == 1


def test_custom_derivatives_are_kept_apart():
    """Two functions whose traces differ in the rule of a custom derivative alone."""

    def scaled(factor):
        @jax.custom_jvp
        def identity(x):
            return 1.0 * x

        identity.defjvp(lambda x, t: (identity(*x), factor * t[0]))
        return lambda s, b, h, i, j: identity(s)

    query = jnp.ones((1, 1, 1, 1))
    key = jnp.array([0.0, 1.0]).reshape(1, 2, 1, 1)

    def gradient(score_mod):
        def loss(query):
            return jax_ops.flex_attention(query, key, key, score_mod=score_mod, scale=1.0).sum()

        return jax.grad(loss)(query).item()

    assert gradient(scaled(3.0)) == pytest.approx(3 * gradient(scaled(1.0)), rel=1e-5)


def test_masks_that_become_block_masks(compilations):
    for first in (1, 2):
        n = jnp.int32(first)
        out = jax_ops.flex_attention(*_ARRAYS, mask_mod=lambda b, h, i, j, n=n: j >= n)
        np.testing.assert_allclose(means(out), [[(first + 3) / 2]], rtol=1e-6)
    assert len(compilations) == 1
