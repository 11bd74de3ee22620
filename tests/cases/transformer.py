# SPDX-License-Identifier: Apache-2.0
"""A two-layer language model, with the attention as a parameter, and its training loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from tests.cases import philox


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model and of the training run."""

    steps: int = 50
    layers: int = 2
    batch: int = 8
    length: int = 64
    vocabulary: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    dropout: float = 0.1
    learning_rate: float = 0.3

    @property
    def width(self):
        return self.heads * self.head_dim


def parameters(config: Config, dtype=np.float32):
    rng = np.random.default_rng(0)

    def matrix(rows, columns):
        return (rng.normal(size=(rows, columns)) / np.sqrt(rows)).astype(dtype)

    c = config
    return {
        "embedding": matrix(c.vocabulary, c.width),
        "layers": [
            {
                "q": matrix(c.width, c.width),
                "k": matrix(c.width, c.kv_heads * c.head_dim),
                "v": matrix(c.width, c.kv_heads * c.head_dim),
                "o": matrix(c.width, c.width),
                "up": matrix(c.width, 2 * c.width),
                "down": matrix(2 * c.width, c.width),
            }
            for _ in range(c.layers)
        ],
        "head": matrix(c.width, c.vocabulary),
    }


def data(config: Config):
    """Packed sequences and dropout seeds.

    Returns:
      tokens [B, L + 1] that follow a noisy rule, segment ids [B, L] with padding at the end of some
      rows, seeds [steps, layers, 2].
    """
    c = config
    rng = np.random.default_rng(1)
    tokens = np.zeros((c.batch, c.length + 1), np.int32)
    for i in range(c.length + 1):
        fresh = rng.integers(0, c.vocabulary, c.batch)
        follow = (3 * tokens[:, i - 1] + 1) % c.vocabulary
        tokens[:, i] = np.where(rng.random(c.batch) < 0.15, fresh, follow)
    cuts = np.sort(rng.integers(8, c.length - 8, (c.batch, 2)), 1)
    ids = (np.arange(c.length)[None, :, None] >= cuts[:, None]).sum(2).astype(np.int32)
    ids[::2, -5:] = -1
    seeds = rng.integers(0, 2**32, (c.steps, c.layers, 2), np.uint32)
    return tokens, ids, seeds


def keep_masks(config: Config, seeds):
    """What the documented dropout counter keeps: bool [steps, layers, B, H, L, L]."""
    c = config
    return np.stack(
        [
            [
                philox.keep_mask(s, range(c.batch), range(c.heads), c.length, c.length, c.dropout)
                for s in step
            ]
            for step in seeds
        ]
    )


def plain_attention(config: Config):
    """Softmax attention in jnp with everything in full; its dropout argument is the keep mask."""

    def attend(q, k, v, ids, keep):
        group = config.heads // config.kv_heads
        k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
        s = jnp.einsum("bihd,bjhd->bhij", q, k, precision="highest") / np.sqrt(config.head_dim)
        allowed = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None]
        allowed = (allowed & np.tri(config.length, dtype=bool))[:, None]
        s = jnp.where(allowed, s, -jnp.inf)
        alive = allowed.any(-1, keepdims=True)
        weights = jnp.where(alive, jax.nn.softmax(jnp.where(alive, s, 0), -1), 0)
        weights = jnp.where(keep, weights / (1 - config.dropout), 0)
        return jnp.einsum("bhij,bjhd->bihd", weights, v, precision="highest")

    return attend


def _normalised(x):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def _dot(a, b):
    return jnp.matmul(a, b, precision="highest")


def loss_sum(config: Config, attend, params, tokens, ids, dropouts):
    """Sum over real positions of the next-token cross entropy."""
    x = params["embedding"][tokens[:, :-1]]
    b, length = ids.shape
    for layer, dropout in zip(params["layers"], dropouts, strict=True):
        y = _normalised(x)
        q = _dot(y, layer["q"]).reshape(b, length, config.heads, config.head_dim)
        k = _dot(y, layer["k"]).reshape(b, length, config.kv_heads, config.head_dim)
        v = _dot(y, layer["v"]).reshape(b, length, config.kv_heads, config.head_dim)
        x = x + _dot(attend(q, k, v, ids, dropout).reshape(b, length, -1), layer["o"])
        x = x + _dot(jax.nn.gelu(_dot(_normalised(x), layer["up"])), layer["down"])
    logits = jax.nn.log_softmax(_dot(_normalised(x), params["head"]), -1)
    losses = -jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return jnp.where(ids >= 0, losses, 0).sum()


def train(config: Config, value_and_grad, params, dropouts):
    """Gradient descent for config.steps steps; the losses [steps].

    value_and_grad: (params, one step's dropouts) -> (mean loss, gradients).
    dropouts: an array with leading axis `steps`.
    """

    def step(params, dropout):
        loss, gradients = value_and_grad(params, dropout)
        params = jax.tree.map(lambda p, g: p - config.learning_rate * g, params, gradients)
        return params, loss

    return jax.jit(lambda p, d: jax.lax.scan(step, p, d)[1])(params, dropouts)
