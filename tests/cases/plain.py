# SPDX-License-Identifier: Apache-2.0
"""Attention as one unfused jnp expression: any transform of it in float64 is a reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def attention(query, key, value, bias=None, slopes=None, scale=None, *, causal=False, cap=None):
    """(out, lse) of [B, L, H, D] arrays; rows must see at least one key."""
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    scale = 1 / np.sqrt(query.shape[3]) if scale is None else scale
    scores = scale * jnp.einsum("bihd,bjhd->bhij", query, key)
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    i, j = jnp.arange(query.shape[1])[:, None], jnp.arange(key.shape[1])
    if bias is not None:
        scores = scores + bias
    if slopes is not None:
        scores = scores - slopes[:, None, None] * abs(i - j)
    if causal:
        scores = jnp.where(j <= i, scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    out = jnp.einsum("bhij,bjhd->bihd", jnp.exp(scores - lse[..., None]), value)
    return out, lse.transpose(0, 2, 1)


def in_float64(function, *args):
    """function(*args) as NumPy arrays, traced and run in float64."""
    with jax.enable_x64(True):
        args = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), _wide(x)), args)
        return jax.tree.map(np.asarray, jax.jit(function)(*args))


def _wide(x):
    return np.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype


def assert_close(got, wanted, backend):
    """Trees of arrays agree to the accuracy of float32 (or tf32) sums of this size.

    Not the rule of cases/accuracy.py: transforms of transforms have no baseline of their own. What
    kernels leave here, relative to the largest entry, is at most 1.8e-6 in float32 and 1.4e-3 with
    tf32 products; the bounds are three times that. One wrong term is an error of order one.
    """
    tolerance = 4e-3 if backend.tf32 else 5e-6
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert g.shape == w.shape
        error = np.abs(np.asarray(g, np.float64) - w).max(initial=0)
        assert error <= tolerance * max(1, np.abs(w).max(initial=0)), f"error {error}"


@functools.cache
def inputs(b=2, lq=19, lkv=23, hq=4, hkv=2, d=8, dv=8, seed=0):
    """Seeded normals: query, key, value, and a cotangent for out."""
    rng = np.random.default_rng(seed)
    shapes = [(b, lq, hq, d), (b, lkv, hkv, d), (b, lkv, hkv, dv), (b, lq, hq, dv)]
    return tuple(rng.standard_normal(s).astype(np.float32) for s in shapes)
