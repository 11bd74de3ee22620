# SPDX-License-Identifier: Apache-2.0
"""Several devices: jit sharding with automatic and explicit mesh axes, and shard_map.

Results equal the float64 expression's, and the compiled programs move no q, k or v: no all-gather,
no all-to-all, no collective-permute, forward and gradient.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ops
from tests.cases import plain
from tests.cases.backends import XLA

GATHERING = ("all-gather", "all-to-all", "collective-permute")
HEADS = P("b", None, "h")  # [B, L, H, D] split by batch and heads
BATCH = P("b")


@pytest.fixture
def mesh():
    return jax.make_mesh((2, 4), ("b", "h"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture
def explicit_mesh():
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


def collectives(hlo):
    names = (*GATHERING, "all-reduce")
    return {name: len(re.findall(rf" {name}(?:-start)?\(", hlo)) for name in names}


def assert_nothing_gathered(hlo):
    counts = collectives(hlo)
    assert not any(counts[name] for name in GATHERING), counts


def loss_of(backend, **options):
    def loss(q, k, v, w, bias=None):
        out, lse = jax_ops.dot_product_attention(
            q,
            k,
            v,
            bias,
            is_causal=True,
            implementation=backend.name,
            return_residual=True,
            **options,
        )
        return (out * w).sum() + (lse * w[..., 0]).sum()

    return loss


def reference_loss(q, k, v, w, bias=None):
    out, lse = plain.attention(q, k, v, bias, causal=True)
    return (out * w).sum() + (lse * w[..., 0]).sum()


def place(mesh, specs, arrays):
    return [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)
    ]


@pytest.mark.parametrize(
    "hq, hkv, q_spec, kv_spec",
    [
        (8, 8, HEADS, HEADS),
        (8, 4, HEADS, HEADS),
        (8, 4, HEADS, BATCH),  # replicated K and V, whose heads would divide
        (8, 2, HEADS, BATCH),  # two devices share a KV head
        (8, 1, HEADS, BATCH),
        (12, 4, P(None, None, "b"), P(None, None, "b")),
        (12, 3, HEADS, BATCH),
        (24, 8, HEADS, BATCH),
        (12, 2, P(None, None, "h"), P()),  # three heads a device, six a group
        (16, 4, P(None, None, ("h", "b")), P(None, None, "h")),
        (20, 5, HEADS, BATCH),  # a device's heads begin inside a group
        (8, 4, BATCH, BATCH),
        (8, 4, P("h", None, "b"), P("h", None, "b")),
    ],
)
def test_jit_sharding(backend, mesh, hq, hkv, q_spec, kv_spec):
    arrays = plain.inputs(b=4, hq=hq, hkv=hkv)
    specs = (q_spec, kv_spec, kv_spec, q_spec)
    placed = place(mesh, specs, arrays)
    shardings = tuple(x.sharding for x in placed)
    gradient = jax.jit(
        jax.grad(loss_of(backend), (0, 1, 2)),
        in_shardings=shardings,
        out_shardings=shardings[:3],
    )
    compiled = gradient.lower(*placed).compile()
    assert_nothing_gathered(compiled.as_text())
    wanted = plain.in_float64(jax.grad(reference_loss, (0, 1, 2)), *arrays)
    plain.assert_close(compiled(*placed), wanted, backend)


def test_the_count_of_collectives_sees_a_gather(mesh):
    """The control: the unfused expression with these shardings has what the tests exclude."""
    arrays = plain.inputs(b=4, lq=20, lkv=24, hq=8, hkv=1)
    placed = place(mesh, (P(None, "h"), P(None, "h"), P(None, "h")), arrays[:3])
    hlo = jax.jit(lambda *a: plain.attention(*a)[0]).lower(*placed).compile().as_text()
    assert any(collectives(hlo)[name] for name in GATHERING)


def test_options_are_split_with_the_heads(backend, mesh):
    """Bias, slopes and dropout of a sharded call are those of the whole."""
    q, k, v, w = plain.inputs(b=4, hq=8, hkv=2)
    rng = np.random.default_rng(0)
    bias = rng.standard_normal((8, 19, 23)).astype(np.float32)
    slopes = jnp.linspace(0.1, 0.8, 8)

    def loss(q, k, v, bias, slopes, scale):
        out = jax_ops.dot_product_attention(
            q,
            k,
            v,
            bias,
            scale=scale,
            alibi_slopes=slopes,
            dropout_rate=0.3,
            dropout_key=jax.random.key(5),
            query_seq_lengths=jnp.array([19, 3, 0, 11]),
            implementation=backend.name,
        )
        return (out * w).sum()

    gradient = jax.grad(loss, tuple(range(6)))
    args = (q, k, v, jnp.asarray(bias), slopes, jnp.float32(0.4))
    wanted = jax.tree.map(np.asarray, jax.jit(gradient)(*args))
    placed = place(mesh, (HEADS, BATCH, BATCH, P("h"), P("h"), P()), args)
    shardings = tuple(x.sharding for x in placed)
    compiled = jax.jit(gradient, out_shardings=shardings).lower(*placed).compile()
    assert_nothing_gathered(compiled.as_text())
    plain.assert_close(compiled(*placed), wanted, backend)


def test_forward_mode_gathers_nothing(backend, mesh):
    arrays = plain.inputs(b=4, hq=8, hkv=4)[:3]
    placed = place(mesh, (HEADS,) * 3, arrays)

    def tangent(*args):
        return jax.jvp(
            lambda *a: jax_ops.dot_product_attention(*a, implementation=backend.name), args, args
        )[1]

    compiled = jax.jit(tangent).lower(*placed).compile()
    assert_nothing_gathered(compiled.as_text())
    wanted = plain.in_float64(
        lambda *a: jax.jvp(lambda *x: plain.attention(*x)[0], a, a)[1], *arrays
    )
    plain.assert_close(compiled(*placed), wanted, backend)


def test_vmap_of_a_sharded_call(backend, mesh):
    q, k, v, w = plain.inputs(b=4, hq=8, hkv=4)
    placed = place(mesh, (P(None, *HEADS), HEADS, HEADS, HEADS), (np.stack([q, -q]), k, v, w))
    axes = (0, None, None, None)
    compiled = (
        jax.jit(jax.vmap(jax.grad(loss_of(backend), (0, 1, 2)), axes)).lower(*placed).compile()
    )
    assert_nothing_gathered(compiled.as_text())
    wanted = plain.in_float64(
        jax.vmap(jax.grad(reference_loss, (0, 1, 2)), axes), np.stack([q, -q]), k, v, w
    )
    plain.assert_close(compiled(*placed), wanted, backend)


@pytest.mark.parametrize("hkv, kv_spec", [(4, HEADS), (1, BATCH)])
def test_explicit_axes(backend, explicit_mesh, hkv, kv_spec):
    arrays = plain.inputs(b=4, hq=8, hkv=hkv)
    placed = place(explicit_mesh, (HEADS, kv_spec, kv_spec, HEADS), arrays)
    gradient = jax.jit(jax.grad(loss_of(backend), (0, 1, 2)))
    assert_nothing_gathered(gradient.lower(*placed).compile().as_text())
    got = gradient(*placed)
    for g, x in zip(got, placed, strict=False):
        assert g.sharding.spec == jax.typeof(x).sharding.spec
    wanted = plain.in_float64(jax.grad(reference_loss, (0, 1, 2)), *arrays)
    plain.assert_close(got, wanted, backend)
    out = jax.jit(lambda *a: jax_ops.dot_product_attention(*a, implementation=backend.name))(
        *placed[:3]
    )
    assert jax.typeof(out).sharding.spec == P("b", None, "h", None)


def test_second_order_with_explicit_axes(backend, explicit_mesh):
    arrays = plain.inputs(b=4, hq=8, hkv=4)
    placed = place(explicit_mesh, (HEADS,) * 4, arrays)

    def second(loss):
        gradient = jax.grad(loss, (0, 1, 2))
        return lambda *a: jax.jvp(gradient, a, a)[1]

    wanted = plain.in_float64(second(reference_loss), *arrays)
    plain.assert_close(jax.jit(second(loss_of(backend)))(*placed), wanted, backend)


def test_explicit_sharding_of_a_sequence_is_refused(backend, explicit_mesh):
    placed = place(
        explicit_mesh,
        (P(None, None, "h"), P(None, None, "h"), P(None, None, "h")),
        plain.inputs(b=4, lq=20, hq=8, hkv=4)[:3],
    )
    q = jax.device_put(placed[0], NamedSharding(explicit_mesh, P(None, "b")))
    with pytest.raises(ValueError, match="query: got axis -3 sharded over explicit mesh axis 'b'"):
        jax_ops.dot_product_attention(q, *placed[1:], implementation=backend.name)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("hkv, kv_spec", [(4, HEADS), (1, BATCH)])
def test_shard_map(backend, mesh, check_vma, hkv, kv_spec):
    q, k, v, w = plain.inputs(b=4, hq=8, hkv=hkv)
    mapped = jax.shard_map(
        lambda *a: jax_ops.dot_product_attention(*a, is_causal=True, implementation=backend.name),
        mesh=mesh,
        in_specs=(HEADS, kv_spec, kv_spec),
        out_specs=HEADS,
        check_vma=check_vma,
    )
    got = jax.jit(jax.grad(lambda *a: (mapped(*a) * w).sum(), (0, 1, 2)))(q, k, v)
    wanted = plain.in_float64(
        jax.grad(lambda *a: (plain.attention(*a, causal=True)[0] * w).sum(), (0, 1, 2)), q, k, v
    )
    plain.assert_close(got, wanted, backend)


def test_shard_map_over_some_axes(backend, mesh):
    """The other axis is the partitioner's."""
    arrays = plain.inputs(b=4, hq=8, hkv=4)
    loss = loss_of(backend)
    mapped = jax.shard_map(
        lambda *a: jax.lax.psum(loss(*a), "b"),
        mesh=mesh,
        in_specs=(BATCH,) * 4,
        out_specs=P(),
        axis_names={"b"},
    )
    got = jax.jit(jax.grad(mapped, (0, 1, 2)))(*arrays)
    wanted = plain.in_float64(jax.grad(reference_loss, (0, 1, 2)), *arrays)
    plain.assert_close(got, wanted, backend)


@pytest.mark.parametrize("how", ["shard_map", "shard_map, unchecked", "explicit", "automatic"])
def test_score_functions_and_what_they_capture(mesh, how):
    """flex_attention's blockwise path, with the gradient of a captured table."""
    q, k, v, w = plain.inputs(b=4, hq=8, hkv=4)
    table = np.random.default_rng(0).standard_normal((8, 43)).astype(np.float32)

    def loss(q, k, v, w, table):
        out = jax_ops.flex_attention(
            q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, i - j + 23]
        )
        return (out * w).sum()

    def reference(q, k, v, w, table):
        i, j = np.arange(19)[:, None], np.arange(23)
        return (plain.attention(q, k, v, table[:, i - j + 23])[0] * w).sum()

    args = (q, k, v, w, table)
    wanted = plain.in_float64(jax.grad(reference, (0, 1, 2, 4)), *args)
    specs = (HEADS,) * 4
    if how.startswith("shard_map"):
        loss = jax.shard_map(
            lambda *a, local=loss: jax.lax.psum(local(*a), ("b", "h")),
            mesh=mesh,
            in_specs=(*specs, P("h")),
            out_specs=P(),
            check_vma=how == "shard_map",
        )
    if how == "explicit":
        mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        placed = place(mesh, specs, args[:4])
        got = jax.jit(jax.grad(loss, (0, 1, 2, 4)))(*placed, table)
        if how == "explicit":
            with pytest.raises(jax_ops.UnsupportedError, match="score_mod: got a function that"):
                loss(*placed, jax.device_put(table, NamedSharding(mesh, P())))
    plain.assert_close(got, wanted, XLA)


def test_dropout_in_shard_map_with_global_indices(backend, mesh):
    q, k, v, _ = plain.inputs(b=4, hq=8, hkv=4)
    options = {
        "dropout_rate": 0.4,
        "dropout_key": jax.random.key(2),
        "implementation": backend.name,
    }

    def local(q, k, v):
        batch = jax.lax.axis_index("b") * q.shape[0] + jnp.arange(q.shape[0])
        heads = jax.lax.axis_index("h") * q.shape[2] + jnp.arange(q.shape[2])
        return jax_ops.dot_product_attention(
            q, k, v, dropout_batch_indices=batch, dropout_head_indices=heads, **options
        )

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(HEADS,) * 3, out_specs=HEADS)
    wanted = jax_ops.dot_product_attention(q, k, v, **options)
    np.testing.assert_allclose(jax.jit(mapped)(q, k, v), wanted, atol=1e-6)


def test_jax_tells_lowerings_their_devices_for_our_primitives():
    """The adapter's marker: without it a sharded lowering does not know its devices."""
    from jax_ops import _jax

    primitives = {eqn.primitive.name for eqn in _jax.DEVICE_MARKER.eqns}
    assert primitives == {"custom_partitioning"}
