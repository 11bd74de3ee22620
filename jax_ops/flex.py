# SPDX-License-Identifier: Apache-2.0
"""`flex_attention`: attention with masks and biases as objects or functions.

The work here is lowering: what the kernels know becomes their operands; a mask that they do not
know becomes a block mask when its values are known; everything else runs blockwise in XLA.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ops import _arguments as arguments
from jax_ops import _jax, _program, block_mask
from jax_ops._errors import UnsupportedError, argument_error, dtype_error
from jax_ops._primitive import avals
from jax_ops._problem import attend, make_problem
from jax_ops._spec import AttentionSpec, Operands, Problem, Sizes, sizes_of
from jax_ops._xla import blockwise
from jax_ops._xla.tile import Mods, score_dtype
from jax_ops.biases import (
    AlibiBias,
    Bias,
    ConstantBias,
    DenseBias,
    DistanceDecayBias,
    SoftCap,
    SumBias,
    as_bias,
)
from jax_ops.masks import (
    AndMask,
    BlockMask,
    CausalMask,
    DenseMask,
    KeyPaddingMask,
    LocalWindowMask,
    Mask,
    NotMask,
    OrMask,
    PrefixLMMask,
    SegmentMask,
    XorMask,
    as_mask,
)


def flex_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    mask: Any = None,
    bias: Any = None,
    scale: Any = None,
    logits_soft_cap: float | None = None,
    alignment: str = "top_left",
    dropout_rate: float = 0.0,
    dropout_key: Any = None,
    dropout_batch_indices: Any = None,
    dropout_head_indices: Any = None,
    precision: str | None = None,
    num_splits: int | str = "auto",
    block_sizes: tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention with composable masks and biases, or with functions for them.

    score = score_mod(soft_cap(scale * q . k)) + bias, then the mask, softmax, dropout, and . v.
    Grouped-query attention is native: query head h reads key/value head h // (Hq // Hkv).

    What runs fused: an `&` of causal, window, prefix-LM, segment, padding, dense and block masks;
    ALiBi, distance-decay, constant and dense biases; soft caps. Any other mask runs fused through a
    `BlockMask` if its values are known while tracing (see `create_block_mask`, which makes one for
    many calls). Any other `score_mod`, and a mask function that captures traced values, runs
    blockwise in XLA: O(L) memory, and true gradients for the arrays that a function captures.

    Functions are traced in every call. Outside of jit, what was compiled is found again when a
    function does the same with other values of the arrays that it captures, be it the same function
    or another one. Compiled anew are: a function that captures another Python number, which is part
    of what it does; one with custom derivative rules or callbacks inside, in every call; and what
    is not among the last 64. A block mask is evaluated in every call that makes one: for many
    calls, make it once.

    Args:
      query: [B, Lq, Hq, D]; float32, bfloat16, float16, or float64 (computed in float64).
      key: [B, Lkv, Hkv, D], query's dtype; Hkv divides Hq.
      value: [B, Lkv, Hkv, Dv], query's dtype. All three may lack B.
      score_mod: function (score, b, h, q_idx, kv_idx) -> score, traced on scalars (float32,
        float64 for float64 inputs; int32 indices), or a `SoftCap`. h is the query head, q_idx the
        plain query position whatever the alignment. Arrays that it captures may be on any devices,
        but not on explicit mesh axes.
      mask_mod: function (b, h, q_idx, kv_idx) -> bool, True meaning attend; traced on scalars.
      mask: a mask object (`CausalMask() & SegmentMask(ids)`, a `BlockMask`, ..) or a bool array;
        with `mask_mod`, both must allow.
      bias: a bias object (`AlibiBias(slopes) + DenseBias(x)`, ..) or a floating array.
      scale: factor on q . k: a number, a differentiable scalar array, or None for 1 / sqrt(D).
      logits_soft_cap: s becomes cap * tanh(s / cap), before everything else.
      alignment: 'top_left': i' = i; 'bottom_right': i' = i + key length - query length, where the
        key length is that of a `KeyPaddingMask` in the outermost `&` of `mask`, else Lkv. Causal,
        window and prefix-LM masks, ALiBi and distance decay use i'.
      dropout_rate: as in `dot_product_attention`.
      dropout_key: as in `dot_product_attention`.
      dropout_batch_indices: as in `dot_product_attention`.
      dropout_head_indices: as in `dot_product_attention`.
      precision: as in `dot_product_attention`.
      num_splits: 'auto', or into how many parts the key axis is split.
      block_sizes: (block_q, block_k), the forward pass's tile sizes, as in `mha`; None lets the
        planner choose.
      implementation: None or 'auto', 'cpu', 'cuda', 'xla', or a peer, as in
        `dot_product_attention`.
      return_residual: also return lse.

    Returns:
      out [B, Lq, Hq, Dv] in query's dtype; with `return_residual` (out, lse), lse [B, Lq, Hq] in
      float32 (float64 for float64 inputs). Without B where the inputs had none.

    Raises:
      ValueError, TypeError: an argument is refused; the message names it.
      UnsupportedError: the implementation that was asked for cannot run this call.

    The function signatures are those of FlexAttention (Dong et al., arXiv:2412.05496).
    """
    block_q, block_k = _block_sizes(block_sizes)
    problem = make_problem(
        query,
        key,
        value,
        scale=scale,
        alignment=alignment,
        logits_soft_cap=logits_soft_cap,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        dropout_batch_indices=dropout_batch_indices,
        dropout_head_indices=dropout_head_indices,
        precision=precision,
        block_q=block_q,
        block_k=block_k,
        num_splits=num_splits,
        implementation=implementation,
    )
    return_residual = arguments.boolean("return_residual", return_residual)
    problem, mods = _lower(problem, score_mod, mask_mod, mask, bias)
    name = problem.spec.implementation
    if mods is None:
        return attend(problem, return_residual)
    if name not in ("auto", "xla"):
        what = "score_mod" if mods.score_mod is not None else "mask"
        raise UnsupportedError(
            f"implementation={name!r}: this {what} is a function that only 'xla' runs "
            "(a mask whose values are known while tracing runs through a BlockMask)"
        )
    out, lse = _run(problem.spec, problem.operands, mods)
    if not problem.batched:
        out, lse = out[0], lse[0]
    return (out, lse) if return_residual else out


def _block_sizes(block_sizes: Any) -> tuple[Any, Any]:
    if block_sizes is None:
        return "auto", "auto"
    if not isinstance(block_sizes, (tuple, list)) or len(block_sizes) != 2:
        raise argument_error("block_sizes", repr(block_sizes), "None or (block_q, block_k)")
    return tuple(block_sizes)


def _lower(
    problem: Problem, score_mod: Any, mask_mod: Any, mask: Any, bias: Any
) -> tuple[Problem, Mods | None]:
    """Puts masks and biases into a problem; Mods holds what no operand can."""
    spec, operands, batched = problem
    sizes = sizes_of(operands)
    dtype = np.dtype(np.float64 if operands.query.dtype == np.float64 else np.float32)

    masks: list[Mask] = []
    if mask is not None:
        masks.append(as_mask("mask", mask))
    if mask_mod is not None:
        hint = "; an array belongs in `mask`"
        arguments.function("mask_mod", mask_mod, "b, h, q_idx, kv_idx", hint)
        masks.append(as_mask("mask_mod", mask_mod))
    other_masks: list[Mask] = []
    with _known_values(masks):
        for term in masks:
            for part in _terms(_simplified(term.bound(sizes, batched)), AndMask):
                spec, operands, left_over = _add_mask(spec, operands, part)
                other_masks.extend(left_over)
        shift = _shift(spec, operands, sizes)
        made = _as_block_mask(operands, other_masks, sizes, shift) if other_masks else None
    if made is not None:
        index, bits = arguments.block_mask((made.index, made.bits), sizes)
        operands = operands._replace(block_index=index, block_bits=bits)
        other_masks = []

    other_biases: list[Bias] = []
    if bias is not None:
        for part in _terms(as_bias("bias", bias).bound(sizes, batched, dtype), SumBias):
            operands, rest = _add_bias(operands, part, sizes, dtype)
            other_biases.extend(rest)

    if isinstance(score_mod, SoftCap):
        if spec.soft_cap is not None:
            raise argument_error("score_mod", f"{score_mod} with logits_soft_cap", "one of them")
        cap = arguments.soft_cap(score_mod.cap, dtype)
        spec, score_mod = dataclasses.replace(spec, soft_cap=cap), None
    if score_mod is not None:
        _check_score_mod(score_mod, dtype)

    mods = _mods(score_mod, other_masks, other_biases, shift, dtype)
    return Problem(spec, operands, batched), mods


def _known_values(masks: list[Mask]) -> contextlib.AbstractContextManager[None]:
    """Keeps the arrays of masks known under jit, if they are, so that block masks can be made."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(masks)):
        return contextlib.nullcontext()
    return jax.ensure_compile_time_eval()


def _terms(x: Any, combination: type[Any]) -> tuple[Any, ...]:
    return x.terms if isinstance(x, combination) else (x,)


def _simplified(mask: Mask) -> Mask:
    """Carries out operators between dense masks, as long as no larger array comes out."""
    if isinstance(mask, NotMask):
        operand = _simplified(mask.operand)
        return DenseMask(~operand.array) if isinstance(operand, DenseMask) else NotMask(operand)
    if not isinstance(mask, (AndMask, OrMask, XorMask)):
        return mask
    terms = tuple(_simplified(term) for term in mask.terms)
    if isinstance(mask, AndMask):
        # Terms of an `&` inside an `&` came in through a double negation.
        return AndMask(tuple(part for term in terms for part in _terms(term, AndMask)))
    arrays = [term.array for term in terms if isinstance(term, DenseMask)]
    if len(arrays) < len(terms) or not _fits_in_one(arrays):
        return type(mask)(terms)
    operator = jnp.logical_or if isinstance(mask, OrMask) else jnp.logical_xor
    result = arrays[0]
    for array in arrays[1:]:
        result = operator(result, array)
    return DenseMask(result)


def _fits_in_one(arrays: list[jax.Array]) -> bool:
    """Whether arrays broadcast to the shape that one of them has already."""
    shapes = [x.shape for x in arrays]
    return jnp.broadcast_shapes(*shapes) in shapes


def _add_mask(
    spec: AttentionSpec, operands: Operands, mask: Mask
) -> tuple[AttentionSpec, Operands, tuple[Mask, ...]]:
    """Adds one bound term to a call; terms without an operand of their own are handed back."""
    match mask:
        case CausalMask():
            # A prefix that is exempt from causal masking is not exempt from this one.
            spec = dataclasses.replace(spec, causal=True)
            return spec, operands._replace(prefix_lengths=None), ()
        case PrefixLMMask(prefix_lengths=prefix):
            if spec.causal and operands.prefix_lengths is None:
                return spec, operands, ()
            prefix = _smaller(operands.prefix_lengths, prefix)
            spec = dataclasses.replace(spec, causal=True)
            return spec, operands._replace(prefix_lengths=prefix), ()
        case LocalWindowMask(left=left, right=right):
            left = _smaller(spec.window_left, left)
            right = _smaller(spec.window_right, right)
            left, right = arguments.window("LocalWindowMask", (left, right))
            spec = dataclasses.replace(spec, window_left=left, window_right=right)
            return spec, operands, ()
        case KeyPaddingMask(lengths=lengths):
            lengths = _smaller(operands.kv_lengths, lengths)
            return spec, operands._replace(kv_lengths=lengths), ()
        case SegmentMask(query_segment_ids=query_ids, key_value_segment_ids=kv_ids):
            if operands.query_segments is None:
                operands = operands._replace(query_segments=query_ids, kv_segments=kv_ids)
                return spec, operands, ()
        case DenseMask(array=array):
            if operands.mask is None:
                return spec, operands._replace(mask=array), ()
            if _fits_in_one([operands.mask, array]):
                return spec, operands._replace(mask=operands.mask & array), ()
        case BlockMask(index=index, bits=bits):
            if operands.block_index is None:
                return spec, operands._replace(block_index=index, block_bits=bits), ()
    return spec, operands, (mask,)


def _smaller(a: Any, b: Any) -> Any:
    """Minimum of two limits, of which None is no limit."""
    if a is None or b is None:
        return b if a is None else a
    return jnp.minimum(a, b) if isinstance(a, jax.Array) else min(a, b)


def _add_bias(
    operands: Operands, bias: Bias, sizes: Sizes, dtype: np.dtype
) -> tuple[Operands, tuple[Bias, ...]]:
    """Adds one bound term to a call; terms without an operand of their own are handed back."""
    match bias:
        case AlibiBias(slopes=slopes):
            return operands._replace(alibi_slopes=_sum(operands.alibi_slopes, slopes)), ()
        case DistanceDecayBias(alpha=alpha):
            slopes = jnp.broadcast_to(alpha, (1, sizes.hq))
            return operands._replace(alibi_slopes=_sum(operands.alibi_slopes, slopes)), ()
        case ConstantBias(c=c):
            array = c.reshape(1, 1, 1, 1)
        case DenseBias(array=array):
            pass
        case _:
            return operands, (bias,)
    if operands.bias is None:
        return operands._replace(bias=array), ()
    if _fits_in_one([operands.bias, array]):
        return operands._replace(bias=operands.bias.astype(dtype) + array.astype(dtype)), ()
    return operands, (DenseBias(array),)


def _sum(a: jax.Array | None, b: jax.Array) -> jax.Array:
    return b if a is None else a + b


def _shift(spec: AttentionSpec, operands: Operands, sizes: Sizes) -> Any:
    """The alignment i' - i: a number or an int32 array [B]."""
    if not spec.bottom_right:
        return 0
    if operands.kv_lengths is None:
        return sizes.lkv - sizes.lq
    return operands.kv_lengths - sizes.lq


def _check_score_mod(score_mod: Any, dtype: np.dtype) -> None:
    arguments.function("score_mod", score_mod, "score, b, h, q_idx, kv_idx", ", or a SoftCap")
    scalar = jax.ShapeDtypeStruct((), np.int32)
    result = jax.eval_shape(score_mod, jax.ShapeDtypeStruct((), dtype), *[scalar] * 4)
    if getattr(result, "shape", None) != () or not jnp.issubdtype(result.dtype, jnp.floating):
        raise dtype_error(
            "score_mod", f"a function that returns {result}", "one floating score per call"
        )


def _as_block_mask(
    operands: Operands, masks: list[Mask], sizes: Sizes, shift: Any
) -> BlockMask | None:
    """One block mask of all `masks`, and of the one that the operands have already, if any."""
    if operands.block_index is not None:
        arrays = operands.block_index, operands.block_bits
        masks = [*masks, BlockMask(*arrays, sizes.lq, sizes.lkv)]
    return block_mask.evaluate(AndMask(tuple(masks)), sizes, shift)


def _mods(
    score_mod: Any, masks: list[Mask], biases: list[Bias], shift: Any, dtype: np.dtype
) -> Mods | None:
    """The functions that the blockwise path applies; None if there are none."""

    def shift_of(b: Any) -> Any:
        return shift[b] if isinstance(shift, jax.Array) else shift

    def change_score(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if score_mod is not None:
            score = jnp.asarray(score_mod(score, b, h, i, j), dtype)
        for bias in biases:
            score = score + jnp.asarray(bias.value(b, h, i, j, shift_of(b)), dtype)
        return score

    def allows(b: Any, h: Any, i: Any, j: Any) -> Any:
        return AndMask(tuple(masks)).allows(b, h, i, j, shift_of(b))

    changes_score = score_mod is not None or bool(biases)
    if not changes_score and not masks:
        return None
    return Mods(change_score if changes_score else None, allows if masks else None)


def _run(spec: AttentionSpec, operands: Operands, mods: Mods) -> tuple[jax.Array, jax.Array]:
    """The blockwise path, as one program also outside of jit, which a later call finds again."""
    index = [jax.ShapeDtypeStruct((), np.int32)] * 4
    score = jax.ShapeDtypeStruct((), score_dtype(operands))
    traced = [
        (None, []) if function is None else _program.trace(function, *arguments)
        for function, arguments in ((mods.score_mod, [score, *index]), (mods.mask_mod, index))
    ]
    programs, captured = zip(*traced, strict=True)
    if not _jax.has_typed_mesh_axes():
        return _compiled(spec, programs)(operands, captured)
    # Types of values name mesh axes here, and those of a tile are not those of scalars.
    for name, values in zip(("score_mod", "mask_mod"), captured, strict=True):
        if typed := [x for x in values if _jax.has_explicit_axes(x)]:
            raise UnsupportedError(
                f"{name}: got a function that captures {jax.typeof(typed[0])}, an array on "
                "explicit mesh axes; allowed: arrays on none, or the call inside jax.shard_map"
            )
    results = avals.forward_avals(*avals.pack(jax.tree.map(jax.typeof, operands)))
    run = jax.jit(lambda operands: blockwise.attention(spec, operands, mods))
    return _jax.with_automatic_axes(run, results)(operands)


# A bound, because functions that are new in each call would fill a larger one with programs.
@functools.lru_cache(maxsize=64)
def _compiled(
    spec: AttentionSpec, programs: tuple[_program.Program | None, ...]
) -> Callable[[Operands, tuple[list[Any], ...]], tuple[jax.Array, jax.Array]]:
    """The blockwise path of some functions: takes the operands, and what each function captured."""

    @jax.jit
    def run(operands: Operands, captured: tuple[list[Any], ...]) -> tuple[jax.Array, jax.Array]:
        functions = [
            None if program is None else program.bind(values)
            for program, values in zip(programs, captured, strict=True)
        ]
        return blockwise.attention(spec, operands, Mods(*functions))

    return run
