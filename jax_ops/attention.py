# SPDX-License-Identifier: Apache-2.0
"""`dot_product_attention`: jax.nn's function, with more options and one meaning everywhere."""

from __future__ import annotations

from typing import Any

import jax

from jax_ops._arguments import boolean
from jax_ops._problem import attend, make_problem
from jax_ops._spec import Problem


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    query_segment_ids: Any = None,
    key_value_segment_ids: Any = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Any = None,
    dropout_rate: float = 0.0,
    dropout_key: Any = None,
    dropout_batch_indices: Any = None,
    dropout_head_indices: Any = None,
    alignment: str = "top_left",
    precision: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Fused scaled dot-product attention; differentiable in every array argument.

    softmax(mask(soft_cap(scale * q . k) + bias + alibi)) . v, in O(L) memory. Names, defaults and
    meaning are those of `jax.nn.dot_product_attention`, except for the list in
    docs/compatibility.md. Query head h reads key/value head h // (Hq // Hkv); K and V are not
    repeated. A row with no allowed key gives 0, its lse is -inf, and it has no gradient.

    Args:
      query: [B, Lq, Hq, D]; float32, bfloat16, float16, or float64 (computed in float64).
      key: [B, Lkv, Hkv, D], query's dtype; Hkv divides Hq.
      value: [B, Lkv, Hkv, Dv], query's dtype. All three may lack B.
      bias: floating, added to the scores in float32; of rank 1 to 4, aligned on the right with
        [B, Hq, Lq, Lkv], each axis 1 or full. Its gradient has its own shape and dtype. An entry of
        -inf masks.
      mask: bool, of the same family of shapes; True means attend.
      scale: factor on q . k: a number, a differentiable scalar array, or None for 1 / sqrt(D).
      is_causal: row i sees keys j <= i' (see `alignment`).
      query_seq_lengths: integer [B], clamped to [0, Lq]; later rows see nothing.
      key_value_seq_lengths: integer [B], clamped to [0, Lkv]; later keys are seen by nobody.
      local_window_size: (left, right): i' - left <= j <= i' + right; an integer w means (w, w),
        None is an unbounded side. Intersected with `is_causal`.
      implementation: None or 'auto', or 'cpu', 'cuda', 'xla'; 'jax_xla' and 'jax_cudnn' (also
        'cudnn') delegate to jax.nn with its own semantics. `explain` tells what would run.
      return_residual: also return lse [B, Lq, Hq], the natural logarithm of the softmax
        denominators; differentiable.
      query_segment_ids: integer [B, Lq]; row i sees key j only where ids are equal. Negative ids
        are padding and see nothing. Alone they serve both sides (Lq = Lkv).
      key_value_segment_ids: integer [B, Lkv].
      logits_soft_cap: s becomes cap * tanh(s / cap), before bias and mask.
      alibi_slopes: floating [Hq] or [B, Hq]: adds -slope * |i' - j|.
      dropout_rate: probability in [0, 1], to 1/2^16, that a weight is dropped; the others are
        divided by 1 - rate. Which ones depends on (dropout_key, batch index, head index, i, j).
      dropout_key: a typed or raw JAX random key; required when dropout_rate > 0.
      dropout_batch_indices: integer [B]: the batch indices that dropout uses, 0, 1, .. by default.
        Inside shard_map, where those are local, give the global ones.
      dropout_head_indices: integer [Hq]: the same for query heads.
      alignment: 'top_left': i' = i; 'bottom_right': i' = i + (key length - query length) of each
        batch entry, which lines up the last query with the last key.
      precision: for float32 inputs: None or 'default' follows jax.default_matmul_precision;
        'highest' is float32 accuracy on every device. It has no effect on other dtypes.

    Returns:
      out [B, Lq, Hq, Dv] in query's dtype; with `return_residual` (out, lse), lse in float32
      (float64 for float64 inputs). Without B where the inputs had none.

    Raises:
      ValueError, TypeError: an argument is refused; the message names it, what it got and what is
        allowed. Wrong dtypes raise an error that is both.
      UnsupportedError: the implementation that was asked for cannot run this call (a ValueError and
        NotImplementedError).
    """
    problem = problem_of(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        implementation=implementation,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        logits_soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        dropout_batch_indices=dropout_batch_indices,
        dropout_head_indices=dropout_head_indices,
        alignment=alignment,
        precision=precision,
    )
    return attend(problem, return_residual)


def problem_of(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    local_window_size: Any = None,
    return_residual: bool = False,
    **options: Any,
) -> Problem:
    """The normalised problem of a `dot_product_attention` call; takes its arguments."""
    boolean("return_residual", return_residual)
    return make_problem(
        query, key, value, bias=bias, mask=mask, window=local_window_size, **options
    )
