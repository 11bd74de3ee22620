# SPDX-License-Identifier: Apache-2.0
"""Presets: named configurations of every suite.

* auto: fits the device; on a CPU each suite ends within a few minutes.
* quick: all suites together in about a minute on two cores.
* reference: exactly the configurations of the reference data (see benchmarks/reference/README.md).
"""

from __future__ import annotations

import dataclasses
import importlib.util

from benchmarks.harness.schema import SUITES
from benchmarks.harness.settings import Settings

PRESETS = ("auto", "quick", "reference")

# Suites that the reference data has no rows of; the preset runs their `auto` configuration.
_BEYOND_REFERENCE = ("max_seq", "layer")


def runs_of(preset: str, suite: str, backend: str) -> list[Settings]:
    """The runs of a suite under a preset, in order; suite 'all' gives those of every suite."""
    if suite == "all":
        return [run for name in SUITES for run in runs_of(preset, name, backend)]
    if preset == "reference" and suite not in _BEYOND_REFERENCE:
        return _reference(suite)
    if preset == "quick":
        return [_with_peers(_quick(suite), backend)]
    on_gpu = backend == "gpu"
    return [_with_peers(_auto_gpu(suite) if on_gpu else _auto_cpu(suite), backend)]


def _with_peers(run: Settings, backend: str) -> Settings:
    """Adds the peers that this machine has: a default run should not be full of error rows."""
    peers = []
    if backend == "gpu":
        peers.append("jax_cudnn")
    if importlib.util.find_spec("torch") is not None:
        peers.append("torch_sdpa")
    if run.suite in ("dispatch", "layer") and importlib.util.find_spec("flax") is not None:
        peers.append("flax")
    if run.suite == "layer":
        peers = [name for name in peers if name == "flax"]
    if run.suite in ("splitsweep", "blockk"):
        peers = []
    return dataclasses.replace(run, impls=run.impls + tuple(peers))


def _auto_cpu(suite: str) -> Settings:
    both_modes = ("fwd", "fwd_bwd")
    decode_shape = Settings(
        suite, batches=(1,), kv_heads=(8,), head_dims=(128,), q_lens=(1, 16), modes=("fwd",)
    )
    table = {
        "gqa": Settings(
            suite,
            kv_heads=(8, 1),
            seq_lens=(1024,),
            modes=both_modes,
            impls=("flex_native", "flex_repeat", "jax_xla"),
            baseline_impl="flex_repeat",
        ),
        "dispatch": Settings(
            suite,
            batches=(64,),
            heads=(8,),
            head_dims=(32, 64),
            seq_lens=(16, 64, 256),
            modes=both_modes,
            causal=(0, 1),
            impls=("default", "flex_native", "jax_xla"),
            baseline_impl="jax_xla",
            repeats=2,
        ),
        "decode": dataclasses.replace(
            decode_shape,
            kv_lens=(4096, 65536),
            impls=("splitkv", "nosplit", "jax_xla"),
            baseline_impl="nosplit",
        ),
        "splitsweep": dataclasses.replace(
            decode_shape,
            kv_lens=(4096, 65536),
            splits=("auto", 1, 2, 4, 8, 16, 32),
            impls=("splitkv",),
        ),
        "blockk": dataclasses.replace(
            decode_shape, kv_lens=(16384,), block_ks=(32, 64), impls=("mha",)
        ),
        "peak": Settings(
            suite,
            kv_heads=(8,),
            head_dims=(128,),
            dtypes=("bfloat16",),
            seq_lens=(2048,),
            q_lens=(1,),
            kv_lens=(65536,),
            modes=both_modes,
            impls=("flex_native", "flex_repeat", "jax_xla"),
        ),
        "max_seq": Settings(
            suite,
            heads=(1,),
            dtypes=("float32",),
            modes=("fwd",),
            impls=("default", "jax_xla"),
            max_seq=65536,
            try_seconds=20.0,
        ),
        "layer": Settings(
            suite,
            heads=(8,),
            batches=(8,),
            seq_lens=(128, 512),
            modes=both_modes,
            causal=(1,),
            impls=("default",),
            baseline_impl="flax",
        ),
    }
    return table[suite]


def _auto_gpu(suite: str) -> Settings:
    run = _auto_cpu(suite)
    larger = {
        "gqa": {"kv_heads": (8, 4, 1), "head_dims": (64, 128), "seq_lens": (1024, 4096)},
        "dispatch": {"seq_lens": (16, 32, 64, 128, 256, 512)},
        "decode": {"batches": (1, 8), "q_lens": (1, 4, 16), "kv_lens": (4096, 16384, 65536)},
        "splitsweep": {"batches": (1, 8), "q_lens": (1, 4, 16), "kv_lens": (4096, 16384, 65536)},
        "blockk": {"batches": (1, 8), "q_lens": (1, 16), "kv_lens": (16384, 65536)},
        "peak": {"kv_heads": (8, 1), "seq_lens": (4096,), "batches": (1, 8)},
        "max_seq": {"heads": (8,), "dtypes": ("bfloat16",), "max_seq": 262144},
        "layer": {"seq_lens": (512, 2048), "model_dim": 1024, "heads": (16,)},
    }
    return dataclasses.replace(run, **larger[suite])


def _quick(suite: str) -> Settings:
    run = _auto_cpu(suite)
    smaller = {
        "gqa": {"heads": (8,), "kv_heads": (2,), "seq_lens": (256,)},
        "dispatch": {"batches": (8,), "seq_lens": (16, 64), "head_dims": (32,), "causal": (1,)},
        "decode": {"kv_lens": (4096,), "q_lens": (1,), "dtypes": ("bfloat16",)},
        "splitsweep": {"kv_lens": (4096,), "q_lens": (1,), "splits": ("auto", 1, 4)},
        "blockk": {"kv_lens": (4096,), "q_lens": (1,)},
        "peak": {"seq_lens": (1024,), "q_lens": (), "kv_lens": (), "modes": ("fwd",)},
        "max_seq": {"max_seq": 2048, "impls": ("default",)},
        "layer": {"batches": (1,), "seq_lens": (128,)},
    }[suite]
    common = {"dtypes": ("float32",), "repeats": 2}
    return dataclasses.replace(run, **(common | smaller))


def _reference(suite: str) -> list[Settings]:
    gqa = Settings(
        "gqa",
        kv_heads=(8, 4, 1),
        head_dims=(64, 128),
        modes=("fwd", "fwd_bwd"),
        baseline_impl="flex_repeat",
    )
    gqa_impls = ("flex_native", "flex_repeat", "jax_xla", "jax_cudnn", "torch_sdpa")
    gqa_impls_4k = ("flex_native", "flex_repeat", "jax_cudnn", "torch_sdpa")
    decode = Settings(
        "decode",
        dtypes=("bfloat16",),
        batches=(1, 8),
        head_dims=(128,),
        q_lens=(1, 4, 16),
        kv_lens=(4096, 16384, 65536),
        impls=("splitkv", "nosplit", "flex_repeat", "jax_xla", "jax_cudnn", "torch_sdpa"),
        baseline_impl="nosplit",
    )
    sweep = dataclasses.replace(decode, suite="splitsweep", impls=("splitkv",), repeats=2)
    peak = Settings(
        "peak",
        dtypes=("bfloat16",),
        head_dims=(128,),
        impls=("flex_native", "flex_repeat", "torch_sdpa"),
    )
    change = dataclasses.replace
    table = {
        "dispatch": [
            Settings(
                "dispatch",
                "dispatch",
                batches=(64,),
                heads=(8,),
                head_dims=(32, 64),
                seq_lens=(16, 32, 64, 128, 256, 512),
                modes=("fwd", "fwd_bwd"),
                causal=(0, 1),
                impls=("default", "flax", "flex_native", "mha", "jax_xla", "jax_cudnn"),
                baseline_impl="jax_xla",
                repeats=1,
            )
        ],
        "gqa": [
            change(
                gqa,
                name=f"gqa_{length // 1024}k_{dtype}",
                dtypes=(dtype,),
                seq_lens=(length,),
                impls=impls,
            )
            for dtype in ("bfloat16", "float32")
            for length, impls in ((1024, gqa_impls), (4096, gqa_impls_4k))
        ],
        "decode": [
            change(decode, name="decode2_h8", kv_heads=(8,)),
            change(decode, name="decode2_h32", kv_heads=(32,)),
            change(
                decode,
                name="decode2_f32",
                dtypes=("float32",),
                batches=(1,),
                kv_heads=(8,),
                head_dims=(64,),
                impls=("splitkv", "nosplit", "jax_xla", "torch_sdpa"),
            ),
        ],
        "splitsweep": [
            change(sweep, name="sweep_h8", kv_heads=(8,), splits=("auto", 1, 2, 4, 8, 16, 32, 64)),
            change(
                sweep,
                name="sweep2",
                kv_heads=(32, 8),
                q_lens=(1, 32, 64),
                kv_lens=(1024, 2048, 16384),
                splits=("auto", 1, 2, 4, 8, 16),
            ),
        ],
        "blockk": [
            change(
                sweep,
                suite="blockk",
                name="blockk",
                kv_heads=(32, 8),
                q_lens=(1, 16),
                kv_lens=(16384, 65536),
                block_ks=(32, 64),
                impls=("mha",),
                repeats=3,
                max_kv_gb=16.0,
            )
        ],
        "peak": [
            change(
                peak,
                name="peak",
                kv_heads=(8, 1),
                seq_lens=(4096,),
                modes=("fwd", "fwd_bwd"),
            ),
            change(
                peak,
                name="peak_decode",
                batches=(8,),
                kv_heads=(8,),
                q_lens=(1, 16),
                kv_lens=(65536,),
                impls=("splitkv", "nosplit", "flex_repeat", "torch_sdpa"),
            ),
        ],
    }
    return table[suite]
