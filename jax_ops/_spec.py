# SPDX-License-Identifier: Apache-2.0
"""The attention problem as Python sees it: one frozen spec, and the array operands beside it.

Every entry point normalises its arguments into an `AttentionSpec` (everything that is static) and
`Operands` (everything that is an array); every implementation reads nothing else. Shapes below
write `*lead` for the batch-like axes: one axis at first, and one more in front for each `jax.vmap`.
All operands have the same number of lead axes, and each lead axis is either full or 1 (shared by
everybody), so that mapping a subset of operands copies nothing.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

# Side of a block-mask tile, in positions (kMaskTile in kernels/common/problem.h).
MASK_TILE = 64
# States of a block-mask tile that need no bits.
EMPTY_TILE = -1
FULL_TILE = -2


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Everything about an attention call that is not an array. Hashable: a primitive parameter.

    Attributes:
      causal: key j is seen by row i only when j <= i', or j < prefix_lengths where that is given.
      bottom_right: i' = i + kv_len - q_len (else i' = i), for causal, window and ALiBi alike.
      window_left: i' - window_left <= j; None is unbounded.
      window_right: j <= i' + window_right; None is unbounded.
      scale: factor on q . k; None means that `Operands.scale` holds it.
      soft_cap: s becomes soft_cap * tanh(s / soft_cap), before bias and mask; None is none.
      dropout_rate: probability that a weight is dropped, in [0, 1]. 0 means no dropout operands.
      precision: 'default' or 'highest'; how float32 products are formed.
      block_q, block_k: tile sizes; 0 lets the planner choose.
      num_splits: number of parts of the key axis (split-KV); 0 lets the planner choose.
      implementation: 'auto', 'cpu', 'cuda', 'emulated' or 'xla'.
      want_dbias, want_dslopes, want_dscale: which optional gradients a backward pass returns. The
        forward pass ignores them.
    """

    causal: bool = False
    bottom_right: bool = False
    window_left: int | None = None
    window_right: int | None = None
    scale: float | None = 1.0
    soft_cap: float | None = None
    dropout_rate: float = 0.0
    precision: str = "default"
    block_q: int = 0
    block_k: int = 0
    num_splits: int = 0
    implementation: str = "auto"
    want_dbias: bool = False
    want_dslopes: bool = False
    want_dscale: bool = False

    @property
    def has_window(self) -> bool:
        """Whether at least one side of the window is bounded."""
        return self.window_left is not None or self.window_right is not None

    @property
    def dropout_threshold(self) -> int:
        """An entry is dropped when its 16-bit uniform value is below this; in [0, 65536]."""
        return round(self.dropout_rate * 65536)

    @property
    def dropout_keep_scale(self) -> float:
        """Factor on kept weights: 1 / (1 - rate); 0 when everything is dropped."""
        return 0.0 if self.dropout_rate >= 1.0 else 1.0 / (1.0 - self.dropout_rate)


class Operands(NamedTuple):
    """The array operands in FFI order (kernels/ffi/schema.h); None where an option is absent.

    `H` is the number of query heads; lengths, ids and indices are int32, seeds and dropout indices
    uint32. Every lead axis is full or 1.
    """

    query: Any  # [*lead, Lq, Hq, D] float32, bfloat16, float16 or float64 ('xla' only)
    key: Any  # [*lead, Lkv, Hkv, D], query's dtype
    value: Any  # [*lead, Lkv, Hkv, Dv], query's dtype
    bias: Any = None  # [*lead, H|1, Lq|1, Lkv|1], any floating dtype
    mask: Any = None  # [*lead, H|1, Lq|1, Lkv|1] bool, True: attend
    query_lengths: Any = None  # [*lead] int32; the implementation clamps to [0, Lq]
    kv_lengths: Any = None  # [*lead] int32; the implementation clamps to [0, Lkv]
    query_segments: Any = None  # [*lead, Lq] int32; negative is padding and attends nothing
    kv_segments: Any = None  # [*lead, Lkv] int32
    alibi_slopes: Any = None  # [*lead, Hq] float32; adds -slope * |i' - j|
    prefix_lengths: Any = None  # [*lead] int32; keys j < prefix are exempt from `causal`
    scale: Any = None  # [*lead] float32 (float64 with float64 inputs); only if spec.scale is None
    dropout_seed: Any = None  # [*lead, 2] uint32
    dropout_batch: Any = None  # [*lead] uint32: the batch index that the dropout counter uses
    dropout_head: Any = None  # [Hq] uint32, no lead axes: the head index that the counter uses
    block_index: Any = None  # [*lead, H|1, ceil(Lq/64), ceil(Lkv/64)] int32: tile state or number
    block_bits: Any = None  # [n, 64, 2] uint32, no lead axes: bit j % 32 of word j / 32 of row i


class Problem(NamedTuple):
    """A validated call."""

    spec: AttentionSpec
    operands: Operands
    batched: bool  # False when the inputs had no batch axis, so that results lose it again


class Gradients(NamedTuple):
    """Gradients of the differentiable operands: each in its operand's own shape and dtype.

    Axes (lead ones too) that an operand has as 1 are summed, in float32 or better. The last three
    are None where the operand is absent or the spec does not want them.
    """

    query: Any
    key: Any
    value: Any
    bias: Any = None
    alibi_slopes: Any = None
    scale: Any = None


# Number of axes behind the lead axes; None marks the two operands that have no lead axes.
TAIL_RANK = Operands(
    query=3,
    key=3,
    value=3,
    bias=3,
    mask=3,
    query_lengths=0,
    kv_lengths=0,
    query_segments=1,
    kv_segments=1,
    alibi_slopes=1,
    prefix_lengths=0,
    scale=0,
    dropout_seed=1,
    dropout_batch=0,
    dropout_head=None,
    block_index=3,
    block_bits=None,
)

# The operands that have gradients, as positions in `Operands`, in `Gradients` order.
DIFFERENTIABLE = tuple(Operands._fields.index(name) for name in Gradients._fields)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a problem; `lead` is the full shape of the lead axes."""

    lead: tuple[int, ...]
    lq: int
    lkv: int
    hq: int
    hkv: int
    d: int
    dv: int

    @property
    def batch(self) -> int:
        """Product of the lead axes."""
        return math.prod(self.lead)

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.hq // self.hkv

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of out: [*lead, Lq, Hq, Dv]."""
        return (*self.lead, self.lq, self.hq, self.dv)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of lse: [*lead, Lq, Hq]."""
        return (*self.lead, self.lq, self.hq)


def full_lead(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Broadcasts lead shapes of one rank in which every axis is full or 1.

    Written out, instead of `np.broadcast_shapes`, because exported programs have symbolic sizes.
    """
    lead = []
    for sizes in zip(*shapes, strict=True):
        size = sizes[0]
        for other in sizes[1:]:
            if isinstance(size, int) and size == 1:
                size = other
        lead.append(size)
    return tuple(lead)


def sizes_of(operands: Operands) -> Sizes:
    """Sizes of the problem that `operands` (arrays, avals or ShapeDtypeStructs) describe."""
    leads = [
        tuple(x.shape[: len(x.shape) - tail])
        for x, tail in zip(operands, TAIL_RANK, strict=True)
        if x is not None and tail is not None
    ]
    *_, lq, hq, d = operands.query.shape
    *_, lkv, hkv, dv = operands.value.shape
    return Sizes(lead=full_lead(leads), lq=lq, lkv=lkv, hq=hq, hkv=hkv, d=d, dv=dv)


def lse_dtype(dtype: Any) -> np.dtype:
    """Dtype of lse for inputs of `dtype`: float32, but float64 for float64 inputs."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)
