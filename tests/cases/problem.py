# SPDX-License-Identifier: Apache-2.0
"""One attention problem as plain NumPy arrays, and which (query, key) pairs it allows."""

import dataclasses

import numpy as np

from tests.cases import philox

# Operands that have a gradient, in the order in which results list them.
DIFFERENTIABLE = ("query", "key", "value", "bias", "slopes", "scale")


@dataclasses.dataclass(frozen=True)
class Problem:
    """Inputs and options of one call. Arrays keep the dtype in which the backend gets them.

    Shapes: query [B, Lq, Hq, D], key [B, Lkv, Hkv, D], value [B, Lkv, Hkv, Dv]; bias and mask
    broadcast to [B, Hq, Lq, Lkv] as in NumPy; lengths [B]; segments [B, Lq] and [B, Lkv]; slopes
    [Hq]; prefix [B]; scale a float or a scalar array.
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    bias: np.ndarray | None = None
    slopes: np.ndarray | None = None
    scale: float | np.ndarray | None = None  # None: 1 / sqrt(D)
    mask: np.ndarray | None = None
    query_lengths: np.ndarray | None = None
    key_lengths: np.ndarray | None = None
    query_segments: np.ndarray | None = None
    key_segments: np.ndarray | None = None
    prefix: np.ndarray | None = None
    causal: bool = False
    bottom_right: bool = False
    window: tuple[int | None, int | None] | None = None
    soft_cap: float | None = None
    dropout_rate: float = 0.0
    dropout_seed: np.ndarray | None = None  # two uint32 words
    batch_index: np.ndarray | None = None  # None: 0 .. B - 1
    head_index: np.ndarray | None = None  # None: 0 .. Hq - 1

    @property
    def sizes(self):
        """(B, Lq, Lkv, Hq, Hkv, D, Dv)."""
        b, lq, hq, d = self.query.shape
        _, lkv, hkv, dv = self.value.shape
        return b, lq, lkv, hq, hkv, d, dv

    def with_arrays(self, **arrays):
        return dataclasses.replace(self, **arrays)

    def positions(self):
        """Aligned query positions i' [B, Lq] and key positions j [Lkv], as integers."""
        b, lq, lkv, *_ = self.sizes
        q_len, kv_len = self.lengths()
        shift = kv_len - q_len if self.bottom_right else np.zeros(b, np.int64)
        return np.arange(lq)[None, :] + shift[:, None], np.arange(lkv)

    def lengths(self):
        """Clamped query and key lengths, [B] each."""
        b, lq, lkv, *_ = self.sizes

        def clamp(lengths, limit):
            if lengths is None:
                return np.full(b, limit, np.int64)
            values = [min(max(int(x), 0), limit) for x in np.ravel(lengths)]
            return np.broadcast_to(np.asarray(values, np.int64), b)

        return clamp(self.query_lengths, lq), clamp(self.key_lengths, lkv)

    def distance(self):
        """|i' - j| as [B, Lq, Lkv] integers."""
        i, j = self.positions()
        return np.abs(i[:, :, None] - j)

    def allowed(self):
        """Which pairs take part: bool [B, Hq, Lq, Lkv]. A -inf bias forbids a pair, too."""
        b, lq, lkv, hq, *_ = self.sizes
        aligned, j = self.positions()
        i = aligned[:, :, None]
        q_len, kv_len = self.lengths()
        ok = (np.arange(lq)[None, :, None] < q_len[:, None, None]) & (j < kv_len[:, None, None])
        if self.causal:
            below = j <= i
            if self.prefix is not None:
                below = below | (j < np.asarray(self.prefix, np.int64).reshape(-1, 1, 1))
            ok = ok & below
        if self.window is not None:
            left, right = self.window
            if left is not None:
                ok = ok & (j >= i - left)
            if right is not None:
                ok = ok & (j <= i + right)
        if self.query_segments is not None:
            q_ids = np.asarray(self.query_segments)
            kv_ids = q_ids if self.key_segments is None else np.asarray(self.key_segments)
            same = (q_ids[:, :, None] == kv_ids[:, None, :]) & (q_ids >= 0)[:, :, None]
            ok = ok & same
        ok = np.broadcast_to(ok[:, None], (b, hq, lq, lkv))
        if self.mask is not None:
            ok = ok & np.broadcast_to(self.mask, ok.shape)
        if self.bias is not None:
            ok = ok & np.broadcast_to(np.asarray(self.bias, np.float64) > -np.inf, ok.shape)
        return ok

    def keep(self):
        """Dropout factors [B, Hq, Lq, Lkv]: 0 where dropped, 1 / (1 - rate) where kept; or None."""
        if not self.dropout_rate:
            return None
        b, lq, lkv, hq, *_ = self.sizes
        batch = np.arange(b) if self.batch_index is None else self.batch_index
        head = np.arange(hq) if self.head_index is None else self.head_index
        kept = philox.keep_mask(self.dropout_seed, batch, head, lq, lkv, self.dropout_rate)
        factor = 0.0 if self.dropout_rate == 1 else 1 / (1 - self.dropout_rate)
        return kept * np.float64(factor)
