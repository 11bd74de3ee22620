# SPDX-License-Identifier: Apache-2.0
"""flex_attention: mask and bias objects, functions, block masks, and what each lowers to."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ops
from jax_ops import flex
from jax_ops._problem import make_problem
from tests.cases import accuracy
from tests.cases.backends import XLA
from tests.cases.case import Case
from tests.cases.problem import Problem
from tests.cases.uniform import means, uniform

_CASE = Case(b=2, lq=70, lkv=90, hq=4, hkv=2, d=16)
_I, _J = np.arange(_CASE.lq)[:, None], np.arange(_CASE.lkv)
_H = np.arange(_CASE.hq)[:, None, None]
_RNG = np.random.default_rng(7)
_QUERY_IDS = np.sort(_RNG.integers(-1, 3, (2, _CASE.lq)), axis=1)
_KEY_IDS = np.sort(_RNG.integers(-1, 3, (2, _CASE.lkv)), axis=1)
_SAME = (_QUERY_IDS[:, :, None] == _KEY_IDS[:, None, :]) & (_QUERY_IDS >= 0)[:, :, None]
_SAME = _SAME[:, None]
_DENSE = _RNG.random((2, 1, _CASE.lq, _CASE.lkv)) < 0.6
_ROW = _RNG.random((4, 1, _CASE.lkv)) < 0.6
_LENGTHS = np.array([37, 90])
_PADDED = _LENGTHS[:, None, None, None] > _J


def striped(b, h, q_idx, kv_idx):
    return (q_idx // 24 + 2 * kv_idx // 24 + h) % 3 != 0


def _block(mask, **sizes):
    sizes = {"batch": None, "num_heads": None, **sizes}
    return jax_ops.create_block_mask(mask, query_length=_CASE.lq, key_length=_CASE.lkv, **sizes)


CAUSAL = jax_ops.CausalMask()
WINDOW = jax_ops.LocalWindowMask(20, 9)
_IN_WINDOW = (_J >= _I - 20) & (_J <= _I + 9)
SEGMENTS = jax_ops.SegmentMask(_QUERY_IDS, _KEY_IDS)
PADDING = jax_ops.KeyPaddingMask(_LENGTHS)

# name -> (mask, the same as a bool array that broadcasts to [B, Hq, Lq, Lkv], terms it lowers to)
MASKS = {
    "causal": (CAUSAL, _J <= _I, {"causal"}),
    "window": (WINDOW, _IN_WINDOW, {"window"}),
    "left side only": (jax_ops.LocalWindowMask(3), _J >= _I - 3, {"window"}),
    "two windows": (
        WINDOW & jax_ops.LocalWindowMask(None, 4),
        _IN_WINDOW & (_J <= _I + 4),
        {"window"},
    ),
    "prefix": (
        jax_ops.PrefixLMMask(np.array([11, 50])),
        (_J <= _I) | (np.array([11, 50])[:, None, None, None] > _J),
        {"causal", "prefix"},
    ),
    "prefix & causal": (jax_ops.PrefixLMMask(11) & CAUSAL, _J <= _I, {"causal"}),
    "causal & prefix": (CAUSAL & jax_ops.PrefixLMMask(11), _J <= _I, {"causal"}),
    "prefix & window": (
        jax_ops.PrefixLMMask(50) & WINDOW,
        ((_J <= _I) | (_J < 50)) & _IN_WINDOW,
        {"causal", "prefix", "window"},
    ),
    "segments": (SEGMENTS, _SAME, {"segments"}),
    "padding": (PADDING, _PADDED, {"lengths"}),
    "every fused term": (
        CAUSAL & WINDOW & SEGMENTS & PADDING & jax_ops.DenseMask(_DENSE),
        (_J <= _I) & _IN_WINDOW & _SAME & _PADDED & _DENSE,
        {"causal", "window", "segments", "lengths", "mask"},
    ),
    "two dense": (jax_ops.DenseMask(_DENSE) & _DENSE[:1], _DENSE & _DENSE[:1], {"mask"}),
    "two dense that would grow": (
        jax_ops.DenseMask(_ROW) & _DENSE,
        _ROW & _DENSE,
        {"mask", "block"},
    ),
    "not dense": (~jax_ops.DenseMask(_ROW), ~_ROW, {"mask"}),
    "dense or dense": (jax_ops.DenseMask(_ROW) | _ROW[:1], _ROW | _ROW[:1], {"mask"}),
    "not causal": (~CAUSAL, ~(_J <= _I), {"block"}),
    "or": (CAUSAL | WINDOW, (_J <= _I) | _IN_WINDOW, {"block"}),
    "xor of three": (
        CAUSAL ^ WINDOW ^ SEGMENTS,
        (_J <= _I) ^ _IN_WINDOW ^ _SAME,
        {"block"},
    ),
    "nested": (
        PADDING & ~(CAUSAL & (WINDOW | SEGMENTS)),
        _PADDED & ~((_J <= _I) & (_IN_WINDOW | _SAME)),
        {"lengths", "block"},
    ),
    "two segment masks": (
        SEGMENTS & jax_ops.SegmentMask(_QUERY_IDS[0] % 2, _KEY_IDS[0] % 2),
        _SAME & ((_QUERY_IDS[0] % 2)[:, None] == (_KEY_IDS[0] % 2)),
        {"segments", "block"},
    ),
    "function": (striped, striped(0, _H, _I, _J), {"block"}),
    "causal & function": (
        CAUSAL & striped,
        (_J <= _I) & striped(0, _H, _I, _J),
        {"causal", "block"},
    ),
    "block": (_block(striped, num_heads=4), striped(0, _H, _I, _J), {"block"}),
    "block & function": (
        _block(SEGMENTS, batch=2) & striped,
        _SAME & striped(0, _H, _I, _J),
        {"block"},
    ),
}
# These go through every kernel; the others differ from them in what they lower to, if at all.
RUN = ("two windows", "prefix & window", "every fused term", "nested", "block & function")


def _problem(**changes) -> Problem:
    return dataclasses.replace(_CASE, **changes).problem()


def _vjp(problem, backend, call, captured=()):
    """Results and gradients of call(query, key, value, *captured), checked to run on `backend`."""
    arrays = [jnp.asarray(x) for x in (problem.query, problem.key, problem.value, *captured)]
    dout, dlse = _CASE.cotangents()

    def both(arrays, dout, dlse):
        results, pullback = jax.vjp(call, *arrays)
        return results, pullback((dout, dlse))

    program = jax.jit(both).lower(arrays, dout, dlse).compile()
    backend.assert_ran(program.as_text())
    (out, lse), gradients = program(arrays, dout, dlse)
    return {"out": np.asarray(out), "lse": np.asarray(lse)}, [np.asarray(g) for g in gradients]


def _check(problem, backend, captured=(), names=(), **options):
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

    results, gradients = _vjp(problem, backend, call, captured)
    tf32 = backend.tf32
    accuracy.assert_all_accurate(results, accuracy.expected_forward(problem, tf32=tf32))
    expected = accuracy.expected_backward(problem, *_CASE.cotangents(), tf32=tf32)
    got = dict(zip(("query", "key", "value", *names), gradients, strict=True))
    accuracy.assert_all_accurate(got, expected)


def _lowered(mask=None, bias=None, **options):
    """The spec and operands that a mask and a bias become, and the functions that are left."""
    problem = _problem()
    base = make_problem(problem.query, problem.key, problem.value, **options)
    (spec, operands, _), mods = flex._lower(base, None, None, mask, bias)
    return spec, operands, mods


class TestMasks:
    @pytest.mark.parametrize("name", RUN)
    def test_results_and_gradients(self, backend, name):
        mask, dense, _ = MASKS[name]
        dense = np.broadcast_to(dense, (2, 4, _CASE.lq, _CASE.lkv))
        _check(_problem().with_arrays(mask=dense), backend, mask=mask)

    @pytest.mark.parametrize("name", MASKS)
    def test_becomes_the_terms_that_kernels_have(self, name):
        mask, _, terms = MASKS[name]
        spec, operands, mods = _lowered(mask)
        present = {
            "causal": spec.causal,
            "window": spec.has_window,
            "prefix": operands.prefix_lengths is not None,
            "segments": operands.query_segments is not None,
            "lengths": operands.kv_lengths is not None,
            "mask": operands.mask is not None,
            "block": operands.block_index is not None,
        }
        assert {term for term, is_there in present.items() if is_there} == terms
        assert mods is None

    @pytest.mark.parametrize("name", MASKS)
    def test_is_a_function_of_indices(self, name):
        mask, dense, _ = MASKS[name]
        mask = mask if isinstance(mask, jax_ops.Mask) else jax_ops.FunctionMask(mask)
        got = mask(np.arange(2)[:, None, None, None], _H, _I, _J)
        shape = (2, 4, _CASE.lq, _CASE.lkv)
        np.testing.assert_array_equal(np.broadcast_to(got, shape), np.broadcast_to(dense, shape))

    def test_mask_and_mask_mod_must_both_allow(self, backend):
        problem = uniform(1, 8)
        out = jax_ops.flex_attention(
            problem.query,
            problem.key,
            problem.value,
            scale=1.0,
            mask=jax_ops.KeyPaddingMask(6),
            mask_mod=lambda b, h, q_idx, kv_idx: kv_idx >= 3,
            implementation=backend.name,
        )
        np.testing.assert_allclose(means(out), [[4.0]], rtol=1e-6)

    @pytest.mark.parametrize(
        ("mask", "expected"),
        [
            (CAUSAL & jax_ops.KeyPaddingMask(np.array([3, 8])), [[0.5, 1.0], [3.0, 3.5]]),
            (CAUSAL, [[3.0, 3.5], [3.0, 3.5]]),
            (
                CAUSAL & jax_ops.LocalWindowMask(1, 0) & jax_ops.KeyPaddingMask(np.array([3, 8])),
                [[0.5, 1.5], [5.5, 6.5]],
            ),
            # Not a term of the outermost `&`: the array's length aligns. Row 0 stands at 6.
            (CAUSAL & ~jax_ops.KeyPaddingMask(np.array([3, 6])), [[4.5, 5.0], [6.0, 6.5]]),
            (
                (CAUSAL | CAUSAL) & jax_ops.KeyPaddingMask(np.array([3, 8])),
                [[0.5, 1.0], [3.0, 3.5]],
            ),
        ],
    )
    def test_bottom_right_alignment(self, backend, mask, expected):
        problem = uniform(2, 8, b=2)
        out = jax_ops.flex_attention(
            problem.query,
            problem.key,
            problem.value,
            scale=1.0,
            mask=mask,
            alignment="bottom_right",
            implementation=backend.name,
        )
        np.testing.assert_allclose(means(out), expected, rtol=1e-6)

    def test_says_what_it_is(self):
        mask = (CAUSAL & jax_ops.LocalWindowMask(3, None)) | ~jax_ops.SegmentMask(_QUERY_IDS)
        left = "(CausalMask() & LocalWindowMask(left=3))"
        assert repr(mask) == left + " | ~SegmentMask(query_segment_ids=int64[2, 70])"
        assert repr(CAUSAL & striped) == "CausalMask() & FunctionMask(striped)"
        assert repr(~(CAUSAL ^ CAUSAL)) == "~(CausalMask() ^ CausalMask())"
        assert "batch 1, heads 4" in repr(MASKS["block"][0])

    def test_is_a_frozen_pytree(self):
        mask = CAUSAL & PADDING
        (lengths,) = jax.tree.leaves(mask)
        assert lengths is _LENGTHS
        doubled = jax.tree.map(lambda x: 2 * x, mask)
        np.testing.assert_array_equal(doubled.terms[1].lengths, 2 * _LENGTHS)
        with pytest.raises(dataclasses.FrozenInstanceError):
            PADDING.lengths = 3
        assert jax_ops.CausalMask() == CAUSAL

    def test_as_an_argument_of_jit_does_not_retrace(self):
        problem, count = _problem(), 0

        @jax.jit
        def call(mask):
            nonlocal count
            count += 1
            return jax_ops.flex_attention(
                problem.query, problem.key, problem.value, mask=mask, implementation="xla"
            )

        outs = [call(CAUSAL & jax_ops.KeyPaddingMask(jnp.array(n))) for n in ([5, 6], [90, 7])]
        assert count == 1
        assert np.abs(np.asarray(outs[0]) - np.asarray(outs[1])).max() > 0.1

    def test_traced_values_in_a_mask_that_is_no_kernel_term_run_on_xla(self):
        problem = uniform(1, 8)

        def call(n):
            return jax_ops.flex_attention(
                problem.query,
                problem.key,
                problem.value,
                scale=1.0,
                mask_mod=lambda b, h, q_idx, kv_idx: kv_idx >= n,
            )

        np.testing.assert_allclose(means(jax.jit(call)(5)), [[6.0]], rtol=1e-6)
        outs = jax.vmap(call)(jnp.array([5, 6]))
        np.testing.assert_allclose(np.asarray(outs).ravel(), [6.0, 6.5], rtol=1e-6)


class TestBlockMask:
    @pytest.mark.parametrize("sizes", [(1, 1), (65, 130), (130, 63)])
    def test_holds_the_mask(self, sizes):
        lq, lkv = sizes
        made = jax_ops.create_block_mask(striped, 2, 3, lq, lkv)
        expected = striped(0, np.arange(3)[:, None, None], np.arange(lq)[:, None], np.arange(lkv))
        np.testing.assert_array_equal(made.to_dense(), expected[None])

    def test_knows_empty_and_full_tiles_and_stores_equal_ones_once(self):
        made = jax_ops.create_block_mask(CAUSAL, 3, 5, 256, 256)
        index = np.asarray(made.index)
        assert index.shape == (1, 1, 4, 4)
        rows, cols = np.indices((4, 4))
        np.testing.assert_array_equal(index[0, 0] == -1, cols > rows)
        np.testing.assert_array_equal(index[0, 0] == -2, cols < rows)
        assert made.bits.shape == (1, 64, 2)
        assert made.visited == 10 / 16

    def test_tiles_that_end_with_the_sequence_can_be_full(self):
        made = jax_ops.create_block_mask(lambda b, h, i, j: j >= 0, None, None, 70, 90)
        assert np.all(np.asarray(made.index) == -2)
        assert made.bits.shape == (0, 64, 2)

    def test_is_made_once_and_used_with_other_arguments(self, backend):
        made = jax_ops.create_block_mask(lambda b, h, i, j: j % 3 == 0, None, None, 1, 9)
        problem = uniform(1, 9, b=2)
        for cap in (None, 5.0):
            out = jax_ops.flex_attention(
                problem.query,
                problem.key,
                problem.value,
                scale=1.0,
                mask=made,
                logits_soft_cap=cap,
                implementation=backend.name,
            )
            np.testing.assert_allclose(means(out), [[3.0], [3.0]], rtol=1e-6)

    def test_may_be_an_argument_of_jit(self):
        problem = uniform(1, 9)
        made = jax_ops.create_block_mask(lambda b, h, i, j: j > 4, None, None, 1, 9)

        @jax.jit
        def call(mask):
            return jax_ops.flex_attention(
                problem.query, problem.key, problem.value, mask=mask, implementation="xla"
            )

        np.testing.assert_allclose(means(call(made)), [[6.5]], rtol=1e-6)

    @pytest.mark.parametrize(
        "transform", [jax.jit, jax.grad, lambda f: lambda n: jax.vmap(f)(n[None])]
    )
    def test_refuses_traced_values(self, transform):
        def make(n):
            jax_ops.create_block_mask(lambda b, h, i, j: j > n, None, None, 64, 64)

        with pytest.raises(TypeError, match="mask_mod: got a mask that depends on traced values"):
            transform(make)(jnp.float32(3))

    def test_refuses_other_lengths(self):
        problem = uniform(2, 9)
        made = jax_ops.create_block_mask(CAUSAL, None, None, 2, 8)
        with pytest.raises(ValueError, match=r"block_mask: got one made for lengths \(2, 8\)"):
            jax_ops.flex_attention(problem.query, problem.key, problem.value, mask=made)

    @pytest.mark.parametrize(
        ("name", "value", "error"),
        [
            ("batch", -1, ValueError),
            ("num_heads", 1.5, TypeError),
            ("query_length", None, TypeError),
            ("key_length", -3, ValueError),
        ],
    )
    def test_refuses_bad_sizes(self, name, value, error):
        sizes = {"batch": 1, "num_heads": 1, "query_length": 4, "key_length": 4, name: value}
        with pytest.raises(error, match=name):
            jax_ops.create_block_mask(CAUSAL, **sizes)


class TestBiases:
    def test_alibi_with_a_dense_bias(self, backend):
        problem = _problem(slopes=True, bias="hqk")
        _check(
            problem,
            backend,
            captured=(problem.bias, problem.slopes),
            names=("bias", "slopes"),
            bias=lambda array, slopes: jax_ops.AlibiBias(slopes) + array,
        )

    def test_distance_decay_is_alibi_with_one_slope(self, backend):
        problem = _problem().with_arrays(slopes=np.full(4, 0.125, np.float32))
        decay = jax_ops.DistanceDecayBias(0.125)
        _, operands, _ = _lowered(bias=decay)
        np.testing.assert_array_equal(operands.alibi_slopes, [[0.125] * 4])
        results, _ = _vjp(
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
        _, operands, mods = _lowered(bias=bias)
        np.testing.assert_array_equal(operands.alibi_slopes, [[1.5] * 4])
        np.testing.assert_array_equal(operands.bias, np.full((1, 1, 1, 90), 3.0))
        assert mods is None

    def test_arrays_whose_sum_would_be_larger_are_added_block_by_block(self):
        """[Lq, 1] + [Lkv] would be [Lq, Lkv]: the second one becomes a function instead."""
        rng = np.random.default_rng(3)
        rows, cols = (rng.normal(size=s).astype(np.float32) for s in ((70, 1), (90,)))
        _, operands, _ = _lowered(bias=jax_ops.DenseBias(rows) + cols)
        assert operands.bias.shape == (1, 1, 70, 1)
        problem = _problem()
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
        place = np.clip(_I - _J, -20, 20) + 20
        problem = _problem().with_arrays(bias=table[:, place])
        dout, dlse = _CASE.cotangents()

        def call(query, key, value, table):
            def relative(score, b, h, q_idx, kv_idx):
                return score + table[h, jnp.clip(q_idx - kv_idx, -20, 20) + 20]

            return jax_ops.flex_attention(
                query, key, value, score_mod=relative, return_residual=True
            )

        results, gradients = _vjp(problem, XLA, call, (table,))
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
        problem = _problem()
        scale, group = 0.25, 2
        query, key, value = (
            np.asarray(x, np.float64) for x in (problem.query, problem.key, problem.value)
        )
        key, value = (np.repeat(x, group, axis=2) for x in (key, value))

        def formula(query):
            s = np.sinh(scale * np.einsum("bqhd,bkhd->bhqk", query, key))
            p = np.where(_J <= _I, np.exp(s), 0)
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
        problem = _problem(amplitude=4.0)
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
    problem = _problem()
    call = functools.partial(
        jax_ops.flex_attention, mask=CAUSAL & PADDING, implementation=backend.name
    )
    grouped = call(problem.query, problem.key, problem.value)
    repeated = call(problem.query, *(np.repeat(x, 2, axis=2) for x in (problem.key, problem.value)))
    tolerance = 2e-3 if backend.tf32 else 2e-6
    np.testing.assert_allclose(grouped, repeated, rtol=tolerance, atol=tolerance)


def test_rank_three_inputs(backend):
    problem = _problem()
    call = functools.partial(
        jax_ops.flex_attention,
        mask=CAUSAL & jax_ops.KeyPaddingMask(37) & jax_ops.SegmentMask(_QUERY_IDS[0], _KEY_IDS[0]),
        bias=jax_ops.AlibiBias(np.full(4, 0.1, np.float32)),
        implementation=backend.name,
        return_residual=True,
    )
    arrays = problem.query[:1], problem.key[:1], problem.value[:1]
    for batched, single in zip(call(*arrays), call(*(x[0] for x in arrays)), strict=True):
        np.testing.assert_array_equal(batched[0], single)
