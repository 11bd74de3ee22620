# SPDX-License-Identifier: Apache-2.0
"""The reference outputs of one problem and the gate's limits, computed once per group."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from benchmarks.harness import gate
from benchmarks.harness.case import Case
from benchmarks.harness.operation import Arrays, operation_of
from benchmarks.harness.reference import FLOAT64, baseline_arithmetic


@dataclasses.dataclass
class Yardstick:
    """float64 outputs and, per product precision, the tolerances of each output."""

    names: tuple[str, ...]
    references: list[np.ndarray]
    tolerances: dict[str, list[gate.Tolerance]]

    def judge(self, outputs: list[np.ndarray], precision: str, slack: float = 1.0) -> gate.Verdict:
        """The gate's verdict, its limits multiplied by `slack`."""
        limits = [limit.times(slack) for limit in self.tolerances[precision]]
        return gate.judge(outputs, self.references, limits, self.names)

    def save(self, path: Path) -> None:
        """Writes everything to an .npz file, for a process that measures in isolation."""
        arrays = {f"reference_{i}": array for i, array in enumerate(self.references)}
        for precision, limits in self.tolerances.items():
            arrays[f"limits_{precision}"] = np.array([(t.relative, t.maximum) for t in limits])
        np.savez(path, names=np.array(self.names), **arrays)

    @staticmethod
    def load(path: Path) -> Yardstick:
        with np.load(path) as data:
            names = tuple(str(name) for name in data["names"])
            prefix = "limits_"
            tolerances = {
                key[len(prefix) :]: [gate.Tolerance(float(r), float(m)) for r, m in data[key]]
                for key in data.files
                if key.startswith(prefix)
            }
            references = [data[f"reference_{i}"] for i in range(len(names))]
        return Yardstick(names, references, tolerances)


def make_yardstick(case: Case, arrays: Arrays, precisions: set[str]) -> Yardstick:
    """Computes reference and baselines; the time it takes grows with lq * lkv."""
    operation = operation_of(case)
    references = list(operation.reference(case, arrays, FLOAT64))
    tolerances = {}
    for precision in sorted(precisions):
        baseline = operation.reference(case, arrays, baseline_arithmetic(case.dtype, precision))
        tolerances[precision] = [
            gate.tolerance(reference, result, case.dtype)
            for reference, result in zip(references, baseline, strict=True)
        ]
    return Yardstick(operation.part_names(case), references, tolerances)


def has_yardstick(case: Case, ref_max_seq: int) -> bool:
    """Whether a case is short enough for the reference (--ref_max_seq bounds its queries)."""
    return case.lq <= ref_max_seq
