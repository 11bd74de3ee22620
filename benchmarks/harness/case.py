# SPDX-License-Identifier: Apache-2.0
"""One benchmark case: the attention problem, direction and knobs, without implementation."""

from __future__ import annotations

import dataclasses
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MODES = ("fwd", "fwd_bwd")
MIB = float(1 << 20)


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes are q [batch, lq, hq, head_dim], k and v [batch, lkv, hkv, head_dim].

    `causal` is aligned bottom-right (the last query sees the last key); for lq == lkv, which is
    every self-attention suite, that is the ordinary causal mask.

    `num_splits` ('auto' or a count), `block_k` (keys per tile) and `model_dim` (layer suite) are
    None where the suite does not set them.
    """

    suite: str
    dtype: str
    mode: str
    batch: int
    lq: int
    lkv: int
    hq: int
    hkv: int
    head_dim: int
    causal: bool = False
    num_splits: int | str | None = None
    block_k: int | None = None
    model_dim: int | None = None

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.hq // self.hkv

    @property
    def kv_mb(self) -> float:
        """Size of K and V together, in MiB."""
        elements = 2 * self.batch * self.lkv * self.hkv * self.head_dim
        return elements * DTYPE_BYTES[self.dtype] / MIB

    @property
    def problem(self) -> Case:
        """The case without its knobs: cases of one problem share inputs and reference."""
        return dataclasses.replace(self, num_splits=None, block_k=None)

    def row_fields(self) -> dict[str, Any]:
        """The part of a result row that identifies this case; unset knobs are left out."""
        fields = dataclasses.asdict(self)
        return {name: value for name, value in fields.items() if value is not None}

    def contender(self, impl: str) -> str:
        """The implementation with its knobs: unique among those that share the problem."""
        return " ".join([impl, *self._knobs()])

    def _knobs(self) -> list[str]:
        knobs = {"splits": self.num_splits, "block_k": self.block_k}
        return [f"{name}={value}" for name, value in knobs.items() if value is not None]

    def label(self) -> str:
        """A short text for progress lines and tables."""
        lengths = f"L{self.lq}" if self.lq == self.lkv else f"Lq{self.lq} Lkv{self.lkv}"
        heads = f"H{self.hq}" if self.hq == self.hkv else f"H{self.hq}/{self.hkv}"
        parts = [self.dtype, self.mode, f"B{self.batch}", lengths, heads, f"D{self.head_dim}"]
        if self.causal:
            parts.append("causal")
        return " ".join([*parts, *self._knobs()])
