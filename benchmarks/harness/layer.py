# SPDX-License-Identifier: Apache-2.0
"""Suite layer: a multi-head attention layer, x [B, L, M] -> q, k, v -> attention -> [B, L, M].

Weights are w_q [M, Hq, D], w_k and w_v [M, Hkv, D], w_o [Hq, D, M], without biases. `default` is
two lines of jax.numpy around dot_product_attention; `flax` is flax.linen's
MultiHeadDotProductAttention with the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.harness import inputs, reference
from benchmarks.harness.case import Case
from benchmarks.harness.implementations import IMPLEMENTATIONS, flax_linen
from benchmarks.harness.inputs import Arrays
from benchmarks.harness.program import JaxProgram, Program


class LayerOperation:
    """Forward: the layer's output. Training step: gradients of x and of every weight."""

    def part_names(self, case: Case) -> tuple[str, ...]:
        return ("out",) if case.mode == "fwd" else ("dx", "dw_q", "dw_k", "dw_v", "dw_o")

    def inputs(self, case: Case) -> Arrays:
        rng = np.random.default_rng(inputs.seed_of(case))
        width, dim = _width(case), case.head_dim
        x_shape = (case.batch, case.lq, width)

        def weight(*shape: int) -> np.ndarray:
            # Variance 1 / fan-in keeps the scores of unit size, as an initialiser would.
            fan_in = width if shape[0] == width else shape[0] * shape[1]
            draw = rng.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(fan_in))
            return draw.astype(inputs.NUMPY_DTYPES[case.dtype])

        arrays = (
            inputs.normal(rng, x_shape, case.dtype),
            weight(width, case.hq, dim),
            weight(width, case.hkv, dim),
            weight(width, case.hkv, dim),
            weight(case.hq, dim, width),
        )
        if case.mode == "fwd":
            return arrays
        return (*arrays, inputs.normal(rng, x_shape, case.dtype))

    def reference(self, case: Case, arrays: Arrays, arithmetic: reference.Arithmetic) -> Arrays:
        x, w_q, w_k, w_v, w_o = (array.astype(arithmetic.accumulate) for array in arrays[:5])
        keep = arithmetic.product_operand
        q, k, v = (keep(np.tensordot(x, w, 1)) for w in (w_q, w_k, w_v))
        (attended,) = reference.attention(case, q, k, v, None, arithmetic)
        attended = keep(attended)
        if case.mode == "fwd":
            return (arithmetic.result(np.tensordot(attended, w_o, 2)),)
        d_out = arrays[5].astype(arithmetic.accumulate)
        d_attended = keep(np.tensordot(d_out, w_o, ((2,), (2,))))
        grads = reference.attention(case, q, k, v, d_attended, arithmetic)
        tokens = ((0, 1), (0, 1))
        dx = sum(
            np.tensordot(keep(grad), weight, ((2, 3), (1, 2)))
            for grad, weight in zip(grads, (w_q, w_k, w_v), strict=True)
        )
        d_weights = [np.tensordot(x, keep(grad), tokens) for grad in grads]
        d_wo = np.tensordot(attended, d_out, tokens)
        return tuple(arithmetic.result(array) for array in (dx, *d_weights, d_wo))

    def reordered(self, arrays: Arrays, variant: int, back: bool = False) -> Arrays:
        # The four weights, or their gradients, follow the first array: the width and, apart from
        # it, the features of the heads change their order.
        width = inputs.feature_order(arrays[0].shape[-1], variant, back)
        results = []
        for place, array in enumerate(arrays):
            if place in (1, 2, 3):
                dim = inputs.feature_order(array.shape[-1], variant, back)
                results.append(array[width][..., dim])
            elif place == 4:
                dim = inputs.feature_order(array.shape[1], variant, back)
                results.append(array[:, dim][..., width])
            else:
                results.append(array[..., width])
        return tuple(results)

    def program(self, impl: str, case: Case, arrays: Arrays, backend: str) -> Program:
        builders: dict[str, Callable[[Case, str], Callable[..., Any]]] = {
            "default": _default_layer,
            "flax": _flax_layer,
        }
        function = builders[impl](case, backend)
        return JaxProgram(function, arrays, case.mode == "fwd_bwd", backend)


def _width(case: Case) -> int:
    assert case.model_dim is not None
    return case.model_dim


def _default_layer(case: Case, backend: str) -> Callable[..., Any]:
    import jax.numpy as jnp

    attention = IMPLEMENTATIONS["default"].build(case, backend)

    def layer(x, w_q, w_k, w_v, w_o):
        q, k, v = (jnp.einsum("blm,mhd->blhd", x, w) for w in (w_q, w_k, w_v))
        return jnp.einsum("blhd,hdm->blm", attention(q, k, v), w_o)

    return layer


def _flax_layer(case: Case, backend: str) -> Callable[..., Any]:
    import jax.numpy as jnp

    linen = flax_linen(case)
    module = linen.MultiHeadDotProductAttention(
        num_heads=case.hq,
        qkv_features=case.hq * case.head_dim,
        out_features=_width(case),
        use_bias=False,
        dtype=jnp.dtype(case.dtype),
    )

    def layer(x, w_q, w_k, w_v, w_o):
        params = {
            "query": {"kernel": w_q},
            "key": {"kernel": w_k},
            "value": {"kernel": w_v},
            "out": {"kernel": w_o},
        }
        mask = linen.make_causal_mask(jnp.ones((1, case.lq))) if case.causal else None
        return module.apply({"params": params}, x, x, mask=mask)

    return layer
