# SPDX-License-Identifier: Apache-2.0
"""The implementations that can be measured, by the name that flags and rows use.

Each is a function of a case that returns the attention function to compile, or raises
UnsupportedCaseError with the reason. Libraries are imported only when a case needs them, so that a
missing peer is an error row and not a crash.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from benchmarks.harness.case import Case
from benchmarks.harness.errors import UnsupportedCaseError

# The implementation of jax_ops that holds the fused kernel of each JAX backend.
FUSED_KERNEL = {"cpu": "cpu", "gpu": "cuda"}

# Names in the reference data, read wherever a name is read and never written.
ALIASES = {
    "probjax_default": "default",
    "probjax_flex": "flex_native",
    "probjax_mha": "mha",
    "probjax_flax": "flax",
    "probjax_splitkv": "splitkv",
    "probjax_nosplit": "nosplit",
}

AttentionFunction = Callable[[Any, Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One thing a user could call.

    Attributes:
      name: the flag and row name.
      library: the importable package that it needs ('jax_ops', 'jax', 'flax', 'torch').
      summary: one line for --help and docs.
      build: (case, backend) -> function of q, k, v in the layout [B, L, H, D].
      strict: whether the accuracy rule is a condition of being measured. Peers are only held to a
        multiple of it, and so is flex_repeat, whose dk and dv XLA sums over the repeated heads in
        the inputs' precision.
    """

    name: str
    library: str
    summary: str
    build: Callable[[Case, str], AttentionFunction]
    strict: bool = False


def canonical(name: str) -> str:
    """Maps a name of the reference data to ours; other names are returned as they are."""
    return ALIASES.get(name, name)


def _jax_ops() -> Any:
    try:
        import jax_ops
    except ImportError as error:
        raise UnsupportedCaseError(f"jax_ops cannot be imported: {error}") from error
    return jax_ops


def _alignment(case: Case) -> str:
    return "bottom_right" if case.causal and case.lq != case.lkv else "top_left"


def _refuse_knobs(case: Case, name: str) -> None:
    for knob in ("num_splits", "block_k"):
        if getattr(case, knob) is not None:
            raise UnsupportedCaseError(f"{name} has no {knob}")


def _default(case: Case, backend: str) -> AttentionFunction:
    ops = _jax_ops()
    _refuse_knobs(case, "default")

    def call(q, k, v):
        return ops.dot_product_attention(q, k, v, is_causal=case.causal, alignment=_alignment(case))

    return call


def _flex(case: Case, backend: str, num_splits: int | str) -> AttentionFunction:
    ops = _jax_ops()
    if case.block_k is not None:
        raise UnsupportedCaseError(
            "flex_attention is measured with automatic tiles; block_k needs mha"
        )
    mask = ops.CausalMask() if case.causal else None

    def call(q, k, v):
        return ops.flex_attention(
            q,
            k,
            v,
            mask=mask,
            alignment=_alignment(case),
            num_splits=num_splits,
            implementation=FUSED_KERNEL[backend],
        )

    return call


def _flex_native(case: Case, backend: str) -> AttentionFunction:
    return _flex(case, backend, "auto" if case.num_splits is None else case.num_splits)


def _nosplit(case: Case, backend: str) -> AttentionFunction:
    if case.num_splits not in (None, 1):
        raise UnsupportedCaseError(f"nosplit has one split, not {case.num_splits}")
    return _flex(case, backend, 1)


def _flex_repeat(case: Case, backend: str) -> AttentionFunction:
    import jax.numpy as jnp

    native = _flex_native(case, backend)

    def call(q, k, v):
        return native(q, jnp.repeat(k, case.group, axis=2), jnp.repeat(v, case.group, axis=2))

    return call


def _mha(case: Case, backend: str) -> AttentionFunction:
    ops = _jax_ops()
    if _alignment(case) != "top_left":
        raise UnsupportedCaseError("mha aligns causal top-left; this case has Lq != Lkv")
    sizes = {}
    if case.block_k is not None:
        sizes["block_k"] = case.block_k
    if case.num_splits is not None:
        sizes["num_splits"] = case.num_splits

    def call(q, k, v):
        return ops.mha(q, k, v, causal=case.causal, implementation=FUSED_KERNEL[backend], **sizes)

    return call


def flax_linen(case: Case) -> Any:
    """The module flax.linen; refuses what its attention lacks."""
    try:
        from flax import linen
    except ImportError as error:
        raise UnsupportedCaseError(
            f"flax is not installed ({error}); it comes with --config=peers"
        ) from error
    if case.group != 1:
        raise UnsupportedCaseError(
            f"flax needs equal head counts, got Hq={case.hq} and Hkv={case.hkv}"
        )
    return linen


def _flax(case: Case, backend: str) -> AttentionFunction:
    import jax.numpy as jnp

    linen = flax_linen(case)
    _refuse_knobs(case, "flax")
    if case.causal and case.lq != case.lkv:
        raise UnsupportedCaseError("flax's causal mask is top-left; this case has Lq != Lkv")

    def call(q, k, v):
        mask = linen.make_causal_mask(jnp.ones((1, case.lq))) if case.causal else None
        return linen.dot_product_attention(q, k, v, mask=mask)

    return call


def _jax_nn(case: Case, backend: str, implementation: str) -> AttentionFunction:
    import jax

    _refuse_knobs(case, f"jax_{implementation}")
    if implementation == "cudnn" and backend == "cpu":
        raise UnsupportedCaseError("jax_cudnn needs a GPU")
    if implementation == "cudnn" and case.dtype == "float32":
        raise UnsupportedCaseError("cuDNN's fused attention takes bfloat16 and float16 only")
    if case.causal and case.lq != case.lkv:
        raise UnsupportedCaseError("jax.nn aligns causal top-left; this case has Lq != Lkv")
    if implementation == "xla" and backend == "cpu" and case.dtype == "float16":
        raise UnsupportedCaseError(
            "jax.nn's float16 product with float32 accumulation is missing on the CPU"
        )

    def call(q, k, v):
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=case.causal, implementation=implementation
        )

    return call


def _jax_xla(case: Case, backend: str) -> AttentionFunction:
    return _jax_nn(case, backend, "xla")


def _jax_cudnn(case: Case, backend: str) -> AttentionFunction:
    return _jax_nn(case, backend, "cudnn")


def _torch_sdpa(case: Case, backend: str) -> AttentionFunction:
    from benchmarks.harness import torch_peer

    _refuse_knobs(case, "torch_sdpa")
    return torch_peer.attention(case)


IMPLEMENTATIONS: dict[str, Implementation] = {
    implementation.name: implementation
    for implementation in (
        Implementation(
            "default", "jax_ops", "dot_product_attention, free choice", _default, strict=True
        ),
        Implementation(
            "flex_native", "jax_ops", "the fused kernel, native GQA", _flex_native, strict=True
        ),
        Implementation("flex_repeat", "jax_ops", "the same on repeated K and V", _flex_repeat),
        Implementation("mha", "jax_ops", "the bare kernel call", _mha, strict=True),
        Implementation(
            "splitkv", "jax_ops", "fused, automatic split-KV", _flex_native, strict=True
        ),
        Implementation("nosplit", "jax_ops", "fused, one split", _nosplit, strict=True),
        Implementation("flax", "flax", "flax.linen.dot_product_attention", _flax),
        Implementation("jax_xla", "jax", "jax.nn.dot_product_attention on XLA", _jax_xla),
        Implementation("jax_cudnn", "jax", "jax.nn.dot_product_attention on cuDNN", _jax_cudnn),
        Implementation("torch_sdpa", "torch", "torch scaled_dot_product_attention", _torch_sdpa),
    )
}


def precision_of(name: str, dtype: str, backend: str) -> str:
    """What the products' operands are rounded to: the row's `precision`.

    On a GPU, JAX's float32 products are TF32 unless jax_default_matmul_precision says otherwise;
    torch's are true float32 unless it is told to allow TF32, which nothing here does.
    """
    if dtype != "float32" or backend == "cpu":
        return dtype
    if IMPLEMENTATIONS[name].library == "torch":
        return "float32"
    import jax

    true_float32 = ("highest", "float32", "F32_F32_F32")
    return "float32" if jax.config.jax_default_matmul_precision in true_float32 else "tf32"
