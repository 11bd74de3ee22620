# SPDX-License-Identifier: Apache-2.0
"""An `attention_fn` for Flax's attention modules, of nnx and of linen.

    nnx.MultiHeadAttention(..., attention_fn=jax_ops.flax_attention_fn())
    linen.MultiHeadDotProductAttention(..., attention_fn=jax_ops.flax_attention_fn())

Flax itself is not needed to make one: the adaptor speaks its calling convention only.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ops import _arguments as arguments
from jax_ops._errors import UnsupportedError, argument_error
from jax_ops.attention import dot_product_attention


def flax_attention_fn(**options: Any) -> Callable[..., jax.Array]:
    """Makes a function that Flax's attention modules take as their `attention_fn`.

    The function reads what Flax passes with Flax's meaning: inputs of `dtype`, if that is given;
    masks of any dtype, of which zero entries are masked; dropout that `broadcast_dropout` shares
    over batch and heads (with this library's own generator, so other entries are dropped than in
    Flax); any number of batch axes. It differs in what it must: a row with no allowed key gives 0,
    where Flax gives the mean of all values, and scores are kept in float32. What it lacks raises
    `UnsupportedError`: sowing the attention weights, which are never stored, and custom einsums.

    Args:
      **options: keyword arguments of `dot_product_attention` that Flax knows nothing of, for every
        call: implementation, local_window_size, logits_soft_cap, alibi_slopes, scale, ..

    Returns:
      A function (query, key, value, bias=None, mask=None, ...) -> out, on arrays
      [*batch, length, heads, head dim] as in Flax; key and value may have fewer heads.

    Raises:
      ValueError: an option is unknown, or one that Flax sets in each call.
    """
    for name in options:
        known = inspect.signature(dot_product_attention).parameters
        if name not in known or name in _SET_BY_FLAX or name == "return_residual":
            allowed = "options of dot_product_attention that Flax does not pass itself"
            raise argument_error(name, "an option that is the same for all calls", allowed)

    def attention_fn(
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        mask: Any = None,
        broadcast_dropout: bool = True,
        dropout_rng: Any = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        force_fp32_for_softmax: bool = False,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
        is_causal: bool = False,
    ) -> jax.Array:
        """Attention in Flax's calling convention; see `flax_attention_fn`."""
        if module is not None:
            raise UnsupportedError("sow_weights: attention weights are never stored")
        if qk_attn_weights_einsum is not None or attn_weights_value_einsum is not None:
            raise UnsupportedError("custom einsums: the products are inside the kernel")
        # The softmax is in float32 always.
        del force_fp32_for_softmax
        query, key, value = (
            arguments.as_array(name, x)
            for name, x in (("query", query), ("key", key), ("value", value))
        )
        # Flax computes in `dtype`, by default in the dtype that the inputs promote to.
        dtype = jnp.result_type(query, key, value) if dtype is None else dtype
        lead = query.shape[:-3]
        batch = math.prod(lead)
        calls = {
            "bias": _merge_batch("bias", bias, lead),
            "mask": _merge_batch("mask", _as_bool(mask), lead),
            "is_causal": bool(is_causal),
            "precision": precision,
        }
        if dropout_rate > 0.0 and not deterministic:
            calls |= {"dropout_rate": dropout_rate, "dropout_key": _key_of(dropout_rng)}
            if broadcast_dropout:
                calls |= {
                    "dropout_batch_indices": np.zeros(batch, np.uint32),
                    "dropout_head_indices": np.zeros(query.shape[-2], np.uint32),
                }
        arrays = (x.astype(dtype).reshape(batch, *x.shape[-3:]) for x in (query, key, value))
        # Without a residual the result is one array.
        out: Any = dot_product_attention(*arrays, **{**calls, **options})
        return out.reshape(*lead, *out.shape[1:])

    return attention_fn


_SET_BY_FLAX = (
    "query",
    "key",
    "value",
    "bias",
    "mask",
    "is_causal",
    "precision",
    "dropout_rate",
    "dropout_key",
    "dropout_batch_indices",
    "dropout_head_indices",
)


def _as_bool(mask: Any) -> Any:
    """Flax makes masks of any dtype; what is not zero is allowed."""
    if mask is None:
        return None
    mask = arguments.as_array("mask", mask)
    return mask if mask.dtype == np.bool_ else mask != 0


def _merge_batch(name: str, x: Any, lead: tuple[int, ...]) -> Any:
    """[*batch, H, Lq, Lkv], which broadcasts, to one batch axis, or to none for one without."""
    if x is None:
        return None
    x = arguments.as_array(name, x)
    own = x.shape[:-3]
    if x.ndim > len(lead) + 3:
        raise argument_error(name, f"shape {x.shape}", f"at most {len(lead) + 3} axes")
    if all(size == 1 for size in own):
        return x.reshape(x.shape[len(own) :])
    tail = x.shape[-3:]
    return jnp.broadcast_to(x, (*lead, *tail)).reshape(-1, *tail)


def _key_of(dropout_rng: Any) -> Any:
    """A random key; Flax may hand over a variable that holds one."""
    key = getattr(dropout_rng, "value", dropout_rng)
    if key is None:
        raise argument_error("dropout_rng", None, "a random key, as dropout_rate > 0")
    return key
