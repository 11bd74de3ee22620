# SPDX-License-Identifier: Apache-2.0
"""Every JAX transform on one device, against the same transform of a float64 expression."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ops
from jax_ops._problem import attend, make_problem
from tests.cases import plain

Q, K, V, W = plain.inputs()
RNG = np.random.default_rng(1)
BIAS = RNG.standard_normal((4, 19, 1)).astype(np.float32)
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
SCALE = np.float32(0.3)
DIRECTIONS = tuple(RNG.standard_normal(x.shape).astype(np.float32) for x in (Q, K, V))


def ours(backend, **options):
    """(out, lse) of our function of (q, k, v, bias, slopes, scale), causal."""

    def function(q, k, v, bias=None, slopes=None, scale=None):
        return jax_ops.dot_product_attention(
            q,
            k,
            v,
            bias,
            scale=scale,
            alibi_slopes=slopes,
            is_causal=True,
            implementation=backend.name,
            return_residual=True,
            **options,
        )

    return function


def loss_of(function):
    """A scalar of both results, so that the cotangents of out and of lse both count."""

    def loss(*args):
        out, lse = function(*args)
        return (out * W).sum() + (jnp.sin(lse) * W[..., 0]).sum()

    return loss


reference = functools.partial(plain.attention, causal=True)
ALL = (Q, K, V, BIAS, SLOPES, SCALE)


def same(backend, transform, *args, **options):
    """transform(our function)(*args) equals transform(reference)(*args) in float64."""
    got = jax.jit(transform(ours(backend, **options)))(*map(jnp.asarray, args))
    plain.assert_close(got, plain.in_float64(transform(reference), *args), backend)


def test_value_and_gradients_of_every_floating_operand(backend):
    same(backend, lambda f: jax.value_and_grad(loss_of(f), tuple(range(6))), *ALL)


@pytest.mark.parametrize("argnum", [0, 2, 4])
def test_gradient_of_one_operand_alone(backend, argnum):
    same(backend, lambda f: jax.grad(loss_of(f), argnum), *ALL)


def test_jvp(backend):
    def transform(f):
        return lambda *args: jax.jvp(f, args, tuple(jnp.cos(x) for x in args))[1]

    same(backend, transform, *ALL)


def test_vjp_of_lse_alone(backend):
    same(backend, lambda f: jax.grad(lambda *a: (f(*a)[1] * W[..., 0]).sum(), (0, 1, 2)), Q, K, V)


def test_hessian_vector_product_forward_over_reverse(backend):
    def transform(f):
        gradient = jax.grad(loss_of(f), (0, 1, 2, 3, 4, 5))
        return lambda *args: jax.jvp(gradient, args, tuple(jnp.cos(x) for x in args))[1]

    same(backend, transform, *ALL)


def test_gradient_of_gradient(backend):
    def transform(f):
        def second(*args):
            grads = jax.grad(loss_of(f), (0, 1, 2))(*args)
            return sum((g * d).sum() for g, d in zip(grads, DIRECTIONS, strict=True))

        return jax.grad(second, (0, 1, 2))

    same(backend, transform, Q, K, V)


def test_jacobians_and_hessian(backend):
    q, k, v = Q[:1, :3, :2], K[:1, :4, :1], V[:1, :4, :1]

    def transform(f):
        def loss(*args):
            return (f(*args)[0] * W[:1, :3, :2]).sum()

        parts = (jax.jacfwd(f, (0, 1, 2)), jax.jacrev(f, (0, 1, 2)), jax.hessian(loss, (0, 1)))
        return lambda *args: [part(*args) for part in parts]

    same(backend, transform, q, k, v)


def test_linear_transpose_twice_is_the_tangent(backend):
    out, tangent = jax.linearize(ours(backend), Q, K, V)
    transpose = jax.linear_transpose(tangent, *DIRECTIONS)
    twice = jax.linear_transpose(lambda *ct: transpose(ct), *out)
    plain.assert_close(twice(DIRECTIONS), jax.tree.map(np.asarray, tangent(*DIRECTIONS)), backend)


@pytest.mark.parametrize("axes", [(0, None, None), (None, 1, 2), (None, None, 3)])
def test_vmap_of_any_subset(backend, axes):
    def transform(f):
        mapped = jax.vmap(f, axes)
        gradient = jax.value_and_grad(lambda *args: _sum(mapped(*args)), (0, 1, 2))
        mapped_gradient = jax.vmap(jax.grad(loss_of(f), (0, 1, 2)), axes)
        return lambda *args: (gradient(*args), mapped_gradient(*args))

    args = [
        x if axis is None else np.stack([x, 2 * x, -x], axis)
        for x, axis in zip((Q, K, V), axes, strict=True)
    ]
    same(backend, transform, *args)


def _sum(results):
    out, lse = results
    return (out * W).sum() + (lse * W[..., 0]).sum()


def test_vmap_of_small_operands(backend):
    biases, slopes = np.stack([BIAS, -BIAS]), np.stack([SLOPES, 2 * SLOPES])
    scales = np.array([0.1, 0.7], np.float32)
    axes = (None, None, None, 0, 0, 0)
    args = (Q, K, V, biases, slopes, scales)
    same(backend, lambda f: jax.vmap(jax.value_and_grad(loss_of(f), (0, 3, 4, 5)), axes), *args)


def test_nested_vmap_with_an_operand_on_the_outer_and_inner_axes_only(backend):
    q = np.stack([np.stack([np.stack([Q, -Q])] * 2), np.stack([np.stack([2 * Q, Q])] * 2)])
    k = np.stack([np.stack([K, 0.5 * K]), np.stack([-K, K])])  # axes 0 and 2 of q's three

    def transform(f):
        inner = jax.vmap(f, (0, 0, None))
        middle = jax.vmap(inner, (0, None, None))
        return jax.vmap(middle, (0, 0, None))

    same(backend, transform, q, k, V)


def test_vmap_over_heads(backend):
    def transform(f):
        def one_head(q, k, v):
            return f(q[:, :, None], k[:, :, None], v[:, :, None])

        return jax.vmap(one_head, (2, 2, 2), 2)

    same(backend, transform, Q[:, :, :2], K, V)


def test_vmap_of_lengths_and_masks(backend):
    lengths = jnp.array([[23, 1], [7, 23], [2, 19]])
    masks = jnp.asarray(RNG.random((3, 19, 23)) < 0.7)

    def call(lengths, mask):
        return jax_ops.dot_product_attention(
            Q, K, V, mask=mask, key_value_seq_lengths=lengths, implementation=backend.name
        )

    got = jax.vmap(call)(lengths, masks)
    wanted = np.stack([call(n, m) for n, m in zip(lengths, masks, strict=True)])
    np.testing.assert_allclose(got, wanted, atol=1e-6)


def test_vmap_of_block_masks_with_tiles_of_their_own(backend):
    rng = np.random.default_rng(2)
    bits = jnp.asarray(rng.integers(0, 2**32, (3, 2, 64, 2)), jnp.uint32)
    index = jnp.array([[[[0]]], [[[1]]]], jnp.int32)  # one tile for each batch entry

    def call(bits):
        problem = make_problem(Q, K, V, block_mask=(index, bits), implementation=backend.name)
        return attend(problem)

    def dense(bits):
        words = bits[:, :19, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
        mask = words.reshape(2, 1, 19, 64)[..., :23].astype(bool)
        return jax_ops.dot_product_attention(Q, K, V, mask=mask, implementation=backend.name)

    np.testing.assert_allclose(jax.vmap(call)(bits), jax.vmap(dense)(bits), atol=1e-6)


def test_dropout_under_vmap_is_the_loop_over_elements(backend):
    keys = jax.random.split(jax.random.key(3), 3)

    def call(q, key):
        return jax_ops.dot_product_attention(
            q, K, V, dropout_rate=0.4, dropout_key=key, implementation=backend.name
        )

    queries = np.stack([Q, 2 * Q, 3 * Q])
    wanted = np.stack([call(q, key) for q, key in zip(queries, keys, strict=True)])
    np.testing.assert_allclose(jax.vmap(call)(queries, keys), wanted, atol=1e-6)


def test_dropout_head_indices_can_be_mapped(backend):
    heads = jnp.array([[0, 1, 2, 3], [4, 5, 6, 7]], jnp.int32)

    def call(heads):
        return jax_ops.dot_product_attention(
            Q,
            K,
            V,
            dropout_rate=0.4,
            dropout_key=jax.random.key(3),
            dropout_head_indices=heads,
            implementation=backend.name,
        )

    got = jax.jit(jax.vmap(call))(heads)
    np.testing.assert_allclose(got, np.stack([call(h) for h in heads]), atol=1e-6)
    assert np.abs(got[0] - got[1]).max() > 0.01


def test_sharding_over_batch_and_heads(backend):
    """What sharding_test.py checks in depth, on this backend."""
    q, k, v, w = plain.inputs(b=2, hq=4, hkv=1)
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(AxisType.Auto,) * 2)
    heads, shared = (NamedSharding(mesh, P("b", None, h)) for h in ("h", None))
    shardings = (heads, shared, shared)

    def gradient(attend):
        return jax.grad(lambda *a: (attend(*a)[0] * w).sum(), (0, 1, 2))

    ours_sharded = jax.jit(gradient(ours(backend)), in_shardings=shardings, out_shardings=shardings)
    compiled = ours_sharded.lower(q, k, v).compile()
    assert "all-gather" not in compiled.as_text()
    assert "all-reduce" in compiled.as_text()  # the gradients of the shared K and V
    got = compiled(*map(jax.device_put, (q, k, v), shardings))
    plain.assert_close(got, plain.in_float64(gradient(reference), q, k, v), backend)


def test_remat_runs_the_forward_kernel_once_when_names_are_saved(backend):
    def count(policy):
        f = jax.checkpoint(lambda *a: ours(backend)(*a)[0], policy=policy)
        jaxpr = jax.make_jaxpr(jax.grad(lambda *a: (f(*a) * W).sum(), (0, 1, 2)))(Q, K, V)
        return str(jaxpr).count("attention_forward[")

    names = jax.checkpoint_policies.save_only_these_names(*jax_ops.CHECKPOINT_NAMES)
    assert count(names) == 1
    assert count(jax.checkpoint_policies.nothing_saveable) == 2  # the control


def test_gradient_of_remat_of_scan_of_vmap(backend):
    def transform(f):
        def step(q, k):
            mapped = jax.vmap(lambda q: f(q, k, V)[0])
            return checkpoint_name(q + mapped(q), "residual"), None

        def loss(q, ks):
            return jnp.sin(jax.lax.scan(jax.checkpoint(step), q, ks)[0]).sum()

        return jax.grad(loss, (0, 1))

    same(backend, transform, np.stack([Q, -Q]), np.stack([K, 0.5 * K, -K]))


def test_control_flow(backend):
    def transform(f):
        def loss(q, k, v):
            q = jax.lax.cond(q[0, 0, 0, 0] > 100, lambda: q, lambda: f(q, k, v)[0])
            return jax.lax.fori_loop(0, 2, lambda _, q: f(q, k, v)[0], q).sum()

        return jax.grad(loss, (0, 1, 2))

    same(backend, transform, Q, K, V)


def test_integer_and_bool_operands_get_float0_cotangents(backend):
    mask, lengths = jnp.ones((19, 23), bool), jnp.array([23, 11])
    ids = jnp.zeros((2, 19), jnp.int32), jnp.zeros((2, 23), jnp.int32)

    def loss(q, mask, lengths, ids):
        return jax_ops.dot_product_attention(
            q,
            K,
            V,
            mask=mask,
            key_value_seq_lengths=lengths,
            query_segment_ids=ids[0],
            key_value_segment_ids=ids[1],
            implementation=backend.name,
        ).sum()

    grads = jax.grad(loss, (0, 1, 2, 3), allow_int=True)(jnp.asarray(Q), mask, lengths, ids)
    assert {g.dtype for g in jax.tree.leaves(grads[1:])} == {jax.dtypes.float0}
    assert np.isfinite(grads[0]).all()


def test_stop_gradient_leaves_no_backward_pass(backend):
    def loss(q, k, v):
        q, k, v = jax.lax.stop_gradient((q, k, v))
        return ours(backend)(q, k, v)[0].sum() + q.sum()

    assert "attention_backward[" not in str(jax.make_jaxpr(jax.grad(loss))(Q, K, V))


def test_disable_jit(backend):
    gradient = jax.grad(loss_of(ours(backend)), (0, 1, 2))
    wanted = gradient(Q, K, V)
    with jax.disable_jit():
        got = gradient(Q, K, V)
    for g, w in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(g, w)


def test_debug_nans_accepts_rows_without_keys(backend):
    with jax.debug_nans(True):
        out, lse = jax_ops.dot_product_attention(
            Q,
            K,
            V,
            key_value_seq_lengths=jnp.array([0, 5]),
            implementation=backend.name,
            return_residual=True,
        )
    assert (out[0] == 0).all()
    assert (lse[0] == -np.inf).all()


def test_compiled_program_calls_this_backend(backend):
    hlo = jax.jit(jax.grad(loss_of(ours(backend)), (0, 1, 2))).lower(Q, K, V).compile().as_text()
    backend.assert_ran(hlo)


def test_trace_does_not_grow_with_length(backend):
    def size(length):
        shapes = [jax.ShapeDtypeStruct((1, length, h, 64), jnp.bfloat16) for h in (4, 2, 2)]
        ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

        def loss(q, k, v, ids):
            return jax_ops.dot_product_attention(
                q,
                k,
                v,
                is_causal=True,
                local_window_size=(512, None),
                query_segment_ids=ids,
                implementation=backend.name,
            ).sum()

        return len(jax.jit(jax.grad(loss, (0, 1, 2))).lower(*shapes, ids).as_text())

    sizes = [size(length) for length in (1024, 131072)]
    assert max(sizes) <= 1.02 * min(sizes)  # digits of the lengths themselves
