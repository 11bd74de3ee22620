# SPDX-License-Identifier: Apache-2.0
"""What --help prints: a program's summary and only the flags that it has, a line or two each."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from absl import flags

from benchmarks.harness.flags import LAYER_IMPLS
from benchmarks.harness.implementations import IMPLEMENTATIONS
from benchmarks.harness.suites import SETTINGS_OF, SUMMARIES

_WIDTH = 100
_INDENT = 20

# Flags that steer a run; every suite has them.
RUN_FLAGS = (
    "preset",
    "output",
    "append",
    "resume",
    "tag",
    "plot",
    "time_budget_s",
    "isolate",
)


def of_suite(suite: str) -> str:
    """The help of a suite's binary."""
    every = frozenset[str]().union(*SETTINGS_OF.values())
    settings = every if suite == "all" else SETTINGS_OF[suite]
    names = [name for name in flags.FLAGS if name in settings and name not in RUN_FLAGS]
    impls = "".join(
        f"  {name:<{_INDENT - 2}}{implementation.summary}\n"
        for name, implementation in IMPLEMENTATIONS.items()
        if suite != "layer" or name in LAYER_IMPLS
    )
    return (
        f"{suite}: {SUMMARIES[suite]}\n\n"
        f"usage: bazel run //benchmarks:{suite} -- [--flag=value ...]\n\n"
        f"What is measured (a flag replaces the preset's value; lists: --dtypes=float32,bfloat16)\n"
        f"{of_flags(names)}\nHow\n{of_flags(RUN_FLAGS)}\nImplementations\n{impls}\n"
        "Exit code: 0, also with cases that were skipped, unsupported or out of memory; 1 when a\n"
        "result was wrong, a case crashed or nothing was measured; 2 for a bad flag.\n"
    )


def of_flags(names: Iterable[str]) -> str:
    """The flags' own help texts as a list."""
    lines = ""
    for name in names:
        flag = flags.FLAGS[name]
        label = f"  --{name}"
        text = f"{flag.help} (default: {flag.default})" if flag.default else str(flag.help)
        lines += textwrap.fill(
            text,
            _WIDTH,
            initial_indent=f"{label:<{_INDENT}}",
            subsequent_indent=" " * _INDENT,
        )
        lines += "\n"
    return lines
