# SPDX-License-Identifier: Apache-2.0
"""Runs a problem through the public API on one backend, compiled once per shape and option set."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jax_ops
from tests.cases.backends import Backend
from tests.cases.problem import DIFFERENTIABLE, Problem

_ARRAYS = (
    *DIFFERENTIABLE,
    "mask",
    "query_lengths",
    "key_lengths",
    "query_segments",
    "key_segments",
    "prefix",
    "dropout_key",
    "batch_index",
    "head_index",
)


def split(problem: Problem):
    """(arrays by name, static options as a hashable tuple)."""
    arrays = {}
    for name in _ARRAYS:
        x = getattr(problem, name, None)
        if isinstance(x, np.ndarray):
            arrays[name] = x
    if problem.dropout_seed is not None:
        arrays["dropout_key"] = jax.random.wrap_key_data(
            jnp.asarray(problem.dropout_seed), impl="threefry2x32"
        )
    static = {
        "scale": None if isinstance(problem.scale, np.ndarray) else problem.scale,
        "causal": problem.causal,
        "bottom_right": problem.bottom_right,
        "window": problem.window,
        "soft_cap": problem.soft_cap,
        "dropout_rate": problem.dropout_rate,
    }
    return arrays, tuple(static.items())


def call(backend: Backend, arrays, static, entry="dot_product_attention", **extra):
    """(out, lse) of one public call with the arrays and options of a problem.

    entry: the public function, or the way in which it is called: see ENTRIES.
    """
    return ENTRIES[entry](backend, dict(arrays), dict(static), **extra)


def _dot_product_attention(backend, arrays, options, **extra):
    assert "prefix" not in arrays, "prefix lengths exist as a mask object only"
    return jax_ops.dot_product_attention(
        arrays["query"],
        arrays["key"],
        arrays["value"],
        arrays.get("bias"),
        arrays.get("mask"),
        scale=arrays.get("scale", options["scale"]),
        is_causal=options["causal"],
        query_seq_lengths=arrays.get("query_lengths"),
        key_value_seq_lengths=arrays.get("key_lengths"),
        local_window_size=options["window"],
        implementation=backend.name,
        return_residual=True,
        query_segment_ids=arrays.get("query_segments"),
        key_value_segment_ids=arrays.get("key_segments"),
        logits_soft_cap=options["soft_cap"],
        alibi_slopes=arrays.get("slopes"),
        dropout_rate=options["dropout_rate"],
        dropout_key=arrays.get("dropout_key"),
        dropout_batch_indices=arrays.get("batch_index"),
        dropout_head_indices=arrays.get("head_index"),
        alignment="bottom_right" if options["bottom_right"] else "top_left",
        **extra,
    )


def _flex(backend, arrays, options, **extra):
    """flex_attention with what the caller gives as masks, biases or functions."""
    return jax_ops.flex_attention(
        arrays["query"],
        arrays["key"],
        arrays["value"],
        scale=arrays.get("scale", options["scale"]),
        logits_soft_cap=options["soft_cap"],
        implementation=backend.name,
        return_residual=True,
        **extra,
    )


def _prefix_mask(backend, arrays, options, **extra):
    mask = jax_ops.PrefixLMMask(arrays["prefix"])
    return _flex(backend, arrays, options, mask=mask, **extra)


def striped(b, h, q_idx, kv_idx):
    """A mask that no mask object describes; NumPy and JAX integers alike."""
    return (q_idx // 24 + 2 * kv_idx // 24 + h) % 3 != 0


def _mask_mod(backend, arrays, options, **extra):
    return _flex(backend, arrays, options, mask_mod=striped, **extra)


def _score_mod(backend, arrays, options, **extra):
    """The problem's bias, of shape [Hq, Lq, Lkv], as a captured array."""
    bias = arrays["bias"]

    def add_bias(score, b, h, q_idx, kv_idx):
        return score + bias[h, q_idx, kv_idx]

    return _flex(backend, arrays, options, score_mod=add_bias, **extra)


def _flex_everything(backend, arrays, options, **extra):
    """Every argument of flex_attention at once; the problem's mask is `striped`."""
    mask = (
        jax_ops.CausalMask()
        & jax_ops.LocalWindowMask(*options["window"])
        & jax_ops.SegmentMask(arrays["query_segments"], arrays["key_segments"])
        & jax_ops.KeyPaddingMask(arrays["key_lengths"])
    )
    return _flex(
        backend,
        arrays,
        options,
        mask=mask,
        mask_mod=striped,
        bias=jax_ops.AlibiBias(arrays["slopes"]) + jax_ops.DenseBias(arrays["bias"]),
        alignment="bottom_right",
        dropout_rate=options["dropout_rate"],
        dropout_key=arrays["dropout_key"],
        dropout_batch_indices=arrays["batch_index"],
        dropout_head_indices=arrays["head_index"],
        **extra,
    )


def _soft_cap_object(backend, arrays, options, **extra):
    cap, options = options["soft_cap"], {**options, "soft_cap": None}
    return _flex(backend, arrays, options, score_mod=jax_ops.SoftCap(cap), **extra)


def _mha(backend, arrays, options, **extra):
    return jax_ops.mha(
        arrays["query"],
        arrays["key"],
        arrays["value"],
        causal=options["causal"],
        scale=options["scale"],
        implementation=backend.name,
        return_residual=True,
        **extra,
    )


def _decode(backend, arrays, options, **extra):
    return jax_ops.decode_attention(
        arrays["query"],
        arrays["key"],
        arrays["value"],
        arrays["key_lengths"],
        local_window_size=options["window"],
        scale=arrays.get("scale", options["scale"]),
        logits_soft_cap=options["soft_cap"],
        alibi_slopes=arrays.get("slopes"),
        implementation=backend.name,
        return_residual=True,
        **extra,
    )


ENTRIES = {
    "dot_product_attention": _dot_product_attention,
    "prefix_mask": _prefix_mask,
    "flex_everything": _flex_everything,
    "soft_cap_object": _soft_cap_object,
    "mask_mod": _mask_mod,
    "score_mod": _score_mod,
    "mha": _mha,
    "decode_attention": _decode,
}


def differentiable(arrays):
    return {n: arrays[n] for n in DIFFERENTIABLE if n in arrays}


def _function(backend, static, operation, extra):
    extra = dict(extra)

    def forward(arrays):
        return call(backend, arrays, static, **extra)

    def vjp(arrays, dout, dlse):
        rest = {n: x for n, x in arrays.items() if n not in DIFFERENTIABLE}
        results, pullback = jax.vjp(lambda o: forward({**rest, **o}), differentiable(arrays))
        (gradients,) = pullback((dout, dlse))
        return results, gradients

    def jvp(arrays, tangents):
        rest = {n: x for n, x in arrays.items() if n not in tangents}
        primals = {n: arrays[n] for n in tangents}
        return jax.jvp(lambda o: forward({**rest, **o}), (primals,), (tangents,))

    return {"forward": forward, "vjp": vjp, "jvp": jvp}[operation]


@functools.lru_cache(maxsize=256)
def _compiled(backend, static, operation, extra, treedef, avals):
    """Compiles ahead of time, and checks that the intended implementation is in the program."""
    args = jax.tree.unflatten(treedef, avals)
    lowered = jax.jit(_function(backend, static, operation, extra)).lower(*args)
    compiled = lowered.compile()
    backend.assert_ran(compiled.as_text())
    return compiled


def forget() -> None:
    """Drops every compiled program, so that the next call is planned anew."""
    jax.clear_caches()
    _compiled.cache_clear()


def compile_problem(problem: Problem, backend: Backend, operation="forward", *args, **extra):
    """The compiled program and its arguments.

    operation: 'forward', 'vjp' (args: dout, dlse) or 'jvp' (args: tangents by name).
    """
    arrays, static = split(problem)
    leaves, treedef = jax.tree.flatten((arrays, *args))
    leaves = [jnp.asarray(x) for x in leaves]
    avals = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
    extra = tuple(sorted(extra.items()))
    program = _compiled(backend, static, operation, extra, treedef, avals)
    return program, jax.tree.unflatten(treedef, leaves)


def forward(problem: Problem, backend: Backend, **extra):
    """{'out', 'lse'} as NumPy arrays."""
    program, args = compile_problem(problem, backend, "forward", **extra)
    out, lse = program(*args)
    return {"out": np.asarray(out), "lse": np.asarray(lse)}


def vjp(problem: Problem, backend: Backend, dout, dlse, **extra):
    """({'out', 'lse'}, gradients by operand name) as NumPy arrays."""
    program, args = compile_problem(problem, backend, "vjp", dout, dlse, **extra)
    (out, lse), gradients = program(*args)
    results = {"out": np.asarray(out), "lse": np.asarray(lse)}
    return results, {n: np.asarray(g) for n, g in gradients.items()}


def jvp(problem: Problem, backend: Backend, tangents, **extra):
    """(results, tangents of the results), each {'out', 'lse'}."""
    program, args = compile_problem(problem, backend, "jvp", tangents, **extra)
    results, moved = program(*args)
    names = ("out", "lse")
    return tuple(dict(zip(names, map(np.asarray, pair), strict=True)) for pair in (results, moved))


def eager(problem: Problem, backend: Backend, dout, dlse, **extra):
    """Like `vjp`, without jit around it."""
    arrays, static = split(problem)
    arrays = {n: jnp.asarray(x) for n, x in arrays.items()}
    function = _function(backend, static, "vjp", tuple(sorted(extra.items())))
    (out, lse), gradients = function(arrays, jnp.asarray(dout), jnp.asarray(dlse))
    results = {"out": np.asarray(out), "lse": np.asarray(lse)}
    return results, {n: np.asarray(g) for n, g in gradients.items()}
