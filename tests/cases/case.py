# SPDX-License-Identifier: Apache-2.0
"""A compact, hashable description of a problem, from which seeded arrays are made."""

import dataclasses

import numpy as np

from tests.cases.accuracy import DTYPES
from tests.cases.problem import Problem


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes and options; array-valued options are given by what they look like.

    bias, mask: a string with one character an axis, aligned on the right with "bhqk"; the axis's
      own letter for a full axis, "1" for a repeated one ("h1k" is [Hq, 1, Lkv]).
    segments: number of packed segments per sequence; negative: with padding (-1) at the end.
    scale: a number; "array" makes it a differentiable scalar.
    query_lengths, key_lengths, prefix: one number per batch entry.
    dropout_indices: gives the batch and head indices that dropout counts with, in an odd order.
    """

    b: int = 2
    lq: int = 65
    lkv: int = 65
    hq: int = 2
    hkv: int = 2
    d: int = 32
    dv: int | None = None  # None: d
    dtype: str = "float32"
    scale: float | str | None = None
    causal: bool = False
    bottom_right: bool = False
    window: tuple[int | None, int | None] | None = None
    soft_cap: float | None = None
    bias: str | None = None
    bias_dtype: str = "float32"
    mask: str | None = None
    slopes: bool = False
    segments: int = 0
    query_lengths: tuple[int, ...] | None = None
    key_lengths: tuple[int, ...] | None = None
    prefix: tuple[int, ...] | None = None
    dropout: float = 0.0
    dropout_indices: bool = False
    amplitude: float = 1.0  # of query and key
    seed: int = 0

    def problem(self) -> Problem:
        """Seeded normals in the case's dtype; the other operands as described."""
        rng = np.random.default_rng([self.seed, 1])
        dtype = DTYPES[self.dtype]
        dv = self.d if self.dv is None else self.dv

        def normal(*shape):
            return rng.normal(size=shape).astype(dtype)

        factor = np.asarray(self.amplitude, dtype)
        sizes = {"b": self.b, "h": self.hq, "q": self.lq, "k": self.lkv}

        def axes(spec):
            for letter, own in zip(spec, "bhqk"[4 - len(spec) :], strict=True):
                assert letter in (own, "1"), f"axis {letter!r} of {spec!r} is not {own!r} or '1'"
            return tuple(sizes.get(letter, 1) for letter in spec)

        q_ids, kv_ids = self._segment_ids(rng)
        return Problem(
            query=normal(self.b, self.lq, self.hq, self.d) * factor,
            key=normal(self.b, self.lkv, self.hkv, self.d) * factor,
            value=normal(self.b, self.lkv, self.hkv, dv),
            bias=None
            if self.bias is None
            else rng.normal(size=axes(self.bias)).astype(DTYPES[self.bias_dtype]),
            slopes=rng.uniform(0.02, 0.5, self.hq).astype(np.float32) if self.slopes else None,
            scale=np.asarray(0.3, np.float32) if self.scale == "array" else self.scale,
            mask=None if self.mask is None else rng.random(axes(self.mask)) < 0.7,
            query_lengths=_int32(self.query_lengths),
            key_lengths=_int32(self.key_lengths),
            query_segments=q_ids,
            key_segments=kv_ids,
            prefix=_int32(self.prefix),
            causal=self.causal,
            bottom_right=self.bottom_right,
            window=self.window,
            soft_cap=self.soft_cap,
            dropout_rate=self.dropout,
            dropout_seed=rng.integers(0, 2**32, 2, np.uint32) if self.dropout else None,
            batch_index=7 - 3 * np.arange(self.b, dtype=np.int32) if self.dropout_indices else None,
            head_index=np.arange(self.hq, dtype=np.int32)[::-1] + 5
            if self.dropout_indices
            else None,
        )

    def _segment_ids(self, rng):
        if not self.segments:
            return None, None

        def ids(length):
            marks = np.sort(rng.integers(0, length + 1, (self.b, abs(self.segments) - 1)), 1)
            values = (np.arange(length)[None, :, None] >= marks[:, None, :]).sum(2)
            if self.segments < 0:
                values[:, length - length // 5 :] = -1
            return values.astype(np.int32)

        if self.lq == self.lkv:
            q_ids = ids(self.lq)
            return q_ids, q_ids
        return ids(self.lq), ids(self.lkv)

    def cotangents(self):
        """(dout in the case's dtype, dlse float32; float64 for float64)."""
        rng = np.random.default_rng([self.seed, 2])
        dv = self.d if self.dv is None else self.dv
        lse_dtype = np.float64 if self.dtype == "float64" else np.float32
        return (
            rng.normal(size=(self.b, self.lq, self.hq, dv)).astype(DTYPES[self.dtype]),
            rng.normal(size=(self.b, self.lq, self.hq)).astype(lse_dtype),
        )


def _int32(values):
    return None if values is None else np.asarray(values, np.int32)
