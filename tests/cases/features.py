# SPDX-License-Identifier: Apache-2.0
"""Every feature of the op, with one small case each: the rows of the README's support matrix."""

import dataclasses

import numpy as np

from tests.cases import run
from tests.cases.case import Case
from tests.cases.problem import Problem

DIRECTIONS = ("forward", "gradient", "jvp")


@dataclasses.dataclass(frozen=True)
class Feature:
    """A row of the support matrix.

    name: as in backends.MISSING. title: the row's text. case: what is run. entry: how it is called
    (run.ENTRIES). options: further keyword arguments of the call. dtypes: in which it is run.
    """

    name: str
    title: str
    case: Case
    entry: str = "dot_product_attention"
    options: tuple[tuple[str, object], ...] = ()
    dtypes: tuple[str, ...] = ("float32", "bfloat16")

    def __str__(self):
        return self.name

    def problem(self, dtype) -> Problem:
        problem = dataclasses.replace(self.case, dtype=dtype).problem()
        if self.entry in ("mask_mod", "flex_everything"):
            h = np.arange(self.case.hq)[:, None, None]
            i, j = np.arange(self.case.lq)[:, None], np.arange(self.case.lkv)
            problem = problem.with_arrays(mask=run.striped(0, h, i, j))
        return problem


_BASE = Case()
_RAGGED = Case(lq=67, lkv=131, hq=4, hkv=2)
_CAPPED = Case(lq=67, lkv=131, hq=4, hkv=2, soft_cap=2.0)


def _of(case, **changes):
    return dataclasses.replace(case, **changes)


_ALL = (
    Feature("float32", "float32", _BASE, dtypes=("float32",)),
    Feature("bfloat16", "bfloat16", _BASE, dtypes=("bfloat16",)),
    Feature("float16", "float16", _BASE, dtypes=("float16",)),
    Feature("float64", "float64 (true float64)", _BASE, dtypes=("float64",)),
    Feature(
        "precision",
        "`precision='highest'` for float32",
        _BASE,
        options=(("precision", "highest"),),
        dtypes=("float32",),
    ),
    Feature("gqa", "grouped queries (GQA)", _of(_BASE, hq=6)),
    Feature("mqa", "one kv head (MQA)", _of(_BASE, hq=3, hkv=1)),
    Feature("cross", "Lq != Lkv, ragged lengths", _RAGGED),
    Feature("head_dims", "D != Dv, odd head dims", _of(_BASE, d=19, dv=41)),
    Feature("head_dim_256", "head dims to 256", _of(_BASE, d=256, lq=33, lkv=40)),
    Feature("head_dim_over_256", "head dims over 256", _of(_BASE, d=272, lq=33, lkv=40)),
    Feature("causal", "causal, top-left", _of(_RAGGED, causal=True)),
    Feature("bottom_right", "causal, bottom-right", _of(_RAGGED, causal=True, bottom_right=True)),
    Feature("window", "local window", _of(_RAGGED, window=(20, 9))),
    Feature(
        "causal_window",
        "causal and local window, bottom-right",
        _of(_RAGGED, causal=True, bottom_right=True, window=(20, None)),
    ),
    Feature("query_lengths", "query lengths", _of(_RAGGED, query_lengths=(67, 30))),
    Feature("key_lengths", "key/value lengths", _of(_RAGGED, key_lengths=(131, 66))),
    Feature("segments", "packed segments with padding", _of(_BASE, lq=96, lkv=96, segments=-3)),
    Feature("prefix", "prefix-LM mask", _of(_RAGGED, causal=True, prefix=(70, 0)), "prefix_mask"),
    Feature("mask", "bool mask", _of(_RAGGED, mask="b1qk")),
    Feature("mask_mod", "mask function (block mask)", _RAGGED, "mask_mod"),
    Feature("bias", "dense bias and its gradient", _of(_RAGGED, bias="hqk")),
    Feature("bias_broadcast", "broadcast bias, gradient summed", _of(_RAGGED, bias="b11k")),
    Feature("slopes", "ALiBi and the slopes' gradient", _of(_RAGGED, slopes=True)),
    Feature("soft_cap", "soft cap of the logits", _CAPPED),
    Feature("scale", "scale as an array, with gradient", _of(_RAGGED, scale="array")),
    Feature("dropout", "dropout", _of(_RAGGED, dropout=0.3)),
    Feature(
        "splits",
        "split-KV (`mha`, `num_splits`)",
        _of(_RAGGED, lq=3),
        "mha",
        (("num_splits", 3),),
    ),
    Feature(
        "decode",
        "decode against a cache (`decode_attention`)",
        _of(_RAGGED, lq=2, causal=True, bottom_right=True, key_lengths=(131, 50)),
        "decode_attention",
    ),
    Feature(
        "dropout_indices",
        "dropout with indices given (`dropout_batch_indices`, ..)",
        _of(_RAGGED, dropout=0.3, dropout_indices=True),
    ),
    Feature("soft_cap_object", "soft cap as a `score_mod` object", _CAPPED, "soft_cap_object"),
    Feature(
        "flex_everything",
        "`flex_attention` with every fused option at once",
        _of(
            _RAGGED,
            causal=True,
            bottom_right=True,
            window=(60, None),
            segments=-2,
            key_lengths=(131, 90),
            bias="1qk",
            slopes=True,
            soft_cap=2.0,
            scale="array",
            dropout=0.3,
            dropout_indices=True,
        ),
        "flex_everything",
        (("block_sizes", (64, 64)), ("num_splits", 2), ("precision", "default")),
    ),
    Feature(
        "decode_everything",
        "`decode_attention` with every option at once",
        _of(
            _RAGGED,
            lq=2,
            causal=True,
            bottom_right=True,
            window=(100, None),
            key_lengths=(131, 50),
            slopes=True,
            soft_cap=2.0,
            scale="array",
        ),
        "decode_attention",
        (("block_k", 64), ("num_splits", 2), ("precision", "default")),
    ),
    Feature(
        "block_sizes",
        "explicit tile sizes (`mha`, `block_q`, `block_k`)",
        _of(_RAGGED, causal=True, scale=0.2),
        "mha",
        (("block_q", 64), ("block_k", 64)),
    ),
    Feature("score_mod", "any score function (`score_mod`)", _of(_RAGGED, bias="hqk"), "score_mod"),
)
FEATURES = {f.name: f for f in _ALL}
