# SPDX-License-Identifier: Apache-2.0
"""Command-line flags of the suites, and their checks: a bad value is one line and exit code 2."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from absl import app, flags

from benchmarks.harness.case import DTYPES, MODES
from benchmarks.harness.implementations import ALIASES, IMPLEMENTATIONS, canonical
from benchmarks.harness.presets import PRESETS
from benchmarks.harness.settings import Settings
from benchmarks.harness.suites import SETTINGS_OF

# Impls of the layer suite: whole layers, not attention functions.
LAYER_IMPLS = ("default", "flax")

_LIST_FLAGS = {
    "dtypes": "element types, of: " + ", ".join(DTYPES),
    "batches": "batch sizes",
    "heads": "query head counts",
    "kv_heads": "key/value head counts; each must divide every query head count",
    "head_dims": "head dimensions",
    "seq_lens": "lengths of self-attention",
    "q_lens": "query lengths of decode",
    "kv_lens": "key lengths of decode",
    "splits": "split counts of splitsweep: 'auto' or counts >= 1 (0 is read as 1: no splitting)",
    "block_ks": "key tile sizes of blockk",
    "modes": "directions, of: " + ", ".join(MODES),
    "causal": "0, 1 or both",
    "impls": "implementations, of: " + ", ".join(IMPLEMENTATIONS),
}


class FlagError(Exception):
    """A flag value that cannot be used; the message names it and the choices."""


def define() -> None:
    """Defines every flag; None means: as the preset says."""
    for name, text in _LIST_FLAGS.items():
        flags.DEFINE_list(name, None, text)
    flags.DEFINE_string("baseline_impl", None, "implementation that ratios and rel_vs_ refer to")
    flags.DEFINE_string("model_dim", None, "width of the layer suite's model")
    flags.DEFINE_string("max_seq", None, "longest length that max_seq tries")
    flags.DEFINE_string("repeats", None, "rounds per case")
    flags.DEFINE_string(
        "ref_max_seq", None, "longest query length with a whole float64 reference; beyond, a part"
    )
    flags.DEFINE_string("max_kv_gb", None, "cases whose K and V together exceed this are skipped")
    flags.DEFINE_string("memory_limit_gb", None, "memory of one try of max_seq; 0: 60 % of free")
    flags.DEFINE_string("try_seconds", None, "time limit of one try of max_seq")
    flags.DEFINE_string("preset", "auto", "configuration to start from: " + ", ".join(PRESETS))
    flags.DEFINE_string("output", None, "JSON file for the rows; relative to where you typed this")
    flags.DEFINE_bool("append", False, "add another run to an existing --output")
    flags.DEFINE_bool("resume", False, "go on with an interrupted run in --output")
    flags.DEFINE_string("tag", None, "text stored in every row, to tell runs apart")
    flags.DEFINE_string("plot", None, "PNG file for a chart (needs matplotlib: --config=peers)")
    flags.DEFINE_string("time_budget_s", None, "seconds to spend: rounds are dropped, never checks")
    flags.DEFINE_bool("isolate", False, "each measurement in its own process, with its peak memory")


@dataclasses.dataclass(frozen=True)
class Options:
    """Flags that steer the run without changing what a number means."""

    output: Path | None
    append: bool
    resume: bool
    plot: Path | None
    time_budget_s: float | None
    isolate: bool
    preset: str


def typed_path(text: str | None) -> Path | None:
    """A path as the user meant it: `bazel run` changes the working directory, this undoes it."""
    if text is None:
        return None
    return Path(os.environ.get("BUILD_WORKING_DIRECTORY", os.getcwd())) / text


def check_writable(name: str, path: Path | None) -> None:
    """Raises FlagError where flag `name` names no file that can be written, before the work."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise FlagError(f"--{name}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise FlagError(f"--{name}: {path} is a folder, expected a file name")
    try:
        # Trying is the only question that every file system answers, the read-only ones too.
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise FlagError(f"--{name}: cannot write in {path.parent}: {error.strerror}") from error


def read_options() -> Options:
    """Reads the flags that steer the run; raises FlagError."""
    values = flags.FLAGS
    preset = _choice("preset", values.preset, PRESETS)
    output = typed_path(values.output)
    plot = typed_path(values.plot)
    check_writable("output", output)
    check_writable("plot", plot)
    if (values.resume or values.append) and output is None:
        raise FlagError("--resume and --append need --output")
    if values.resume and values.append:
        raise FlagError("--append adds another run, --resume goes on with the last one: not both")
    budget = _number("time_budget_s", values.time_budget_s, minimum=0.0)
    return Options(output, values.append, values.resume, plot, budget, values.isolate, preset)


def apply_overrides(run: Settings, one_of_many: bool = False) -> Settings:
    """The run with every flag that was given in place of the preset's value.

    A preset's kv_heads that do not divide the given heads are left out. With `one_of_many` (suite
    all) so are given flags and implementations that only other suites have.
    """
    values = flags.FLAGS
    changes: dict[str, Any] = {}
    impls_of = "all" if one_of_many else run.suite
    readers: dict[str, Callable[[str, str], Any]] = {
        "dtypes": lambda name, text: _choice(name, text, DTYPES),
        "modes": lambda name, text: _choice(name, text, MODES),
        "causal": lambda name, text: _causal(name, text),
        "impls": lambda name, text: _impl(name, text, impls_of),
        "splits": _split,
    }
    for name in _LIST_FLAGS:
        given = getattr(values, name)
        if given is None:
            continue
        given = [text.strip() for text in given if text.strip()]
        if not given:
            raise FlagError(f"--{name}: an empty list leaves nothing to measure")
        read = readers.get(name, _count)
        # A repeated value would measure the same case twice.
        changes[name] = tuple(dict.fromkeys(read(name, text) for text in given))
    for name in ("model_dim", "max_seq", "repeats", "ref_max_seq"):
        text = getattr(values, name)
        if text is not None:
            minimum = 0 if name == "ref_max_seq" else 1
            changes[name] = _count(name, text, minimum)
    for name in ("max_kv_gb", "memory_limit_gb", "try_seconds"):
        text = getattr(values, name)
        if text is not None:
            changes[name] = _number(name, text, minimum=0.0)
    if values.tag is not None:
        if values.tag in ("", "none"):
            raise FlagError(f"--tag: {values.tag!r} would read as 'no tag'; give another text")
        changes["tag"] = values.tag
    if values.baseline_impl is not None:
        changes["baseline_impl"] = _impl("baseline_impl", values.baseline_impl, impls_of)
    foreign = [name for name in changes if name not in SETTINGS_OF[run.suite]]
    if foreign and not one_of_many:
        own = ", ".join(f"--{name}" for name in sorted(SETTINGS_OF[run.suite]))
        raise FlagError(f"--{foreign[0]}: suite {run.suite} does not have it; it has {own}")
    for name in foreign:
        del changes[name]
    if one_of_many and "impls" in changes:
        own = LAYER_IMPLS if run.suite == "layer" else tuple(IMPLEMENTATIONS)
        changes["impls"] = tuple(name for name in changes["impls"] if name in own)
    if "heads" in changes and "kv_heads" not in changes:
        changes["kv_heads"] = tuple(
            n for n in run.kv_heads if all(hq % n == 0 for hq in changes["heads"])
        )
    run = dataclasses.replace(run, **changes)
    if "baseline_impl" in changes and run.baseline_impl not in run.impls and not one_of_many:
        raise FlagError(
            f"--baseline_impl: {run.baseline_impl} is not measured; choices: {', '.join(run.impls)}"
        )
    _check_together(run)
    return run


def _check_together(run: Settings) -> None:
    for hq in run.heads:
        for hkv in run.kv_heads:
            if hq % hkv:
                raise FlagError(
                    f"--kv_heads: {hkv} does not divide --heads {hq}; "
                    f"choices: {', '.join(str(n) for n in range(1, hq + 1) if hq % n == 0)}"
                )
        if run.suite == "layer" and run.model_dim % hq:
            raise FlagError(f"--model_dim: {run.model_dim} is no multiple of --heads {hq}")


def baseline_of(run: Settings) -> str:
    """The implementation that ratios refer to: the asked one if it runs, else the first."""
    return run.baseline_impl if run.baseline_impl in run.impls else run.impls[0]


def _choice(name: str, text: str, choices: tuple[str, ...]) -> str:
    if text not in choices:
        raise FlagError(f"--{name}: unknown value {text!r}; choices: {', '.join(choices)}")
    return text


def _impl(name: str, text: str, suite: str) -> str:
    known = LAYER_IMPLS if suite == "layer" else tuple(IMPLEMENTATIONS)
    if canonical(text) not in known:
        raise FlagError(
            f"--{name}: unknown value {text!r}; choices: {', '.join(known)} "
            f"(also the reference names {', '.join(ALIASES)})"
        )
    return canonical(text)


def _causal(name: str, text: str) -> int:
    return int(_choice(name, text, ("0", "1")))


def _split(name: str, text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return max(1, _count(name, text, 0))
    except FlagError:
        raise FlagError(f"--{name}: {text!r} is neither 'auto' nor a count >= 0") from None


def _count(name: str, text: str, minimum: int = 1) -> int:
    try:
        value = int(text)
    except ValueError:
        raise FlagError(f"--{name}: {text!r} is no integer; allowed: {minimum} and more") from None
    if not minimum <= value < 1 << 31:
        raise FlagError(f"--{name}: {value} is out of range; allowed: {minimum} to 2147483647")
    return value


def _number(name: str, text: str | None, minimum: float) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        raise FlagError(f"--{name}: {text!r} is no number; allowed: {minimum:g} and more") from None
    if not minimum <= value < float("inf"):
        raise FlagError(f"--{name}: {text} is out of range; allowed: {minimum:g} and more")
    return value


def exit_with(message: str, code: int = 2) -> NoReturn:
    """Prints one line to stderr and ends the process."""
    print(message, file=sys.stderr)
    sys.stderr.flush()
    sys.exit(code)


def run_app(main: Callable[[list[str]], int], usage: Callable[[], str]) -> NoReturn:
    """Absl's app.run with our help text; a flag it cannot parse is one line and exit code 2."""

    def parse(argv: list[str]) -> list[str]:
        # Absl's own help knows the flags of one module only, or those of every library.
        if {"--help", "-help", "-h"} & set(argv[1:]):
            print(usage(), end="")
            sys.exit(0)
        try:
            return flags.FLAGS(argv)
        except flags.Error as error:
            exit_with(" ".join(str(error).split()))

    app.run(main, flags_parser=parse)
    raise AssertionError("app.run does not return")
