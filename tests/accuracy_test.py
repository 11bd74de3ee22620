# SPDX-License-Identifier: Apache-2.0
"""The accuracy rule over a pairwise sample of lengths, options and groups.

The native tests run the full grid; here each shape costs a compilation, so every pair of values of
any two factors appears at least once.
"""

import itertools

import numpy as np
import pytest

from tests.cases.case import Case
from tests.cases.check import check_case

_LENGTHS = (1, 2, 7, 63, 64, 65, 127, 129, 192, 1025)
_OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "alibi": {"slopes": True, "causal": True, "bottom_right": True},
    "bias": {"bias": "1hqk"},
    "lengths": {"ragged": True},
}
_FACTORS = {
    "lq": _LENGTHS,
    "lkv": _LENGTHS,
    "option": tuple(_OPTIONS),
    "group": (1, 3),
    "dtype": ("float32", "bfloat16", "float16"),
}


def pairwise(factors, seed=0):
    """Rows that contain every pair of values of any two factors: greedy, seeded, reproducible."""
    names = list(factors)
    todo = {
        (a, x, b, y)
        for a, b in itertools.combinations(names, 2)
        for x in factors[a]
        for y in factors[b]
    }
    rng = np.random.default_rng(seed)
    rows = []
    while todo:
        best = None
        first = min(todo, key=str)
        for _ in range(20):
            row = {n: factors[n][rng.integers(len(factors[n]))] for n in names}
            row[first[0]], row[first[2]] = first[1], first[3]
            gain = sum(row[a] == x and row[b] == y for a, x, b, y in todo)
            if best is None or gain > best[0]:
                best = (gain, row)
        rows.append(best[1])
        todo = {t for t in todo if not (best[1][t[0]] == t[1] and best[1][t[2]] == t[3])}
    return rows


_ROWS = pairwise(_FACTORS)


def test_the_sample_is_pairwise_and_small():
    for a, b in itertools.combinations(_FACTORS, 2):
        pairs = {(row[a], row[b]) for row in _ROWS}
        assert pairs == set(itertools.product(_FACTORS[a], _FACTORS[b]))
    assert len(_ROWS) < 130


@pytest.mark.parametrize("row", _ROWS, ids=lambda r: "-".join(str(v) for v in r.values()))
def test_lengths(backend, row):
    options = dict(_OPTIONS[row["option"]])
    if options.pop("ragged", False):
        options["query_lengths"] = (row["lq"], row["lq"] // 2)
        options["key_lengths"] = (row["lkv"] // 3, row["lkv"])
    case = Case(
        b=2 if "query_lengths" in options else 1,
        lq=row["lq"],
        lkv=row["lkv"],
        hq=row["group"],
        hkv=1,
        d=16,
        dtype=row["dtype"],
        **options,
    )
    check_case(case, backend)


# Found by random cases: scores of hundreds and thousands, whose rounding alone moves a weight.
_LARGE_SCORES = (
    # Keys that compete, few rows: out and the gradients must come from the same weights.
    Case(b=1, lq=5, lkv=147, hq=4, hkv=2, d=85, dv=16, scale="array", amplitude=15, seed=842),
    # Keys that win alone: their weight is 1 in both passes, whatever the compiler fuses.
    Case(b=1, lq=30, lkv=147, hq=2, hkv=1, d=12, dv=24, scale=0.7, amplitude=40, seed=128),
)


@pytest.mark.parametrize("case", _LARGE_SCORES, ids=["competing", "alone"])
def test_large_scores(backend, case):
    check_case(case, backend)
