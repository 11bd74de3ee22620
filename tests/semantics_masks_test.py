# SPDX-License-Identifier: Apache-2.0
"""Rules 4 to 7: bool masks, bias, segments and lengths, alone and together."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jax_ops
from tests.cases import run
from tests.cases.case import Case
from tests.cases.check import check, check_case
from tests.cases.problem import Problem
from tests.cases.uniform import means, uniform

_CASE = Case(b=2, lq=33, lkv=40, hq=4, hkv=2, d=16)


class TestMask:
    @pytest.mark.parametrize("axes", ["k", "qk", "q1", "1k", "hqk", "h1k", "b111", "11qk", "bhqk"])
    def test_every_rank_and_broadcast(self, backend, axes):
        check_case(dataclasses.replace(_CASE, mask=axes), backend)

    def test_combines_with_every_other_term_as_a_boolean(self, backend):
        case = dataclasses.replace(
            _CASE,
            lq=40,
            mask="bhqk",
            causal=True,
            bottom_right=True,
            window=(25, None),
            query_lengths=(40, 31),
            key_lengths=(38, 40),
            segments=2,
            bias="h1k",
        )
        check_case(case, backend)

    def test_heads_are_query_heads(self, backend):
        """A mask per query head, under GQA: the heads of one group differ."""
        mask = np.arange(4)[:, None, None] >= np.arange(4)[None, None, :]
        out = run.forward(uniform(1, 4, hq=4, hkv=2, mask=mask), backend)["out"]
        np.testing.assert_allclose(out[0, 0, :, 0], [0, 0.5, 1, 1.5], rtol=1e-6)


class TestBias:
    @pytest.mark.parametrize("axes", ["k", "qk", "q1", "1hq1", "h1k", "b111", "1111", "bhqk"])
    def test_every_rank_and_broadcast_with_its_own_gradient(self, backend, axes):
        check_case(dataclasses.replace(_CASE, bias=axes), backend)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("bias_dtype", ["float32", "bfloat16", "float16"])
    def test_any_float_dtype_with_any_input_dtype(self, backend, dtype, bias_dtype):
        case = dataclasses.replace(_CASE, dtype=dtype, bias="1hqk", bias_dtype=bias_dtype)
        check_case(case, backend)

    def test_is_added_in_float32(self, backend):
        """A bias difference that bfloat16 would lose beside 256 still shows."""
        bias = np.array([256, 256.5], np.float32)
        problem = uniform(1, 2, dtype="bfloat16", bias=bias)
        out = run.forward(problem, backend)["out"]
        weight = 1 / (1 + np.exp(-0.5))
        np.testing.assert_allclose(means(out), [[weight]], rtol=2**-8)
        np.testing.assert_allclose(
            run.forward(problem, backend)["lse"].ravel(), 256.5 + np.log1p(np.exp(-0.5)), rtol=1e-6
        )

    def test_minus_infinity_acts_as_a_mask(self, backend):
        problem = dataclasses.replace(_CASE, bias="1hqk").problem()
        masked = np.random.default_rng(1).random(problem.bias.shape) < 0.3
        bias = np.where(masked, -np.inf, problem.bias).astype(np.float32)
        problem = problem.with_arrays(bias=bias)
        _, gradients = check(problem, backend, _CASE.cotangents())
        assert (gradients["bias"][masked] == 0).all()

    @pytest.mark.parametrize("shift", [-3e4, 3e4])
    def test_a_constant_shift_moves_lse_alone(self, backend, shift):
        problem = uniform(3, 5, bias=np.full((1, 1), shift, np.float32))
        got = run.forward(problem, backend)
        np.testing.assert_allclose(means(got["out"])[0], [2, 2, 2], rtol=1e-6)
        np.testing.assert_allclose(got["lse"].ravel(), np.log(5) + shift, rtol=1e-6)


class TestSegments:
    @pytest.mark.parametrize("segments", [2, 5, -3])
    def test_packed(self, backend, segments):
        check_case(dataclasses.replace(_CASE, lq=40, segments=segments), backend)

    def test_separate_query_and_key_ids(self, backend):
        check_case(dataclasses.replace(_CASE, segments=-3), backend)

    def test_query_ids_alone_serve_both(self, backend):
        case = dataclasses.replace(_CASE, lq=40, segments=-3)
        problem = case.problem()
        check(problem.with_arrays(key_segments=None), backend, case.cotangents())

    def test_ids_need_no_order_and_negative_ids_attend_nothing(self, backend):
        q_ids = np.array([[7, -1, 0, 2**30, 7]], np.int32)
        kv_ids = np.array([[7, -1, 2**30, 7, 0, 7, -5]], np.int32)
        got = run.forward(uniform(5, 7, query_segments=q_ids, key_segments=kv_ids), backend)
        np.testing.assert_allclose(means(got["out"])[0], [8 / 3, 0, 4, 2, 8 / 3], rtol=1e-6)
        assert got["lse"][0, 1, 0] == -np.inf

    def test_packing_equals_separate_calls(self, backend):
        """Two sequences in one row, or one after the other: the same numbers."""
        packed = dataclasses.replace(_CASE, b=1, lq=40, causal=True).problem()
        ids = np.repeat(np.array([[0, 1]], np.int32), [23, 17], axis=1)
        got = run.forward(packed.with_arrays(query_segments=ids, key_segments=ids), backend)
        for part in (slice(0, 23), slice(23, 40)):
            alone = Problem(
                packed.query[:, part], packed.key[:, part], packed.value[:, part], causal=True
            )
            expected = run.forward(alone, backend)
            tolerance = 2e-3 if backend.tf32 else 2e-6
            for name in ("out", "lse"):
                np.testing.assert_allclose(got[name][:, part], expected[name], atol=tolerance)


class TestLengths:
    @pytest.mark.parametrize("which", ["query_lengths", "key_lengths"])
    def test_each_works_alone(self, backend, which):
        check_case(dataclasses.replace(_CASE, **{which: (31, 9)}), backend)

    @pytest.mark.parametrize("dtype", [np.int32, np.int8, np.uint32, np.int16])
    def test_any_integer_dtype(self, backend, dtype):
        lengths = np.array([2, 5], dtype)
        got = run.forward(uniform(1, 6, b=2, key_lengths=lengths), backend)["out"]
        np.testing.assert_allclose(means(got)[:, 0], [0.5, 2], rtol=1e-6)

    def test_are_clamped(self, backend):
        lengths = np.array([-4, 99], np.int32)
        got = run.forward(uniform(2, 6, b=2, key_lengths=lengths, query_lengths=lengths), backend)
        np.testing.assert_allclose(means(got["out"]), [[0, 0], [2.5, 2.5]], rtol=1e-6)
        assert (got["lse"][0] == -np.inf).all()

    def test_rank_three_inputs_take_one_length(self, backend):
        p = uniform(2, 6)
        out, lse = jax_ops.dot_product_attention(
            jnp.asarray(p.query[0]),
            jnp.asarray(p.key[0]),
            jnp.asarray(p.value[0]),
            scale=1.0,
            key_value_seq_lengths=jnp.array([4]),
            query_seq_lengths=jnp.array([1]),
            implementation=backend.name,
            return_residual=True,
        )
        np.testing.assert_allclose(out[:, 0, 0], [1.5, 0], rtol=1e-6)
        np.testing.assert_allclose(lse[:, 0], [np.log(4), -np.inf], rtol=1e-6)

    def test_new_values_do_not_retrace(self, backend):
        """One program serves every length: the lengths are operands."""
        run._compiled.cache_clear()
        case = dataclasses.replace(_CASE, key_lengths=(0, 0))
        for lengths in [(40, 1), (0, 33), (17, 18)]:
            problem = case.problem().with_arrays(key_lengths=np.array(lengths, np.int32))
            check(problem, backend, case.cotangents())
        assert run._compiled.cache_info().misses == 1


class TestPrefix:
    def test_keys_of_the_prefix_are_open_to_all(self, backend):
        case = dataclasses.replace(_CASE, causal=True, prefix=(7, 0))
        for prefix in [(7, 0), (40, 33), (1, 100)]:
            problem = case.problem().with_arrays(prefix=np.array(prefix, np.int32))
            check(problem, backend, case.cotangents(), entry="prefix_mask")
