# SPDX-License-Identifier: Apache-2.0
"""Runs suites: from flags to rows, a table and an exit code."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import ceilings as ceilings_module
from benchmarks.harness import (
    device,
    errors,
    flags,
    isolate,
    rows,
    summaries,
    table,
    timing,
    usage,
    work,
)
from benchmarks.harness.budget import Budget
from benchmarks.harness.implementations import precision_of
from benchmarks.harness.operation import operation_of
from benchmarks.harness.prepare import Prepared, against_baseline, prepare, refuse_large
from benchmarks.harness.presets import runs_of
from benchmarks.harness.progress import Progress
from benchmarks.harness.search import search_longest
from benchmarks.harness.settings import Settings
from benchmarks.harness.store import Store, StoreError
from benchmarks.harness.suites import SUMMARIES, Contender, Group, groups_of
from benchmarks.harness.yardstick import Yardstick, make_yardstick


@dataclasses.dataclass
class Context:
    """What every group of one run shares."""

    settings: Settings
    baseline: str
    isolated: bool
    backend: str
    cache_bytes: int
    ceilings: dict[str, Any]
    store: Store
    progress: Progress
    budget: Budget

    def row(self, contender: Contender) -> dict[str, Any]:
        return rows.base(contender, self.backend, self.settings.tag, self.store.run)

    def add(self, row: dict[str, Any]) -> None:
        if "error" in row:
            self.progress.note(f"  {row['impl']}: {row['error']}")
        self.store.add([row])


def measure_group(context: Context, group: Group) -> None:
    """Measures one group and adds its rows; a failing contender is a row and the rest go on."""
    kind = group.problem.suite
    done = _rounds_done(context, group)
    wanted = range(context.settings.repeats)
    missing = {
        contender.key: [r for r in wanted if r not in done[contender.key]]
        for contender in group.contenders
    }
    pending = []
    for contender in group.contenders:
        if not missing[contender.key]:
            continue
        try:
            # The case of a search is its bound: what may be tried is for its own limits to say.
            if kind != "max_seq":
                refuse_large(contender, context.settings.max_kv_gb)
        except errors.SkippedError as skipped:
            context.add(rows.failed(context.row(contender), errors.describe(skipped)))
            continue
        pending.append(contender)
    if not pending:
        return
    pending.sort(key=lambda contender: contender.impl != context.baseline)
    if kind == "max_seq":
        for contender in pending:
            context.progress.step(contender.impl)
            context.add(context.row(contender) | _search(context, contender))
        return
    # The baseline first, also where all its rounds are held already (it is prepared then, and not
    # timed): the others are compared with its outputs.
    baseline = next((c for c in group.contenders if c.impl == context.baseline), None)
    if baseline is not None and baseline not in pending and _has_numbers(context, baseline):
        pending.insert(0, baseline)
    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
        if kind == "peak" or context.isolated:
            _measure_isolated(context, group, pending, missing, Path(folder))
        else:
            _measure_here(context, group, pending, missing)


def _rounds_done(context: Context, group: Group) -> dict[str, set[int]]:
    """Rounds that the file already holds; an error row stands for all of them."""
    held: dict[tuple[Any, ...], set[int]] = {}
    everything = set(range(context.settings.repeats))
    for row in context.store.rows_of_run():
        whole = "error" in row or row["suite"] in ("peak", "max_seq")
        rounds = everything if whole else {row["round"]}
        held.setdefault(rows.identity(row), set()).update(rounds)
    return {
        contender.key: held.get(rows.identity(context.row(contender)), set())
        for contender in group.contenders
    }


def _has_numbers(context: Context, contender: Contender) -> bool:
    """Whether the file holds a row of this contender that is no error."""
    wanted = rows.identity(context.row(contender))
    held = context.store.rows_of_run()
    return any(rows.identity(row) == wanted and "error" not in row for row in held)


def _search(context: Context, contender: Contender) -> dict[str, Any]:
    return search_longest(
        contender,
        context.backend,
        context.cache_bytes,
        context.settings,
        lambda length: context.progress.step(f"{contender.impl} at length {length}"),
    )


def _yardstick(context: Context, group: Group, pending: list[Contender]) -> Yardstick | None:
    context.progress.step("float64 reference")
    precisions = {
        precision_of(contender.impl, contender.case.dtype, context.backend) for contender in pending
    }
    arrays = operation_of(group.problem).inputs(group.problem)
    return make_yardstick(group.problem, arrays, precisions, context.settings.ref_max_seq)


def _measure_here(
    context: Context,
    group: Group,
    pending: list[Contender],
    missing: dict[str, list[int]],
) -> None:
    yardstick = _yardstick(context, group, pending)
    arrays = operation_of(group.problem).inputs(group.problem)
    ready: dict[str, Prepared] = {}
    by_key = {contender.key: contender for contender in pending}
    baseline_outputs = None
    for key, contender in by_key.items():
        context.progress.step(f"{key}: compiling and checking")
        try:
            prepared = prepare(contender, arrays, yardstick, context.backend, context.cache_bytes)
        except Exception as error:  # A failed case is a row, whatever failed.
            if missing[key]:
                context.add(rows.failed(context.row(contender), errors.describe(error)))
            continue
        if contender.impl == context.baseline and baseline_outputs is None:
            baseline_outputs = prepared.outputs
        elif baseline_outputs is not None:
            difference = against_baseline(prepared.outputs, baseline_outputs)
            prepared.fields["rel_vs_baseline"] = difference
        prepared.outputs = []
        ready[key] = prepared
    round_seconds = 0.0
    for round_index in range(context.settings.repeats):
        due = [key for key in ready if round_index in missing[key]]
        if not due:
            continue
        if not context.budget.affords(round_index, round_seconds):
            context.budget.drop(len(due))
            continue
        context.progress.step(f"round {round_index + 1} of {context.settings.repeats}")
        started = time.monotonic()
        samples = timing.interleaved_round(
            {key: ready[key].stopwatch for key in due},
            {key: timing.samples_for(ready[key].call_ms) for key in due},
            round_index,
        )
        round_seconds = time.monotonic() - started
        for key in due:
            prepared = ready[key]
            row = rows.timed(
                context.row(by_key[key]),
                prepared.fields,
                round_index,
                prepared.stopwatch.inner,
                samples[key],
                context.baseline,
            )
            context.add(_plausible(context, by_key[key], row))


def _measure_isolated(
    context: Context,
    group: Group,
    pending: list[Contender],
    missing: dict[str, list[int]],
    folder: Path,
) -> None:
    yardstick = _yardstick(context, group, pending)
    yardstick_path = None
    if yardstick is not None:
        yardstick_path = str(folder / "yardstick.npz")
        yardstick.save(Path(yardstick_path))
        del yardstick
    kind = "peak" if group.problem.suite == "peak" else "time"
    by_key = {contender.key: contender for contender in pending}
    baseline_path = folder / "baseline.npz"

    def result_of(contender: Contender, round_index: int) -> dict[str, Any]:
        context.progress.step(f"{contender.key}, own process, round {round_index + 1}")
        return isolate.run(
            isolate.Request(
                kind,
                contender,
                context.backend,
                context.cache_bytes,
                round_index,
                yardstick_path,
                str(baseline_path),
                contender.impl == context.baseline and not baseline_path.exists(),
            )
        )

    if kind == "time" and not missing[pending[0].key]:
        result_of(pending[0], 0)
    failed: set[str] = set()
    round_seconds = 0.0
    for round_index in range(1 if kind == "peak" else context.settings.repeats):
        due = [key for key in by_key if round_index in missing[key] and key not in failed]
        if not due:
            continue
        if not context.budget.affords(round_index, round_seconds):
            context.budget.drop(len(due))
            continue
        started = time.monotonic()
        # The baseline runs first until its outputs are there: the others need them.
        order = timing.changing_order(due, round_index) if baseline_path.exists() else due
        for key in order:
            contender = by_key[key]
            result = result_of(contender, round_index)
            row = context.row(contender)
            if "error" in result:
                failed.add(key)
                context.add(rows.failed(row, result["error"]))
            elif kind == "peak":
                context.add(row | result["fields"])
            else:
                row = rows.timed(
                    row,
                    result["fields"],
                    round_index,
                    result["inner"],
                    result["samples"],
                    context.baseline,
                )
                context.add(_plausible(context, contender, row))
        round_seconds = time.monotonic() - started


def _plausible(context: Context, contender: Contender, row: dict[str, Any]) -> dict[str, Any]:
    """The row, or an error row when it claims a speed that this machine cannot reach."""
    if "error" in row:
        return row
    gflops = work.count(contender.case).flops / row["median_ms"] / 1e6
    precision = row["precision"]
    if not ceilings_module.impossible(context.ceilings, precision, gflops):
        return row
    # The ceiling may have been measured while the machine was busy: look again before accusing.
    again = ceilings_module.measure(context.backend)
    for name, value in again["gflops"].items():
        context.ceilings["gflops"][name] = max(value, context.ceilings["gflops"].get(name, 0.0))
    context.store.record_setting("ceilings", context.ceilings)
    if not ceilings_module.impossible(context.ceilings, precision, gflops):
        return row
    kept = context.row(contender)
    ceiling = ceilings_module.compute_gflops(context.ceilings, precision) or 0.0
    return rows.failed(
        kept,
        f"{errors.WRONG}: {gflops:.0f} GFLOP/s is impossible here (ceiling {ceiling:.0f}): "
        "the clock did not see the work",
    )


def _leave_memory_to_workers(suite: str, isolated: bool) -> None:
    """On a GPU, JAX takes most memory at its start; worker processes then would have none.

    Must run before JAX starts its backend. A user's own setting of these variables wins.
    """
    if isolated or suite in ("peak", "max_seq"):
        os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    if suite == "all":
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def run_suite(suite: str) -> int:
    """Measures a suite (or 'all') as the flags say; returns the exit code."""
    try:
        options = flags.read_options()
        _leave_memory_to_workers(suite, options.isolate)
        import jax

        # JAX tells at INFO, on stderr once absl logs there, which accelerators it did not find.
        logging.getLogger("jax").setLevel(logging.WARNING)
        backend = jax.default_backend()
        runs = [
            flags.apply_overrides(run, one_of_many=suite == "all")
            for run in runs_of(options.preset, suite, backend)
        ]
        if options.plot is not None:
            from benchmarks.harness import plots

            plots.require(suite)
    except flags.FlagError as error:
        flags.exit_with(str(error))
    plan = [(run, groups_of(run)) for run in runs]
    if not any(groups for _, groups in plan):
        flags.exit_with(f"{suite}: these flags leave no case to measure")
    store = Store(options.output, device.describe_device())
    try:
        if options.append or options.resume:
            store.load()
        budget_groups = sum(len(groups) for _, groups in plan)
        progress = Progress(budget_groups)
        budget = Budget(options.time_budget_s, budget_groups)
        cache = device.cache_bytes(backend)
        progress.note(f"{suite}: {SUMMARIES[suite]}; problems: {budget_groups}, on {backend}")
        progress.step("measuring what the machine can do")
        ceilings = ceilings_module.measure(backend)
        runs_done = []
        for run, groups in plan:
            if not groups:
                continue
            config = run.header() | {
                "preset": options.preset,
                "isolate": options.isolate,
                "sampling": timing.sampling_configuration(cache),
            }
            baseline = flags.baseline_of(run)
            config["baseline_impl"] = baseline
            store.begin_run(run.suite, config, options.resume)
            store.record_setting("ceilings", ceilings)
            store.record_setting("machine_state", device.machine_state())
            runs_done.append(store.run)
            context = Context(
                run,
                baseline,
                options.isolate,
                backend,
                cache,
                ceilings,
                store,
                progress,
                budget,
            )
            for group in groups:
                progress.start_group(f"{run.suite} {group.problem.label()}")
                budget.start_group()
                measure_group(context, group)
                progress.finish_group()
            store.record_setting("dropped_rounds", budget.dropped_rounds)
            choice = summaries.record(store.rows_of_run(), run.suite)
            if choice is not None:
                store.record_setting("automatic_choice", choice)
        store.write()
    except StoreError as error:
        flags.exit_with(str(error), 2 if not store.run else 1)
    except KeyboardInterrupt:
        flags.exit_with(f"interrupted: {_kept(store)}", 130)
    except OSError as error:
        # No room for scratch files, no more processes: a fact about the machine, not a bug.
        flags.exit_with(f"stopped: {error}: {_kept(store)}", 1)
    finally:
        if "progress" in locals():
            progress.close()
    return _finish(store, runs_done, ceilings, budget, options)


def _kept(store: Store) -> str:
    """What is left of a run that ends early."""
    if store.path is None:
        return "nothing is kept without --output"
    return f"{len(store.rows)} rows are kept; go on with --output={store.path} --resume"


def _finish(
    store: Store,
    runs: list[str],
    ceilings: dict[str, Any],
    budget: Budget,
    options: flags.Options,
) -> int:
    measured = [row for row in store.rows if row.get("run") in runs]
    baselines = {name: store.config_of(name)["baseline_impl"] for name in runs}
    print(table.render(measured, baselines, ceilings))
    for line in summaries.lines(measured):
        print(line)
    note = budget.summary()
    if note:
        print(note)
    if options.output is not None:
        print(f"{len(measured)} rows in {options.output}")
    if options.plot is not None:
        from benchmarks.harness import plots

        plots.draw(measured, options.plot)
        print(f"chart in {options.plot}")
    if not measured:
        print("nothing was measured", file=sys.stderr)
        return 1
    failing = [row for row in measured if "error" in row and errors.fails_run(row["error"])]
    for row in failing:
        print(f"FAILED {row['suite']} {row['impl']}: {row['error']}", file=sys.stderr)
    return 1 if failing else 0


def main(suite: str) -> None:
    """Entry point of a suite binary."""
    flags.define()

    def run(argv: list[str]) -> int:
        if len(argv) > 1:
            flags.exit_with(f"unexpected argument {argv[1]!r}; every option is a --flag")
        return run_suite(suite)

    flags.run_app(run, lambda: usage.of_suite(suite))
