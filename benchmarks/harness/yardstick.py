# SPDX-License-Identifier: Apache-2.0
"""The reference outputs of one problem and the gate's limits, computed once per group.

A whole reference costs lq * lkv, so beyond --ref_max_seq only a part of the outputs has one: the
last key/value head of the last batch entry, or of that only the last queries. The gate still
judges that part; a row's rel_err is reported for whole references only.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from benchmarks.harness import gate
from benchmarks.harness.case import Case
from benchmarks.harness.inputs import Arrays
from benchmarks.harness.operation import operation_of
from benchmarks.harness.reference import FLOAT64, baseline_arithmetic

# (query, key) pairs of one group of heads that a partial reference may take: a few seconds.
_PART_PAIRS = 1 << 27
_PART_ROWS = 64
# Orders of summation in which the baseline is evaluated, and in how many multiply-adds are few.
_EVALUATIONS = 2
_EVALUATIONS_SMALL = 8
_SMALL_PROBLEM = 1 << 20


@dataclasses.dataclass(frozen=True)
class Part:
    """The last key/value head of the last batch entry; of its queries the last `rows`.

    With fewer rows than queries, gradients of keys and values have no reference: every query
    contributes to them.
    """

    rows: int
    group: int
    whole: bool

    @staticmethod
    def of(case: Case) -> Part:
        """The largest part of a case whose reference is affordable."""
        whole = case.lq * case.lkv * case.group <= _PART_PAIRS
        rows = case.lq if whole else min(case.lq, _PART_ROWS)
        return Part(rows, case.group, rows == case.lq)

    def case(self, case: Case) -> Case:
        """The part as a case of its own; causal is bottom-right, so the last rows are one."""
        return dataclasses.replace(case, batch=1, lq=self.rows, hq=self.group, hkv=1)

    def _cut(self, name: str, array: np.ndarray) -> np.ndarray:
        if name in ("k", "v", "dk", "dv"):
            return array[-1:, :, -1:]
        return array[-1:, array.shape[1] - self.rows :, array.shape[2] - self.group :]

    def inputs(self, arrays: Arrays) -> Arrays:
        """q, k, v and the cotangent of the part."""
        names = ("q", "k", "v", "cotangent")[: len(arrays)]
        return tuple(self._cut(name, array) for name, array in zip(names, arrays, strict=True))

    def outputs(self, names: tuple[str, ...], outputs: list[np.ndarray]) -> list[np.ndarray]:
        """The outputs of the part that have a reference."""
        kept = self.names(names)
        return [self._cut(name, x) for name, x in zip(names, outputs, strict=True) if name in kept]

    def names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Which outputs have a reference."""
        return names if self.whole else tuple(name for name in names if name in ("out", "dq"))


@dataclasses.dataclass
class Yardstick:
    """float64 outputs and, per product precision, the tolerances of each output.

    `part` is None where the references are whole.
    """

    names: tuple[str, ...]
    references: list[np.ndarray]
    tolerances: dict[str, list[gate.Tolerance]]
    part: Part | None = None

    def judge(self, outputs: list[np.ndarray], precision: str, slack: float = 1.0) -> gate.Verdict:
        """The gate's verdict, its limits multiplied by `slack`."""
        limits = [limit.times(slack) for limit in self.tolerances[precision]]
        names = self.names
        if self.part is not None:
            outputs, names = self.part.outputs(names, outputs), self.part.names(names)
        return gate.judge(outputs, self.references, limits, names)

    def save(self, path: Path) -> None:
        """Writes everything to an .npz file, for a process that measures in isolation."""
        arrays = {f"reference_{i}": array for i, array in enumerate(self.references)}
        for precision, limits in self.tolerances.items():
            arrays[f"limits_{precision}"] = np.array([(t.relative, t.maximum) for t in limits])
        if self.part is not None:
            arrays["part"] = np.array(dataclasses.astuple(self.part))
        np.savez(path, names=np.array(self.names), **arrays)

    @staticmethod
    def load(path: Path) -> Yardstick:
        """Reads what `save` wrote."""
        with np.load(path) as data:
            names = tuple(str(name) for name in data["names"])
            prefix = "limits_"
            tolerances = {
                key[len(prefix) :]: [gate.Tolerance(float(r), float(m)) for r, m in data[key]]
                for key in data.files
                if key.startswith(prefix)
            }
            count = sum(key.startswith("reference_") for key in data.files)
            references = [data[f"reference_{i}"] for i in range(count)]
            part = None
            if "part" in data.files:
                rows, group, whole = data["part"].tolist()
                part = Part(rows, group, bool(whole))
        return Yardstick(names, references, tolerances, part)


def _evaluations(case: Case) -> int:
    """How often the baseline is evaluated: the error of few numbers is a matter of luck.

    So is the largest one of a layer's weight gradients, each of which sums over all tokens.
    """
    small = case.batch * case.hq * case.lq * case.lkv * case.head_dim <= _SMALL_PROBLEM
    return _EVALUATIONS_SMALL if small or case.model_dim is not None else _EVALUATIONS


def make_yardstick(
    case: Case, arrays: Arrays, precisions: set[str], ref_max_seq: int
) -> Yardstick | None:
    """Computes reference and baselines: whole up to `ref_max_seq` queries, else of a part.

    None for a layer beyond that length: its heads meet in the output projection.
    """
    operation = operation_of(case)
    names = operation.part_names(case)
    part = None
    if case.lq > ref_max_seq:
        if case.model_dim is not None:
            return None
        part = Part.of(case)
        arrays, case = part.inputs(arrays), part.case(case)
    kept = names if part is None else part.names(names)

    def computed(arithmetic, variant=0):
        given = operation.reordered(arrays, variant)
        results = operation.reordered(
            operation.reference(case, given, arithmetic), variant, back=True
        )
        return [x for name, x in zip(names, results, strict=True) if name in kept]

    references = computed(FLOAT64)
    tolerances = {}
    for precision in sorted(precisions):
        arithmetic = baseline_arithmetic(case.dtype, precision)
        evaluations = [computed(arithmetic, variant) for variant in range(_evaluations(case))]
        tolerances[precision] = [
            gate.tolerance(reference, baselines, case.dtype)
            for reference, baselines in zip(references, zip(*evaluations, strict=True), strict=True)
        ]
    return Yardstick(names, references, tolerances, part)
