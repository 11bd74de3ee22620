# SPDX-License-Identifier: Apache-2.0
"""The complete configuration of one run: what presets hold, flags override and headers record."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Settings:
    """One run of one suite. Fields have the names of their flags.

    A suite reads the fields that suites.SETTINGS_OF names; `peak` measures the grids of seq_lens
    and of q_lens and kv_lens. kv_heads empty means as many as query heads.
    """

    suite: str
    name: str = ""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    batches: tuple[int, ...] = (1,)
    heads: tuple[int, ...] = (32,)
    kv_heads: tuple[int, ...] = ()
    head_dims: tuple[int, ...] = (64,)
    seq_lens: tuple[int, ...] = ()
    q_lens: tuple[int, ...] = ()
    kv_lens: tuple[int, ...] = ()
    splits: tuple[int | str, ...] = ()
    block_ks: tuple[int, ...] = ()
    modes: tuple[str, ...] = ("fwd",)
    causal: tuple[int, ...] = (0,)
    impls: tuple[str, ...] = ()
    baseline_impl: str = ""
    model_dim: int = 256
    max_seq: int = 262144
    repeats: int = 3
    ref_max_seq: int = 1024
    max_kv_gb: float = 4.5
    memory_limit_gb: float = 0.0
    try_seconds: float = 60.0
    tag: str | None = None

    def header(self) -> dict[str, Any]:
        """The configuration as JSON values."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(self).items()
            if name != "name"
        }
