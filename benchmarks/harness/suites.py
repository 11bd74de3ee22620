# SPDX-License-Identifier: Apache-2.0
"""What each suite measures: the settings of a run expanded to groups of contenders."""

from __future__ import annotations

import dataclasses
import itertools

from benchmarks.harness.case import Case
from benchmarks.harness.settings import Settings

SUMMARIES = {
    "dispatch": "small to medium self-attention: the default choice against each implementation",
    "gqa": "grouped-query self-attention at 1k and more: native GQA against repeated K and V",
    "decode": "a few queries against a long cache: split-KV against none",
    "splitsweep": "decode over split counts: how good is the automatic one",
    "blockk": "decode over key tile sizes",
    "peak": "peak memory of one call, each in a process of its own",
    "max_seq": "the longest sequence before memory, time or --max_seq ends it",
    "layer": "a multi-head attention layer with projections",
    "all": "every suite, one file",
}

_SELF_ATTENTION = ("dispatch", "gqa", "layer")
_DECODE = ("decode", "splitsweep", "blockk")

# Settings that mean something to every suite, and to suites that time rounds against a baseline.
_ALWAYS = frozenset(("dtypes", "batches", "heads", "kv_heads", "modes", "causal", "impls", "tag"))
_TIMED = _ALWAYS | {"repeats", "baseline_impl", "ref_max_seq", "max_kv_gb"}
_CACHE = {"head_dims", "q_lens", "kv_lens"}
# What each suite reads of its settings; a flag for anything else is refused.
SETTINGS_OF = {
    "dispatch": _TIMED | {"head_dims", "seq_lens"},
    "gqa": _TIMED | {"head_dims", "seq_lens"},
    "decode": _TIMED | _CACHE,
    "splitsweep": _TIMED | _CACHE | {"splits"},
    "blockk": _TIMED | _CACHE | {"block_ks"},
    "peak": _ALWAYS | _CACHE | {"seq_lens", "ref_max_seq", "max_kv_gb"},
    "max_seq": _ALWAYS | {"head_dims", "max_seq", "memory_limit_gb", "try_seconds"},
    # Its head dimension is model_dim / heads.
    "layer": _TIMED | {"seq_lens", "model_dim"},
}


@dataclasses.dataclass(frozen=True)
class Contender:
    """An implementation on a case: what one row a round is about."""

    impl: str
    case: Case

    @property
    def key(self) -> str:
        """Unique within its group."""
        return self.case.contender(self.impl)


@dataclasses.dataclass(frozen=True)
class Group:
    """Contenders on one problem: measured together, interleaved, and compared with each other."""

    problem: Case
    contenders: tuple[Contender, ...]


def groups_of(settings: Settings) -> list[Group]:
    """Every group of the run, in the order in which they are measured."""
    problems = []
    if settings.suite in (*_SELF_ATTENTION, "peak", "max_seq"):
        problems += _self_attention(settings)
    if settings.suite in (*_DECODE, "peak"):
        problems += _decode(settings)
    groups = [Group(problem, _contenders(settings, problem)) for problem in problems]
    return [group for group in groups if group.contenders]


def _heads(settings: Settings) -> list[tuple[int, int]]:
    """(Hq, Hkv) pairs; without kv_heads every query head has its own."""
    return [(hq, hkv) for hq in settings.heads for hkv in (settings.kv_heads or (hq,))]


def _self_attention(settings: Settings) -> list[Case]:
    # max_seq searches the length itself; its rows carry the bound of the search.
    lengths = (settings.max_seq,) if settings.suite == "max_seq" else settings.seq_lens
    layer = settings.suite == "layer"
    cases = []
    for dtype, batch, length, (hq, hkv), head_dim, causal, mode in itertools.product(
        settings.dtypes,
        settings.batches,
        lengths,
        _heads(settings),
        settings.head_dims[:1] if layer else settings.head_dims,
        settings.causal,
        settings.modes,
    ):
        cases.append(
            Case(
                settings.suite,
                dtype,
                mode,
                batch,
                length,
                length,
                hq,
                hkv,
                settings.model_dim // hq if layer else head_dim,
                bool(causal),
                model_dim=settings.model_dim if layer else None,
            )
        )
    return cases


def _decode(settings: Settings) -> list[Case]:
    # In the peak suite the cache grid is forward only: nobody trains through a KV cache.
    modes = ("fwd",) if settings.suite == "peak" else settings.modes
    return [
        Case(settings.suite, dtype, mode, batch, lq, lkv, hq, hkv, head_dim, bool(causal))
        for dtype, batch, lkv, lq, (hq, hkv), head_dim, causal, mode in itertools.product(
            settings.dtypes,
            settings.batches,
            settings.kv_lens,
            settings.q_lens,
            _heads(settings),
            settings.head_dims,
            settings.causal,
            modes,
        )
    ]


def _contenders(settings: Settings, problem: Case) -> tuple[Contender, ...]:
    knobs: list[dict[str, int | str]] = [{}]
    if settings.suite == "splitsweep":
        knobs = [{"num_splits": splits} for splits in settings.splits]
    elif settings.suite == "blockk":
        knobs = [{"block_k": block_k} for block_k in settings.block_ks]
    return tuple(
        Contender(impl, dataclasses.replace(problem, **knob))
        for impl in settings.impls
        for knob in knobs
    )
