# SPDX-License-Identifier: Apache-2.0
"""Fifty training steps with packed segments, GQA and dropout equal those of plain jnp."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_ops
from tests.cases import accuracy, transformer

_CONFIG = transformer.Config()


@functools.cache
def _plain_losses(dtype):
    """Losses of the plain implementation in a dtype; float64 is the reference."""
    config = _CONFIG
    tokens, ids, seeds = transformer.data(config)
    keep = jnp.asarray(transformer.keep_masks(config, seeds))
    with jax.enable_x64(dtype == "float64"):
        params = transformer.parameters(config, np.dtype(dtype))
        attend = transformer.plain_attention(config)

        def loss(params, keep):
            total = transformer.loss_sum(config, attend, params, tokens, ids, keep)
            return total / (ids >= 0).sum()

        return np.asarray(transformer.train(config, jax.value_and_grad(loss), params, keep))


def _op_attention(backend, batch_offset=None):
    def attend(q, k, v, ids, seed):
        indices = None
        if batch_offset is not None:
            indices = batch_offset() + jnp.arange(q.shape[0], dtype=jnp.int32)
        return jax_ops.dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            query_segment_ids=ids,
            dropout_rate=_CONFIG.dropout,
            dropout_key=seed,
            dropout_batch_indices=indices,
            precision="highest",
            implementation=backend.name,
        )

    return attend


def _assert_losses(losses):
    reference, plain = _plain_losses("float64"), _plain_losses("float32")
    assert reference[-1] < 0.6 * reference[0], "the model does not learn: nothing is tested"
    # Each step builds on the last, so rounding grows along the run, in both alike; the factor
    # leaves room for that growth and is far below what one wrong gradient does.
    expected = accuracy.Expected(reference, (plain,))
    accuracy.assert_accurate("loss", np.asarray(losses), expected, factor=4)


def test_losses_equal_a_plain_implementation(backend):
    tokens, ids, seeds = transformer.data(_CONFIG)
    params = transformer.parameters(_CONFIG)
    attend = _op_attention(backend)

    def loss(params, seeds):
        total = transformer.loss_sum(_CONFIG, attend, params, tokens, ids, seeds)
        return total / (ids >= 0).sum()

    _assert_losses(transformer.train(_CONFIG, jax.value_and_grad(loss), params, jnp.asarray(seeds)))


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_same_under_shard_map_on_eight_devices(backend, check_vma):
    if backend.name == "cuda" and len(jax.devices()) < 8:
        pytest.skip(f"needs 8 CUDA devices, this machine has {len(jax.devices())}")
    tokens, ids, seeds = transformer.data(_CONFIG)
    params = transformer.parameters(_CONFIG)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = _CONFIG.batch // 8
    attend = _op_attention(backend, lambda: jax.lax.axis_index("data") * rows)
    count = (ids >= 0).sum()

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P("data"), P("data"), P()),
        out_specs=(P(), P()),
        check_vma=check_vma,
    )
    def sharded(params, tokens, ids, seeds):
        def loss(params):
            return transformer.loss_sum(_CONFIG, attend, params, tokens, ids, seeds) / count

        if check_vma:  # Gradients of replicated parameters are summed by their transpose.
            params = jax.tree.map(lambda x: jax.lax.pcast(x, "data", to="varying"), params)
        return jax.lax.psum(jax.value_and_grad(loss)(params), "data")

    losses = transformer.train(
        _CONFIG, lambda p, s: sharded(p, tokens, ids, s), params, jnp.asarray(seeds)
    )
    _assert_losses(losses)


def test_gradient_of_remat_of_scan_of_vmap(backend):
    """Transforms on top of each other give what a Python loop gives."""
    rng = np.random.default_rng(3)
    q = jnp.asarray(rng.normal(size=(3, 1, 16, 4, 8)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(1, 16, 2, 8)), jnp.float32) for _ in range(2))

    def attend(q, k, v):
        return jax_ops.dot_product_attention(
            q, k, v, is_causal=True, precision="highest", implementation=backend.name
        )

    def scanned(q, k, v):
        def body(x, _):
            return jax.vmap(attend, (0, None, None))(x, k, v), None

        return (jax.lax.scan(jax.checkpoint(body), q, None, length=2)[0] ** 2).sum()

    def looped(q, k, v):
        total = 0.0
        for x in q:
            total += (attend(attend(x, k, v), k, v) ** 2).sum()
        return total

    got = jax.jit(jax.grad(scanned, (0, 1, 2)))(q, k, v)
    expected = jax.jit(jax.grad(looped, (0, 1, 2)))(q, k, v)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
