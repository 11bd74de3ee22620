# SPDX-License-Identifier: Apache-2.0
"""decode_attention: new queries against a cache, with and without split-KV; and mha's sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ops
from jax_ops import _libraries, _plan
from jax_ops._problem import make_problem
from tests.cases.case import Case
from tests.cases.check import check, check_case
from tests.cases.uniform import means, uniform


def _decode(problem, backend, **options):
    return jax_ops.decode_attention(
        problem.query,
        problem.key,
        problem.value,
        problem.key_lengths,
        scale=1.0,
        implementation=backend.name,
        **options,
    )


class TestDecode:
    @pytest.mark.parametrize(
        ("window", "expected"),
        [(None, [[0.5, 1.0], [3.0, 3.5]]), ((1, 0), [[0.5, 1.5], [5.5, 6.5]])],
    )
    def test_closed_form(self, backend, window, expected):
        """The queries stand at the end of each sequence; the tail of the cache is not read."""
        problem = uniform(2, 8, b=2, key_lengths=np.array([3, 8], np.int32))
        problem.value[0, 3:] = np.nan
        problem.key[0, 3:] = np.inf
        out = _decode(problem, backend, local_window_size=window)
        np.testing.assert_allclose(means(out), expected, rtol=1e-6)

    @pytest.mark.parametrize("num_splits", ["auto", 1, 2, 7, 64, 5000])
    def test_any_number_of_splits(self, backend, num_splits):
        """Lengths of 0 (an empty row), 1, 3 (fewer than the splits), and the whole cache."""
        lengths = np.array([0, 1, 3, 4096], np.int32)
        problem = uniform(1, 4096, b=4, key_lengths=lengths)
        out, lse = _decode(problem, backend, num_splits=num_splits, return_residual=True)
        # 10 mantissa bits do not hold every index.
        tolerance = 5e-4 if backend.tf32 else 2e-6
        np.testing.assert_allclose(means(out)[:, 0], [0, 0, 1, 2047.5], rtol=tolerance)
        expected = np.array([-np.inf, 0, np.log(3), np.log(4096)])
        np.testing.assert_allclose(np.ravel(lse), expected, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_results_and_gradients(self, backend, dtype):
        case = Case(
            b=3,
            lq=3,
            lkv=150,
            hq=6,
            hkv=2,
            d=16,
            dtype=dtype,
            causal=True,
            bottom_right=True,
            key_lengths=(150, 2, 77),
        )
        check_case(case, backend, entry="decode_attention", num_splits=3)

    def test_soft_cap_and_alibi(self, backend):
        case = Case(
            b=2,
            lq=2,
            lkv=40,
            hq=4,
            hkv=2,
            d=16,
            causal=True,
            bottom_right=True,
            key_lengths=(40, 17),
            amplitude=2.0,
        )
        problem = case.problem()
        slopes = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
        arguments = (problem.query, problem.key, problem.value)
        options = {"logits_soft_cap": 3.0, "alibi_slopes": slopes, "implementation": backend.name}
        got = jax_ops.decode_attention(*arguments, problem.key_lengths, **options)
        expected = jax_ops.dot_product_attention(
            *arguments,
            is_causal=True,
            alignment="bottom_right",
            key_value_seq_lengths=problem.key_lengths,
            **options,
        )
        np.testing.assert_array_equal(got, expected)
        plain = jax_ops.decode_attention(*arguments, problem.key_lengths)
        assert np.abs(np.asarray(got) - np.asarray(plain)).max() > 0.05

    def test_new_lengths_do_not_retrace(self):
        problem, count = uniform(1, 8, b=2), 0

        @jax.jit
        def step(lengths):
            nonlocal count
            count += 1
            return jax_ops.decode_attention(problem.query, problem.key, problem.value, lengths)

        outs = [means(step(jnp.array(n, jnp.int32))) for n in ([1, 2], [5, 8])]
        np.testing.assert_allclose(np.array(outs)[..., 0], [[0, 0.5], [2, 3.5]], rtol=1e-6)
        assert count == 1

    def test_one_token_at_a_time_equals_the_causal_call(self, backend):
        problem = Case(b=2, lq=6, lkv=6, hq=4, hkv=2, d=16).problem()
        arguments = (problem.query, problem.key, problem.value)
        whole = jax_ops.dot_product_attention(
            *arguments, is_causal=True, implementation=backend.name
        )
        step = jax.jit(functools.partial(jax_ops.decode_attention, implementation=backend.name))
        for t in range(6):
            lengths = np.full(2, t + 1, np.int32)
            out = step(problem.query[:, t : t + 1], *arguments[1:], lengths)
            tolerance = 2e-3 if backend.tf32 else 2e-6
            np.testing.assert_allclose(out[:, 0], whole[:, t], rtol=tolerance, atol=tolerance)

    def test_without_a_batch_axis(self, backend):
        problem = uniform(1, 8)
        out = jax_ops.decode_attention(
            problem.query[0],
            problem.key[0],
            problem.value[0],
            np.array([5]),
            implementation=backend.name,
        )
        assert out.shape == (1, 1, 1)
        np.testing.assert_allclose(out, [[[2.0]]], rtol=1e-6)

    @pytest.mark.parametrize(
        ("lengths", "options", "error", "words"),
        [
            (None, {}, ValueError, "key_value_seq_lengths: got None"),
            (np.ones(3, np.int32), {}, ValueError, "key_value_seq_lengths"),
            (np.ones(2, np.float32), {}, TypeError, "key_value_seq_lengths"),
            (np.ones(2, np.int32), {"num_splits": 0}, ValueError, "num_splits: got 0"),
            (np.ones(2, np.int32), {"num_splits": 1.5}, TypeError, "num_splits"),
            (np.ones(2, np.int32), {"block_k": 0}, ValueError, "block_k: got 0"),
            (np.ones(2, np.int32), {"block_k": "large"}, ValueError, "block_k: got 'large'"),
            (np.ones(2, np.int32), {"local_window_size": -1}, ValueError, "local_window_size"),
        ],
    )
    def test_refusals_name_the_argument(self, lengths, options, error, words):
        problem = uniform(1, 8, b=2)
        with pytest.raises(error, match=words):
            jax_ops.decode_attention(problem.query, problem.key, problem.value, lengths, **options)


class TestMha:
    def test_explicit_sizes(self, backend):
        case = Case(b=1, lq=150, lkv=150, hq=4, hkv=2, d=16, causal=True, scale=0.2)
        problem = case.problem()
        check(problem, backend, case.cotangents(), entry="mha", block_q=64, block_k=64)

    def test_sizes_are_the_forward_passes_alone(self):
        """Documented: the backward kernels' tiles are others, and stay what the planner chose."""
        problem = Case(b=1, lq=150, lkv=150, hq=4, hkv=2, d=16).problem()
        arrays = problem.query, problem.key, problem.value
        plans = {}
        for sizes in ({}, {"block_q": 64, "block_k": 64, "num_splits": 2}):
            spec, operands, _ = make_problem(*arrays, **sizes)
            plans[len(sizes)] = [
                _plan.make(_libraries.load("cpu"), spec, operands, direction)
                for direction in ("fwd", "bwd")
            ]
        assert plans[0][1] == plans[3][1]
        forward = plans[3][0]
        assert (forward.block_q, forward.block_k, forward.num_splits) == (64, 64, 2)

    def test_splits(self, backend):
        case = Case(b=1, lq=2, lkv=150, hq=4, hkv=1, d=16)
        check_case(case, backend, entry="mha", num_splits=4)

    def test_grid_of_block_sizes_is_one_function(self):
        """On xla any size is allowed: tiles that do not divide the lengths, or exceed them."""
        problem = Case(b=1, lq=70, lkv=70, hq=2, hkv=1, d=8, causal=True).problem()
        call = functools.partial(
            jax_ops.mha, problem.query, problem.key, problem.value, causal=True
        )
        expected = call(implementation="xla")
        for block_q, block_k in ((1, 70), (7, 11), (64, 16), (1000, 1)):
            got = call(implementation="xla", block_q=block_q, block_k=block_k)
            np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6)

    @pytest.mark.parametrize(
        ("options", "error", "words"),
        [
            ({"block_q": 0}, ValueError, "block_q: got 0"),
            ({"block_k": -64}, ValueError, "block_k: got -64"),
            ({"block_q": 64.0}, TypeError, "block_q"),
            ({"causal": 1}, TypeError, "causal: got 1"),
        ],
    )
    def test_refusals_name_the_argument(self, options, error, words):
        problem = uniform(2, 8)
        with pytest.raises(error, match=words):
            jax_ops.mha(problem.query, problem.key, problem.value, **options)
