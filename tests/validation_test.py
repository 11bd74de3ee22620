# SPDX-License-Identifier: Apache-2.0
"""Refused arguments: the error names the argument, what it got and what is allowed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ops

Q = np.zeros((2, 5, 4, 8), np.float32)
K = np.zeros((2, 7, 2, 8), np.float32)
V = np.zeros((2, 7, 2, 6), np.float32)
KEY = jax.random.key(0)

BOTH = jax_ops.DtypeError  # raised errors are TypeErrors and ValueErrors


def call(query=Q, key=K, value=V, **options):
    return jax_ops.dot_product_attention(query, key, value, **options)


def zeros(*shape, dtype=np.float32):
    return jnp.zeros(shape, dtype)


REFUSED = [
    # options, error class, what the message must hold
    ({"query": zeros(2, 5, 4, 8, dtype=np.int32)}, BOTH, "query: got dtype int32"),
    ({"key": zeros(2, 7, 2, 8, dtype=jnp.bfloat16)}, BOTH, "key: got dtype bfloat16"),
    ({"value": zeros(2, 7, 2, 6, dtype=jnp.float16)}, BOTH, "query's dtype, float32"),
    ({"query": zeros(5, 8)}, ValueError, "query: got shape (5, 8)"),
    ({"query": zeros(5, 4, 8)}, ValueError, "key: got shape (2, 7, 2, 8)"),
    ({"query": "text"}, TypeError, "query: got str"),
    ({"key": zeros(3, 7, 2, 8)}, ValueError, "key: got batch size 3"),
    ({"value": zeros(2, 6, 2, 6)}, ValueError, "value: got length 6"),
    ({"value": zeros(2, 7, 1, 6)}, ValueError, "value: got number of heads 1"),
    ({"key": zeros(2, 7, 2, 4)}, ValueError, "key: got head dim 4"),
    ({"query": zeros(2, 5, 3, 8)}, ValueError, "query: got 3 heads with 2 key/value heads"),
    ({"query": zeros(2, 5, 4, 0), "key": zeros(2, 7, 2, 0)}, ValueError, "query: got head dim 0"),
    ({"value": zeros(2, 7, 2, 0)}, ValueError, "value: got head dim 0"),
    ({"mask": zeros(5, 7)}, BOTH, "additive values belong in `bias`"),
    ({"mask": zeros(5, 7, dtype=np.int32)}, BOTH, "mask: got dtype int32"),
    ({"mask": zeros(5, 6, dtype=bool)}, ValueError, "mask: got shape (5, 6)"),
    ({"mask": zeros(2, 2, 5, 7, dtype=bool)}, ValueError, "(2, 4, 5, 7)"),  # Hkv heads
    ({"mask": zeros(1, 2, 4, 5, 7, dtype=bool)}, ValueError, "rank 1 to 4"),
    ({"mask": zeros(dtype=bool)}, ValueError, "rank 1 to 4"),
    ({"bias": zeros(5, 7, dtype=bool)}, BOTH, "a bool mask belongs in `mask`"),
    ({"bias": zeros(5, 7, dtype=np.int32)}, BOTH, "bias: got dtype int32"),
    ({"bias": zeros(3, 5, 7)}, ValueError, "bias: got shape (3, 5, 7)"),
    ({"scale": jnp.zeros(2)}, ValueError, "scale: got shape (2,)"),
    ({"scale": jnp.zeros((), np.int32)}, BOTH, "scale: got dtype int32"),
    ({"scale": "1"}, TypeError, "scale: got '1'"),
    ({"scale": True}, TypeError, "scale: got True"),
    ({"scale": float("nan")}, ValueError, "scale: got nan"),
    ({"scale": 1e39}, ValueError, "scale: got 1e+39"),  # infinite in float32
    ({"scale": 10**400}, ValueError, "scale: got an integer too large"),
    ({"is_causal": 1}, TypeError, "is_causal: got 1"),
    ({"return_residual": "yes"}, TypeError, "return_residual: got 'yes'"),
    ({"query_seq_lengths": jnp.zeros(3, np.int32)}, ValueError, "query_seq_lengths: got shape"),
    ({"query_seq_lengths": jnp.zeros(2)}, BOTH, "query_seq_lengths: got dtype float32"),
    ({"key_value_seq_lengths": jnp.zeros(())}, BOTH, "key_value_seq_lengths"),
    ({"query_seq_lengths": [2**70, 1]}, ValueError, "query_seq_lengths: got numbers too large"),
    ({"local_window_size": -1}, ValueError, "local_window_size: got -1"),
    ({"local_window_size": (2, -3)}, ValueError, "local_window_size: got -3"),
    ({"local_window_size": (1, 2, 3)}, ValueError, "local_window_size: got (1, 2, 3)"),
    ({"local_window_size": 1.5}, TypeError, "local_window_size: got 1.5"),
    ({"local_window_size": True}, TypeError, "local_window_size: got True"),
    ({"implementation": "flash"}, ValueError, "implementation: got 'flash'"),
    ({"implementation": 3}, ValueError, "implementation: got 3"),
    ({"implementation": np.arange(2)}, ValueError, "implementation: got array([0, 1])"),
    ({"query_segment_ids": jnp.zeros((2, 5), int)}, ValueError, "key_value_segment_ids: got None"),
    ({"key_value_segment_ids": jnp.zeros((2, 7), int)}, ValueError, "without query_segment_ids"),
    ({"query_segment_ids": jnp.zeros((2, 5))}, BOTH, "query_segment_ids: got dtype float32"),
    ({"query_segment_ids": jnp.zeros((2, 6), int)}, ValueError, "query_segment_ids: got shape"),
    (
        {"query_segment_ids": [[2**32] * 5] * 2, "key_value_segment_ids": [[0] * 7] * 2},
        ValueError,
        "query_segment_ids: got the id 4294967296",
    ),
    ({"logits_soft_cap": 1e39}, ValueError, "logits_soft_cap: got 1e+39"),
    ({"logits_soft_cap": 1e-39}, ValueError, "logits_soft_cap: got 1e-39"),  # subnormal
    ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap: got 0.0"),
    ({"logits_soft_cap": -2}, ValueError, "logits_soft_cap: got -2.0"),
    ({"logits_soft_cap": jnp.ones(())}, TypeError, "logits_soft_cap: got"),
    ({"alibi_slopes": jnp.zeros(2)}, ValueError, "alibi_slopes: got shape (2,)"),
    ({"alibi_slopes": jnp.zeros(4, np.int32)}, BOTH, "alibi_slopes: got dtype int32"),
    ({"dropout_rate": 1.5, "dropout_key": KEY}, ValueError, "dropout_rate: got 1.5"),
    ({"dropout_rate": -0.1, "dropout_key": KEY}, ValueError, "dropout_rate: got -0.1"),
    ({"dropout_rate": 0.1}, ValueError, "dropout_key: got None"),
    ({"dropout_rate": 0.1, "dropout_key": jnp.zeros(2)}, BOTH, "dropout_key: got float32[2]"),
    ({"dropout_rate": 0.1, "dropout_key": jax.random.split(KEY)}, ValueError, "a single key"),
    ({"dropout_key": "seed"}, TypeError, "dropout_key: got str"),  # although the rate is 0
    ({"dropout_batch_indices": [0, 1, 2]}, ValueError, "dropout_batch_indices: got shape (3,)"),
    ({"dropout_head_indices": [0.0] * 4}, BOTH, "dropout_head_indices: got dtype float32"),
    ({"alignment": "center"}, ValueError, "alignment: got 'center'"),
    ({"precision": "fast"}, ValueError, "precision: got 'fast'"),
]


@pytest.mark.parametrize("options, error, message", REFUSED, ids=lambda x: str(x)[:40])
def test_refused_argument(options, error, message):
    with pytest.raises(error) as caught:
        call(**options)
    assert message in str(caught.value)
    assert "allowed:" in str(caught.value)
    if error is BOTH:
        assert isinstance(caught.value, TypeError)
        assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("implementation", [None, "cpu", "xla", "jax_xla"])
def test_the_same_error_for_every_implementation_and_under_jit(implementation):
    wrong = {"mask": zeros(5, 7), "implementation": implementation}
    with pytest.raises(BOTH) as eager:
        call(**wrong)
    with pytest.raises(BOTH) as traced:
        jax.eval_shape(lambda: call(**wrong))
    assert str(eager.value) == str(traced.value)


def test_traced_values_for_static_options_are_refused_by_name():
    with pytest.raises(TypeError, match="is_causal: got a traced value"):
        jax.jit(lambda causal: call(is_causal=causal))(True)
    with pytest.raises(TypeError, match="dropout_rate: got a traced value"):
        jax.jit(lambda rate: call(dropout_rate=rate, dropout_key=KEY))(0.5)


def test_what_is_accepted():
    """The other side of the refusals: each of these forms is allowed."""
    lengths = [jnp.array([3, 5], d) for d in (np.int8, np.uint8, np.int16, np.int32, np.uint32)]
    for length in lengths:
        np.testing.assert_array_equal(
            call(key_value_seq_lengths=length), call(key_value_seq_lengths=lengths[0])
        )
    for mask in (np.ones(7, bool), np.ones((5, 1), bool), np.ones((4, 1, 7), bool)):
        np.testing.assert_array_equal(call(mask=mask), call())
    for window in (2, (2, 2), [2, 2], np.int64(2)):
        np.testing.assert_array_equal(
            call(local_window_size=window), call(local_window_size=(2, 2))
        )
    np.testing.assert_array_equal(call(local_window_size=(None, None)), call())
    assert call(scale=np.float32(2)).shape == call(scale=jnp.float32(2)).shape == (2, 5, 4, 6)
    assert call(precision=jax.lax.Precision.HIGHEST).dtype == np.float32
    raw, typed = jax.random.PRNGKey(1), jax.random.key(1)
    v = np.arange(V.size, dtype=np.float32).reshape(V.shape)
    dropped = [call(value=v, dropout_rate=0.5, dropout_key=k) for k in (raw, typed)]
    np.testing.assert_array_equal(*dropped)
    assert call(dropout_rate=0.5, dropout_key=jax.random.key(0, impl="rbg")).shape == (2, 5, 4, 6)


def test_lengths_beyond_the_array_are_clamped():
    ones = np.ones_like(V)
    for lengths, wanted in (([-5, 100], [0, 1]), ([2**31 - 1, -(2**31)], [1, 0])):
        out = call(value=ones, key_value_seq_lengths=jnp.array(lengths, np.int32))
        np.testing.assert_allclose(out[:, 0, 0, 0], wanted, rtol=1e-6)
    big = call(value=ones, key_value_seq_lengths=jnp.array([2**32 - 1, 1], np.uint32))
    np.testing.assert_allclose(big[:, 0, 0, 0], [1, 1], rtol=1e-6)


@pytest.mark.parametrize("lengths", [[2**40, -(2**40)], np.array([2**32, -(2**32)])])
def test_lengths_of_64_bits_are_clamped_before_jax_would_wrap_them(lengths):
    ones = np.ones_like(V)
    out = call(value=ones, key_value_seq_lengths=lengths)
    np.testing.assert_allclose(out[:, 0, 0, 0], [1, 0], rtol=1e-6)
    for mask in (jax_ops.KeyPaddingMask(lengths), jax_ops.PrefixLMMask(lengths)):
        out = jax_ops.flex_attention(Q, K, ones, mask=mask)
        assert np.isfinite(out).all()
    whole = jax_ops.flex_attention(Q, K, ones, mask=jax_ops.KeyPaddingMask(2**40))
    np.testing.assert_allclose(whole, 1, rtol=1e-6)


@pytest.mark.parametrize("is_traced", [False, True])
def test_segment_ids_beyond_int32_stay_different(is_traced):
    """Clamped to int32, 2^31 and 2^31 + 1 would be one segment."""
    ids = np.array([[0, 0, 1, 1, 1, 2, 2]] * 2, np.uint32)
    value = np.arange(V.size, dtype=np.float32).reshape(V.shape)

    def attend(ids):
        options = {"query_segment_ids": ids[:, :5], "key_value_segment_ids": ids}
        return call(value=value, **options)

    attend_any = jax.jit(attend) if is_traced else attend
    wanted = attend(ids.astype(np.int32))
    np.testing.assert_array_equal(attend_any(jnp.asarray(ids + np.uint32(2**31))), wanted)
    with jax.enable_x64(True):
        wide = jnp.asarray(ids.astype(np.int64) + 2**40)
        np.testing.assert_array_equal(attend_any(wide), wanted)
        padding = jnp.asarray(ids.astype(np.int64) - 2**40)
        np.testing.assert_array_equal(attend_any(padding), np.zeros_like(wanted))


def test_tile_numbers_of_a_block_mask_are_checked():
    bits = np.zeros((1, 64, 2), np.uint32)
    for number in (-3, 1):
        index = np.full((1, 1, 1, 1), number, np.int32)
        with pytest.raises(ValueError, match=f"tile numbers from {number} to {number}"):
            jax_ops.flex_attention(Q, K, V, mask=jax_ops.BlockMask(index, bits, 5, 7))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.int8, np.int32])
def test_segment_ids_of_any_integer_dtype(dtype):
    ids = jnp.array([[0, 0, 1, 1, 2, 2, 3]] * 2, dtype)
    value = np.arange(V.size, dtype=np.float32).reshape(V.shape)
    options = {"query_segment_ids": ids[:, :5], "key_value_segment_ids": ids}
    wanted = call(value=value, **{k: x.astype(np.int16) for k, x in options.items()})
    np.testing.assert_array_equal(call(value=value, **options), wanted)
    assert np.abs(wanted - call(value=value)).max() > 1


def test_inputs_without_a_batch_axis():
    out, lse = call(Q[0], K[0], V[0], return_residual=True)
    assert out.shape == (5, 4, 6)
    assert lse.shape == (5, 4)
    with pytest.raises(ValueError, match="alibi_slopes: got shape"):
        call(Q[0], K[0], V[0], alibi_slopes=zeros(2, 4))
