# SPDX-License-Identifier: Apache-2.0
"""What the page shows, as plain JSON: files, pooled rows and figures of merit."""

from __future__ import annotations

from typing import Any

from benchmarks.analysis.reading import ResultFile
from benchmarks.harness import ceilings as ceilings_module
from benchmarks.harness import errors, summaries, work
from benchmarks.harness.pool import Pooled, pool
from benchmarks.harness.summaries import geometric_mean

# Implementation pairs whose ratio answers what a suite was made for: (suite, impl, against).
_QUESTIONS = (
    ("gqa", "flex_native", "flex_repeat", "native GQA over repeated K and V"),
    ("gqa", "flex_native", "jax_xla", "native GQA over jax.nn on XLA"),
    ("gqa", "flex_native", "torch_sdpa", "native GQA over torch"),
    ("decode", "splitkv", "nosplit", "split-KV over one split"),
    ("decode", "splitkv", "torch_sdpa", "split-KV over torch"),
    ("dispatch", "default", "jax_xla", "default over jax.nn on XLA"),
    ("layer", "default", "flax", "default layer over Flax's"),
)

# Fields of a pooled row that the page takes as they are.
_TAKEN = (
    "rel_err", "compile_s", "xla_temp_mb", "residual_mb", "peak_mb", "inputs_mb", "kv_mb",
    "longest_seq", "limit", "note", "inner",
)  # fmt: skip


def build(files: list[ResultFile]) -> dict[str, Any]:
    """The payload of the page; row ids are positions in `rows`."""
    rows: list[dict[str, Any]] = []
    described = []
    figures: list[dict[str, Any]] = []
    for index, file in enumerate(files):
        pooled = pool(file.rows)
        ceilings = _ceilings(file)
        described.append(
            {
                "name": file.name,
                "device": file.device,
                "version": file.version,
                "rows": len(file.rows),
                "errors": sum("error" in row for row in file.rows),
                "problems": file.problems,
                "ceilings": ceilings,
                "runs": _runs(file),
            }
        )
        for tag in dict.fromkeys(one.tag for one in pooled):
            source = file.name if tag is None else f"{file.name} · {tag}"
            figures += _figures(source, [one for one in pooled if one.tag == tag])
        for one in pooled:
            rows.append(_row(len(rows), index, one, ceilings))
    return {"files": described, "rows": rows, "figures": figures}


def _ceilings(file: ResultFile) -> dict[str, Any] | None:
    """The highest ceilings of the file's runs; None where none were measured."""
    best: dict[str, Any] | None = None
    for run in file.config.get("runs", {}).values():
        found = run.get("ceilings")
        if not isinstance(found, dict) or not isinstance(found.get("gflops"), dict):
            continue
        if best is None:
            best = {"method": found.get("method", ""), "gflops": {}, "read_gb_s": 0.0}
        for name, value in found["gflops"].items():
            best["gflops"][name] = max(value, best["gflops"].get(name, 0.0))
        best["read_gb_s"] = max(best["read_gb_s"], found.get("read_gb_s", 0.0))
    return best


def _runs(file: ResultFile) -> int:
    return len({row.get("run") for row in file.rows})


def _row(index: int, file: int, one: Pooled, ceilings: dict[str, Any] | None) -> dict[str, Any]:
    row: dict[str, Any] = one.case.row_fields() | {
        "id": index,
        "file": file,
        "impl": one.impl,
        "precision": one.precision,
        "tag": one.tag,
        "run": one.run,
        "rounds": one.rounds,
    }
    if one.error is not None:
        return row | {"error": one.error, "error_kind": errors.kind(one.error)}
    row |= {name: one.fields[name] for name in _TAKEN if name in one.fields}
    for name, value in one.fields.items():
        if name.startswith("rel_vs_"):
            row |= {"rel_vs": value, "baseline": name.removeprefix("rel_vs_")}
    if one.median_ms is None:
        return row
    row |= {"median_ms": one.median_ms, "q1_ms": one.q1_ms, "q3_ms": one.q3_ms}
    if one.case.suite == "max_seq":
        # The case's length is the bound of the search, not the length that was timed.
        return row
    amount = work.count(one.case)
    row["tflops"] = amount.tflops(one.median_ms)
    row["gb_s"] = amount.gb_per_s(one.median_ms)
    row["intensity"] = amount.intensity
    if ceilings is not None:
        peak = ceilings_module.compute_gflops(ceilings, one.precision)
        if peak:
            row["peak_percent"] = 1e5 * row["tflops"] / peak
        if ceilings["read_gb_s"]:
            row["read_percent"] = 100 * row["gb_s"] / ceilings["read_gb_s"]
    return row


def _figures(source: str, pooled: list[Pooled]) -> list[dict[str, Any]]:
    """Figures of one tag of a file: how good automatic choices are, and the suites' ratios."""
    figures = []
    for suite, label in (("splitsweep", "automatic split count"), ("dispatch", "default choice")):
        distances = [choice.distance for choice in summaries.choices(pooled, suite)]
        if distances:
            figures.append(
                {
                    "source": source,
                    "suite": suite,
                    "value": geometric_mean(distances),
                    "label": f"{label}, time over the best of its sweep",
                    "detail": f"{len(distances)} problems, worst {max(distances):.2f}",
                }
            )
    for suite, impl, against, label in _QUESTIONS:
        ratios = _ratios(pooled, suite, impl, against)
        if ratios:
            figures.append(
                {
                    "source": source,
                    "suite": suite,
                    "value": geometric_mean(ratios),
                    "label": label,
                    "detail": f"{len(ratios)} cases, {min(ratios):.2f} to {max(ratios):.2f}",
                }
            )
    return figures


def _ratios(pooled: list[Pooled], suite: str, impl: str, against: str) -> list[float]:
    """Time of impl over time of against, wherever both ran in the same precision."""
    timed = [one for one in pooled if one.case.suite == suite and one.median_ms is not None]
    bases = {
        (one.case, one.precision, one.tag, one.run): one for one in timed if one.impl == against
    }
    ratios = []
    for one in timed:
        base = bases.get((one.case, one.precision, one.tag, one.run))
        if one.impl == impl and base is not None:
            assert one.median_ms and base.median_ms
            ratios.append(one.median_ms / base.median_ms)
    return ratios
