# SPDX-License-Identifier: Apache-2.0
"""The attention_fn for Flax: real nnx and linen modules give what their own attention gives."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_ops

_X = np.random.default_rng(0).normal(size=(2, 12, 16)).astype(np.float32)


@pytest.fixture(autouse=True)
def _true_float32():
    """Flax's own attention is true float32 on a CPU; backends with tf32 are asked for the same."""
    with jax.default_matmul_precision("highest"):
        yield


def _nnx(attention_fn=None, **options):
    options = {"num_heads": 4, "in_features": 16, "decode": False, "rngs": nnx.Rngs(0), **options}
    if attention_fn is not None:
        options["attention_fn"] = attention_fn
    return nnx.MultiHeadAttention(**options)


def _linen(attention_fn=None, **options):
    options = {"num_heads": 4, **options}
    if attention_fn is not None:
        options["attention_fn"] = attention_fn
    return nn.MultiHeadDotProductAttention(**options)


def _masks():
    rng = np.random.default_rng(1)
    causal = nn.make_causal_mask(np.ones((2, 12)))  # float32, as Flax makes it
    keys = rng.random((2, 1, 1, 12)) < 0.7
    keys[..., 0] = True
    return {"none": None, "causal": causal, "bool": keys, "both": nn.combine_masks(causal, keys)}


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "both"])
def test_nnx_module_and_its_gradients(backend, mask):
    mask = _masks()[mask]
    ours = _nnx(jax_ops.flax_attention_fn(implementation=backend.name))
    theirs = _nnx()

    def loss(module, x):
        return (module(x, mask=mask) * jnp.cos(jnp.arange(16))).sum()

    for call in (lambda m: m(_X, mask=mask), lambda m: nnx.grad(loss, argnums=1)(m, _X)):
        np.testing.assert_allclose(call(ours), call(theirs), rtol=3e-5, atol=3e-5)
    got, expected = (jax.tree.leaves(nnx.grad(loss)(m, _X)) for m in (ours, theirs))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("mask", ["none", "both"])
def test_linen_module(backend, mask):
    mask = _masks()[mask]
    ours = _linen(jax_ops.flax_attention_fn(implementation=backend.name))
    variables = ours.init(jax.random.key(0), _X)
    got, expected = (m.apply(variables, _X, mask=mask) for m in (ours, _linen()))
    np.testing.assert_allclose(got, expected, rtol=3e-5, atol=3e-5)


def test_nnx_is_causal():
    fn = jax_ops.flax_attention_fn()
    query = jnp.zeros((1, 3, 1, 1))
    value = jnp.arange(3.0).reshape(1, 3, 1, 1)
    np.testing.assert_allclose(fn(query, query, value, is_causal=True).ravel(), [0, 0.5, 1])


def test_cached_decoding_of_both_libraries():
    """Flax's cache is masked by a bool mask over its length."""
    ours = _nnx(jax_ops.flax_attention_fn(), decode=True)
    theirs = _nnx(decode=True)
    for module in (ours, theirs):
        module.init_cache((2, 5, 16))
    for t in range(5):
        step = _X[:, t : t + 1]
        np.testing.assert_allclose(ours(step), theirs(step), rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_dropout(shared):
    """Values = identity show the weights: kept ones are 2 / 64; broadcasting shares them."""
    fn = jax_ops.flax_attention_fn()
    query = jnp.zeros((2, 64, 3, 8))
    value = jnp.broadcast_to(jnp.eye(64)[:, None], (2, 64, 3, 64))
    options = {"dropout_rate": 0.5, "broadcast_dropout": shared, "dropout_rng": jax.random.key(1)}
    weights = np.asarray(fn(query, query, value, **options))
    np.testing.assert_allclose(np.unique(weights), [0, 1 / 32], rtol=1e-6)
    assert abs((weights > 0).mean() - 0.5) < 0.05
    same = [np.array_equal(weights[0, :, 0], weights[b, :, h]) for b in (0, 1) for h in (0, 1, 2)]
    assert same == ([True] * 6 if shared else [True] + [False] * 5)
    calm = fn(query, query, value, deterministic=True, **options)
    np.testing.assert_allclose(calm, 1 / 64, rtol=1e-6)


def test_dropout_in_the_modules():
    fn = jax_ops.flax_attention_fn()
    ours = _nnx(fn, dropout_rate=0.5, deterministic=False)
    first, second = ours(_X, rngs=nnx.Rngs(1)), ours(_X, rngs=nnx.Rngs(2))
    assert np.abs(np.asarray(first - second)).max() > 1e-3
    np.testing.assert_array_equal(ours(_X, rngs=nnx.Rngs(1)), first)
    linen = _linen(fn, dropout_rate=0.5)
    variables = linen.init(jax.random.key(0), _X, deterministic=True)
    outs = [
        linen.apply(variables, _X, deterministic=False, rngs={"dropout": jax.random.key(i)})
        for i in (1, 2)
    ]
    assert np.abs(np.asarray(outs[0] - outs[1])).max() > 1e-3


def test_several_batch_axes():
    rng = np.random.default_rng(2)
    query, key, value = (rng.normal(size=(2, 3, 5, 4, 8)).astype(np.float32) for _ in range(3))
    bias = rng.normal(size=(3, 1, 5, 5)).astype(np.float32)
    mask = rng.random((2, 1, 4, 1, 5)) < 0.8
    mask[..., 0] = True
    fn = jax_ops.flax_attention_fn()
    expected = nn.dot_product_attention(query, key, value, bias, mask)
    got = fn(query, key, value, bias, mask)
    np.testing.assert_allclose(got, expected, rtol=3e-5, atol=3e-5)
    single = fn(query[0, 0], key[0, 0], value[0, 0])
    expected = nn.dot_product_attention(query[0, 0], key[0, 0], value[0, 0])
    np.testing.assert_allclose(single, expected, rtol=3e-5, atol=3e-5)


def test_dtype_is_the_computation_dtype():
    ours = _nnx(jax_ops.flax_attention_fn(), dtype=jnp.bfloat16)
    assert ours(_X).dtype == jnp.bfloat16
    mixed = jnp.zeros((1, 2, 1, 4), jnp.bfloat16)
    fn = jax_ops.flax_attention_fn()
    assert fn(mixed, mixed.astype(jnp.float32), mixed).dtype == jnp.float32


def test_options_of_ours():
    fn = jax_ops.flax_attention_fn(local_window_size=(1, 0))
    value = jnp.arange(4.0).reshape(1, 4, 1, 1)
    np.testing.assert_allclose(fn(0 * value, 0 * value, value).ravel(), [0, 0.5, 1.5, 2.5])


def test_refusals():
    x = jnp.zeros((1, 2, 1, 4))
    fn = jax_ops.flax_attention_fn()
    with pytest.raises(jax_ops.UnsupportedError, match="sow_weights"):
        _nnx(fn)(_X, sow_weights=True)
    with pytest.raises(jax_ops.UnsupportedError, match="einsum"):
        fn(x, x, x, qk_attn_weights_einsum=jnp.einsum)
    with pytest.raises(ValueError, match="dropout_rng: got None"):
        fn(x, x, x, dropout_rate=0.5)
    for name in ("mask", "return_residual", "local_windows"):
        with pytest.raises(ValueError, match=f"{name}: got an option"):
            jax_ops.flax_attention_fn(**{name: None})
    with pytest.raises(ValueError, match="at most 4 axes"):
        fn(x, x, x, mask=jnp.ones((1, 1, 1, 2, 2)))
