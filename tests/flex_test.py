# SPDX-License-Identifier: Apache-2.0
"""flex_attention's biases and score functions, what it refuses, and the shapes that it takes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ops
from tests.cases import accuracy
from tests.cases.backends import XLA
from tests.cases.flex import (
    CASE,
    CAUSAL,
    KEY,
    KEY_IDS,
    PADDING,
    QUERY_IDS,
    ROW,
    check,
    lowered,
    problem_of,
    vjp,
)
from tests.cases.uniform import means, uniform


class TestBiases:
    def test_alibi_with_a_dense_bias(self, backend):
        problem = problem_of(slopes=True, bias="hqk")
        check(
            problem,
            backend,
            captured=(problem.bias, problem.slopes),
            names=("bias", "slopes"),
            bias=lambda array, slopes: jax_ops.AlibiBias(slopes) + array,
        )

    def test_distance_decay_is_alibi_with_one_slope(self, backend):
        problem = problem_of().with_arrays(slopes=np.full(4, 0.125, np.float32))
        decay = jax_ops.DistanceDecayBias(0.125)
        _, operands, _ = lowered(bias=decay)
        np.testing.assert_array_equal(operands.alibi_slopes, [[0.125] * 4])
        results, _ = vjp(
            problem,
            backend,
            lambda q, k, v: jax_ops.flex_attention(
                q, k, v, bias=decay, implementation=backend.name, return_residual=True
            ),
        )
        expected = accuracy.expected_forward(problem, tf32=backend.tf32)
        accuracy.assert_all_accurate(results, expected)

    def test_constant_moves_lse_alone(self, backend):
        problem = uniform(2, 4)
        out, lse = jax_ops.flex_attention(
            problem.query,
            problem.key,
            problem.value,
            bias=jax_ops.ConstantBias(3.0),
            implementation=backend.name,
            return_residual=True,
        )
        np.testing.assert_allclose(means(out), [[1.5, 1.5]], rtol=1e-6)
        np.testing.assert_allclose(np.ravel(lse), [3 + np.log(4)] * 2, rtol=1e-6)

    @pytest.mark.parametrize(
        ("make", "gradient"),
        [
            # lse = c + ln 4; and at i = 0, UNI with decay a: d lse / da = -(mean distance).
            (jax_ops.ConstantBias, 1.0),
            (jax_ops.DistanceDecayBias, -1.5),
        ],
    )
    def test_scalars_have_gradients(self, make, gradient):
        problem = uniform(1, 4)

        def lse(x):
            _, lse = jax_ops.flex_attention(
                problem.query,
                problem.key,
                problem.value,
                bias=make(x),
                implementation="xla",
                return_residual=True,
            )
            return lse.sum()

        np.testing.assert_allclose(jax.grad(lse)(0.0), gradient, rtol=1e-6)

    def test_terms_of_one_kind_add(self):
        bias = jax_ops.AlibiBias(np.ones(4, np.float32)) + jax_ops.DistanceDecayBias(0.5)
        bias = bias + np.ones((1, 90), np.float32) + jax_ops.ConstantBias(2.0)
        _, operands, mods = lowered(bias=bias)
        np.testing.assert_array_equal(operands.alibi_slopes, [[1.5] * 4])
        np.testing.assert_array_equal(operands.bias, np.full((1, 1, 1, 90), 3.0))
        assert mods is None

    def test_arrays_whose_sum_would_be_larger_are_added_block_by_block(self):
        """[Lq, 1] + [Lkv] would be [Lq, Lkv]: the second one becomes a function instead."""
        rng = np.random.default_rng(3)
        rows, cols = (rng.normal(size=s).astype(np.float32) for s in ((70, 1), (90,)))
        _, operands, _ = lowered(bias=jax_ops.DenseBias(rows) + cols)
        assert operands.bias.shape == (1, 1, 70, 1)
        problem = problem_of()
        call = functools.partial(
            jax_ops.flex_attention, problem.query, problem.key, problem.value, return_residual=True
        )
        results = dict(zip(("out", "lse"), call(bias=jax_ops.DenseBias(rows) + cols), strict=True))
        expected = accuracy.expected_forward(problem.with_arrays(bias=rows + cols))
        accuracy.assert_all_accurate(results, expected)

    def test_says_what_it_is(self):
        bias = jax_ops.AlibiBias(np.ones(4, np.float32)) + jax_ops.ConstantBias(2.0)
        assert repr(bias) == "AlibiBias(slopes=float32[4]) + ConstantBias(c=2.0)"
        assert repr(jax_ops.SoftCap(30.0)) == "SoftCap(cap=30.0)"


class TestScoreMod:
    def test_captured_arrays_have_true_gradients(self):
        """A learned relative position bias, table[h, clip(i - j)], captured by a function."""
        rng = np.random.default_rng(5)
        table = rng.normal(size=(4, 41)).astype(np.float32)
        place = np.clip(ROW - KEY, -20, 20) + 20
        problem = problem_of().with_arrays(bias=table[:, place])
        dout, dlse = CASE.cotangents()

        def call(query, key, value, table):
            def relative(score, b, h, q_idx, kv_idx):
                return score + table[h, jnp.clip(q_idx - kv_idx, -20, 20) + 20]

            return jax_ops.flex_attention(
                query, key, value, score_mod=relative, return_residual=True
            )

        results, gradients = vjp(problem, XLA, call, (table,))
        accuracy.assert_all_accurate(results, accuracy.expected_forward(problem))
        expected = accuracy.expected_backward(problem, dout, dlse)
        dbias = expected.pop("bias").reference
        got = dict(zip(("query", "key", "value"), gradients[:3], strict=True))
        accuracy.assert_all_accurate(got, expected)
        dtable = np.zeros((4, 41))
        np.add.at(dtable, (slice(None), place), dbias)
        np.testing.assert_allclose(gradients[3], dtable, rtol=2e-5, atol=2e-5)

    def test_arbitrary_function_against_its_formula(self):
        """Scores through sinh, with a mask: any function of the score, and its derivatives."""
        problem = problem_of()
        scale, group = 0.25, 2
        query, key, value = (
            np.asarray(x, np.float64) for x in (problem.query, problem.key, problem.value)
        )
        key, value = (np.repeat(x, group, axis=2) for x in (key, value))

        def formula(query):
            s = np.sinh(scale * np.einsum("bqhd,bkhd->bhqk", query, key))
            p = np.where(KEY <= ROW, np.exp(s), 0)
            return np.einsum("bhqk,bkhd->bqhd", p / p.sum(-1, keepdims=True), value)

        def call(query):
            return jax_ops.flex_attention(
                query,
                problem.key,
                problem.value,
                score_mod=lambda score, b, h, q_idx, kv_idx: jnp.sinh(score),
                mask=CAUSAL,
                scale=scale,
            )

        direction = np.random.default_rng(1).normal(size=query.shape)
        tangent = direction.astype(np.float32)
        out, moved = jax.jit(lambda *args: jax.jvp(call, *args))((problem.query,), (tangent,))
        np.testing.assert_allclose(out, formula(query), rtol=2e-5, atol=2e-5)
        step = 1e-6
        slope = (formula(query + step * direction) - formula(query - step * direction)) / (2 * step)
        np.testing.assert_allclose(moved, slope, rtol=1e-3, atol=1e-4)
        gradient = jax.jit(jax.grad(lambda query: call(query).sum()))(problem.query)
        np.testing.assert_allclose((gradient * direction).sum(), slope.sum(), rtol=1e-3)

    def test_indices_are_batch_query_head_and_plain_positions(self):
        problem = uniform(3, 5, b=2, hq=4, hkv=2)
        seen = jax_ops.flex_attention(
            problem.query,
            problem.key,
            problem.value,
            score_mod=lambda score, b, h, q_idx, kv_idx: (
                0 * score + jnp.where(kv_idx == (b + h + q_idx) % 5, 100.0, 0.0)
            ),
            alignment="bottom_right",
        )
        b, i, h = np.ogrid[:2, :3, :4]
        np.testing.assert_allclose(seen[..., 0], (b + h + i) % 5, atol=1e-5)

    def test_soft_cap_object_is_the_kernels_own(self, backend):
        problem = problem_of(amplitude=4.0)
        call = functools.partial(
            jax_ops.flex_attention,
            problem.query,
            problem.key,
            problem.value,
            implementation=backend.name,
        )
        capped = call(score_mod=jax_ops.SoftCap(2.0))
        np.testing.assert_array_equal(capped, call(logits_soft_cap=2.0))
        assert np.abs(np.asarray(capped) - np.asarray(call())).max() > 0.1

    def test_comes_after_the_soft_cap_and_before_the_bias(self):
        query = np.full((1, 1, 1, 1), 10.0, np.float32)
        _, lse = jax_ops.flex_attention(
            query,
            query,
            query,
            scale=1.0,
            logits_soft_cap=2.0,
            score_mod=lambda score, b, h, q_idx, kv_idx: 3 * score,
            bias=jax_ops.ConstantBias(1.0),
            return_residual=True,
        )
        np.testing.assert_allclose(lse, [[[3 * 2 * np.tanh(50.0) + 1]]], rtol=1e-6)

    def test_second_derivative(self):
        """f(a) = lse of scores a * [0, ln 3]: f'' is the variance of ln 3 under the weights."""
        query = np.ones((1, 1, 1, 1), np.float32)
        key = np.array([0, np.log(3)], np.float32).reshape(1, 2, 1, 1)

        def lse(a):
            return jax_ops.flex_attention(
                query,
                key,
                key,
                scale=1.0,
                score_mod=lambda score, b, h, q_idx, kv_idx: a * score,
                return_residual=True,
            )[1].sum()

        first, second = jax.jit(jax.value_and_grad(jax.grad(lse)))(1.0)
        np.testing.assert_allclose(first, 0.75 * np.log(3), rtol=1e-6)
        np.testing.assert_allclose(second, 0.1875 * np.log(3) ** 2, rtol=1e-5)
        both_modes = jax.jit(jax.hessian(lse))(1.0)
        np.testing.assert_allclose(both_modes, second, rtol=1e-6)

    def test_cotangents_of_empty_rows_are_not_used(self):
        """Row 0 sees nothing; NaN in its cotangent reaches no gradient."""
        query, key, value = (np.ones((1, 2, 1, 1), np.float32) for _ in range(3))

        def call(*arrays):
            return jax_ops.flex_attention(
                *arrays,
                score_mod=lambda score, b, h, q_idx, kv_idx: 2 * score,
                mask_mod=lambda b, h, q_idx, kv_idx: q_idx > 0,
            )

        _, pullback = jax.vjp(call, query, key, value)
        gradients = pullback(jnp.array([jnp.nan, 1.0]).reshape(1, 2, 1, 1))
        expected = ([0, 0], [0, 0], [0.5, 0.5])
        for got, wanted in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(np.ravel(got), wanted, atol=1e-7)

    def test_memory_of_the_gradient_grows_linearly(self):
        def temporary(length):
            shape = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.float32)
            table = jax.ShapeDtypeStruct((2, 2 * length), jnp.float32)

            def loss(query, key, value, table):
                return jax_ops.flex_attention(
                    query,
                    key,
                    value,
                    score_mod=lambda s, b, h, i, j: s + table[h, i - j + length],
                    mask=CAUSAL,
                ).sum()

            program = jax.jit(jax.grad(loss, (0, 3))).lower(shape, shape, shape, table).compile()
            return program.memory_analysis().temp_size_in_bytes

        short, long = temporary(2048), temporary(8192)
        assert long < 4.5 * short
        assert long < 8192 * 8192

    def test_may_return_a_python_number(self):
        problem = uniform(1, 4)
        _, lse = jax_ops.flex_attention(
            problem.query,
            problem.key,
            problem.value,
            score_mod=lambda score, b, h, q_idx, kv_idx: 2.0,
            return_residual=True,
        )
        np.testing.assert_allclose(lse, [[[2 + np.log(4)]]], rtol=1e-6)

    @pytest.mark.parametrize("name", ["cpu", "cuda"])
    def test_explicit_kernel_refuses_it(self, name):
        problem = uniform(1, 4)
        with pytest.raises(jax_ops.UnsupportedError, match=f"implementation='{name}'"):
            jax_ops.flex_attention(
                problem.query,
                problem.key,
                problem.value,
                score_mod=lambda score, b, h, q_idx, kv_idx: score,
                implementation=name,
            )


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "error", "words"),
        [
            ({"mask": 3}, TypeError, "mask: got int"),
            ({"mask": np.ones((4,), np.float32)}, TypeError, "mask: got dtype float32"),
            ({"mask": np.ones((3,), bool)}, ValueError, "mask: got shape"),
            ({"mask": jax_ops.KeyPaddingMask(np.ones(3, int))}, ValueError, "KeyPaddingMask"),
            ({"mask": jax_ops.KeyPaddingMask(np.ones(1))}, TypeError, "KeyPaddingMask"),
            ({"mask": jax_ops.SegmentMask(np.ones(3, int))}, ValueError, "query_segment_ids"),
            ({"mask": ~jax_ops.SegmentMask(np.ones(3, int))}, ValueError, "query_segment_ids"),
            ({"mask": jax_ops.PrefixLMMask(1.5)}, TypeError, "prefix_lengths"),
            ({"mask_mod": lambda b, h, i, j: i - j}, TypeError, "mask_mod"),
            ({"mask_mod": "causal"}, TypeError, "mask_mod: got str"),
            ({"mask_mod": np.ones(4, bool)}, TypeError, "an array belongs in `mask`"),
            ({"score_mod": 1.0}, TypeError, "score_mod: got float"),
            ({"score_mod": lambda s, b, h, i, j: i}, TypeError, "score_mod"),
            (
                {"score_mod": jax_ops.SoftCap(2.0), "logits_soft_cap": 3.0},
                ValueError,
                "score_mod",
            ),
            ({"bias": "alibi"}, TypeError, "bias: got str"),
            ({"bias": np.ones(4, bool)}, TypeError, "bias: got dtype bool"),
            ({"bias": jax_ops.AlibiBias(np.ones(3, np.float32))}, ValueError, "alibi_slopes"),
            ({"bias": jax_ops.ConstantBias(np.ones(3, np.float32))}, ValueError, "ConstantBias"),
            ({"bias": jax_ops.DistanceDecayBias(1j)}, TypeError, "DistanceDecayBias"),
            ({"block_sizes": 64}, ValueError, "block_sizes"),
            ({"block_sizes": (0, 64)}, ValueError, "block_q: got 0"),
            ({"num_splits": 0}, ValueError, "num_splits: got 0"),
            ({"alignment": "center"}, ValueError, "alignment"),
        ],
    )
    def test_names_the_argument(self, options, error, words):
        problem = uniform(2, 4, hq=2)
        with pytest.raises(error, match=words):
            jax_ops.flex_attention(problem.query, problem.key, problem.value, **options)

    def test_masks_are_no_truth_values(self):
        with pytest.raises(TypeError, match="mask"):
            bool(CAUSAL)

    @pytest.mark.parametrize(
        "make", [lambda: jax_ops.LocalWindowMask(-1), lambda: jax_ops.SoftCap(0)]
    )
    def test_objects_refuse_bad_numbers_when_made(self, make):
        with pytest.raises(ValueError, match="got"):
            make()


def test_grouped_heads_equal_repeated_ones(backend):
    problem = problem_of()
    call = functools.partial(
        jax_ops.flex_attention, mask=CAUSAL & PADDING, implementation=backend.name
    )
    grouped = call(problem.query, problem.key, problem.value)
    repeated = call(problem.query, *(np.repeat(x, 2, axis=2) for x in (problem.key, problem.value)))
    tolerance = 2e-3 if backend.tf32 else 2e-6
    np.testing.assert_allclose(grouped, repeated, rtol=tolerance, atol=tolerance)


def test_rank_three_inputs(backend):
    problem = problem_of()
    call = functools.partial(
        jax_ops.flex_attention,
        mask=CAUSAL & jax_ops.KeyPaddingMask(37) & jax_ops.SegmentMask(QUERY_IDS[0], KEY_IDS[0]),
        bias=jax_ops.AlibiBias(np.full(4, 0.1, np.float32)),
        implementation=backend.name,
        return_residual=True,
    )
    arrays = problem.query[:1], problem.key[:1], problem.value[:1]
    for batched, single in zip(call(*arrays), call(*(x[0] for x in arrays)), strict=True):
        np.testing.assert_array_equal(batched[0], single)
