# SPDX-License-Identifier: Apache-2.0
"""flex_attention's masks: objects, their operators, functions, block masks, what each lowers to."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ops
from tests.cases.flex import (
    CASE,
    CAUSAL,
    KEY,
    KEY_IDS,
    LENGTHS,
    PADDING,
    QUERY_IDS,
    ROW,
    SEGMENTS,
    WINDOW,
    check,
    lowered,
    problem_of,
    striped,
)
from tests.cases.uniform import means, uniform

_RNG = np.random.default_rng(8)
_H = np.arange(CASE.hq)[:, None, None]
_SAME = (QUERY_IDS[:, :, None] == KEY_IDS[:, None, :]) & (QUERY_IDS >= 0)[:, :, None]
_SAME = _SAME[:, None]
_DENSE = _RNG.random((2, 1, CASE.lq, CASE.lkv)) < 0.6
_DENSE_ROW = _RNG.random((4, 1, CASE.lkv)) < 0.6
_PADDED = LENGTHS[:, None, None, None] > KEY
_IN_WINDOW = (KEY >= ROW - 20) & (KEY <= ROW + 9)


def _block(mask, **sizes):
    sizes = {"batch": None, "num_heads": None, **sizes}
    return jax_ops.create_block_mask(mask, query_length=CASE.lq, key_length=CASE.lkv, **sizes)


# name -> (mask, the same as a bool array that broadcasts to [B, Hq, Lq, Lkv], terms it lowers to)
MASKS = {
    "causal": (CAUSAL, KEY <= ROW, {"causal"}),
    "window": (WINDOW, _IN_WINDOW, {"window"}),
    "left side only": (jax_ops.LocalWindowMask(3), KEY >= ROW - 3, {"window"}),
    "two windows": (
        WINDOW & jax_ops.LocalWindowMask(None, 4),
        _IN_WINDOW & (KEY <= ROW + 4),
        {"window"},
    ),
    "prefix": (
        jax_ops.PrefixLMMask(np.array([11, 50])),
        (KEY <= ROW) | (np.array([11, 50])[:, None, None, None] > KEY),
        {"causal", "prefix"},
    ),
    "prefix & causal": (jax_ops.PrefixLMMask(11) & CAUSAL, KEY <= ROW, {"causal"}),
    "causal & prefix": (CAUSAL & jax_ops.PrefixLMMask(11), KEY <= ROW, {"causal"}),
    "prefix & window": (
        jax_ops.PrefixLMMask(50) & WINDOW,
        ((KEY <= ROW) | (KEY < 50)) & _IN_WINDOW,
        {"causal", "prefix", "window"},
    ),
    "segments": (SEGMENTS, _SAME, {"segments"}),
    "padding": (PADDING, _PADDED, {"lengths"}),
    "every fused term": (
        CAUSAL & WINDOW & SEGMENTS & PADDING & jax_ops.DenseMask(_DENSE),
        (KEY <= ROW) & _IN_WINDOW & _SAME & _PADDED & _DENSE,
        {"causal", "window", "segments", "lengths", "mask"},
    ),
    "two dense": (jax_ops.DenseMask(_DENSE) & _DENSE[:1], _DENSE & _DENSE[:1], {"mask"}),
    "two dense that would grow": (
        jax_ops.DenseMask(_DENSE_ROW) & _DENSE,
        _DENSE_ROW & _DENSE,
        {"mask", "block"},
    ),
    "not dense": (~jax_ops.DenseMask(_DENSE_ROW), ~_DENSE_ROW, {"mask"}),
    "dense or dense": (
        jax_ops.DenseMask(_DENSE_ROW) | _DENSE_ROW[:1],
        _DENSE_ROW | _DENSE_ROW[:1],
        {"mask"},
    ),
    "not causal": (~CAUSAL, ~(KEY <= ROW), {"block"}),
    "or": (CAUSAL | WINDOW, (KEY <= ROW) | _IN_WINDOW, {"block"}),
    "xor of three": (
        CAUSAL ^ WINDOW ^ SEGMENTS,
        (KEY <= ROW) ^ _IN_WINDOW ^ _SAME,
        {"block"},
    ),
    "nested": (
        PADDING & ~(CAUSAL & (WINDOW | SEGMENTS)),
        _PADDED & ~((KEY <= ROW) & (_IN_WINDOW | _SAME)),
        {"lengths", "block"},
    ),
    "two segment masks": (
        SEGMENTS & jax_ops.SegmentMask(QUERY_IDS[0] % 2, KEY_IDS[0] % 2),
        _SAME & ((QUERY_IDS[0] % 2)[:, None] == (KEY_IDS[0] % 2)),
        {"segments", "block"},
    ),
    "function": (striped, striped(0, _H, ROW, KEY), {"block"}),
    "causal & function": (
        CAUSAL & striped,
        (KEY <= ROW) & striped(0, _H, ROW, KEY),
        {"causal", "block"},
    ),
    "block": (_block(striped, num_heads=4), striped(0, _H, ROW, KEY), {"block"}),
    "block & function": (
        _block(SEGMENTS, batch=2) & striped,
        _SAME & striped(0, _H, ROW, KEY),
        {"block"},
    ),
}
# These go through every kernel; the others differ from them in what they lower to, if at all.
RUN = ("two windows", "prefix & window", "every fused term", "nested", "block & function")


class TestMasks:
    @pytest.mark.parametrize("name", RUN)
    def test_results_and_gradients(self, backend, name):
        mask, dense, _ = MASKS[name]
        dense = np.broadcast_to(dense, (2, 4, CASE.lq, CASE.lkv))
        check(problem_of().with_arrays(mask=dense), backend, mask=mask)

    @pytest.mark.parametrize("name", MASKS)
    def test_becomes_the_terms_that_kernels_have(self, name):
        mask, _, terms = MASKS[name]
        spec, operands, mods = lowered(mask)
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
        got = mask(np.arange(2)[:, None, None, None], _H, ROW, KEY)
        shape = (2, 4, CASE.lq, CASE.lkv)
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
        mask = (CAUSAL & jax_ops.LocalWindowMask(3, None)) | ~jax_ops.SegmentMask(QUERY_IDS)
        left = "(CausalMask() & LocalWindowMask(left=3))"
        assert repr(mask) == left + " | ~SegmentMask(query_segment_ids=int64[2, 70])"
        assert repr(CAUSAL & striped) == "CausalMask() & FunctionMask(striped)"
        assert repr(~(CAUSAL ^ CAUSAL)) == "~(CausalMask() ^ CausalMask())"
        assert "batch 1, heads 4" in repr(MASKS["block"][0])

    def test_is_a_frozen_pytree(self):
        mask = CAUSAL & PADDING
        (lengths,) = jax.tree.leaves(mask)
        assert lengths is LENGTHS
        doubled = jax.tree.map(lambda x: 2 * x, mask)
        np.testing.assert_array_equal(doubled.terms[1].lengths, 2 * LENGTHS)
        with pytest.raises(dataclasses.FrozenInstanceError):
            PADDING.lengths = 3
        assert jax_ops.CausalMask() == CAUSAL

    def test_as_an_argument_of_jit_does_not_retrace(self):
        problem, count = problem_of(), 0

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

    def test_a_function_runs_fused_beside_traced_lengths(self):
        """Aligned by them too: the function itself knows nothing of the alignment."""
        problem = uniform(2, 8, b=2)

        @jax.jit
        def call(lengths):
            return jax_ops.flex_attention(
                problem.query,
                problem.key,
                problem.value,
                mask=CAUSAL & jax_ops.KeyPaddingMask(lengths),
                mask_mod=lambda b, h, q_idx, kv_idx: kv_idx > 0,
                alignment="bottom_right",
                implementation="cpu",
            )

        np.testing.assert_allclose(means(call(jnp.array([3, 8]))), [[1, 1.5], [3.5, 4]], rtol=1e-6)

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
