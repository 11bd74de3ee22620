# SPDX-License-Identifier: Apache-2.0
"""Prints ratios between two result files, matched by configuration.

usage: bazel run //benchmarks:compare -- A.json B.json [--fail_above=1.1]

A and B may carry a selector: results.json:tag=after,impl=default (see analysis/selecting.py).
Exit code: 0; 1 when something could not be read, nothing matched, or a ratio is above
--fail_above; 2 for a bad command.
"""

import sys

from absl import flags

from benchmarks.analysis import comparing, reading, selecting
from benchmarks.harness import usage
from benchmarks.harness.flags import exit_with, run_app

_FAIL_ABOVE = flags.DEFINE_string(
    "fail_above", None, "exit with 1 if any like-for-like ratio of B to A is above this number"
)


def _limit() -> float | None:
    if _FAIL_ABOVE.value is None:
        return None
    try:
        limit = float(_FAIL_ABOVE.value)
    except ValueError:
        limit = 0.0
    if not 0 < limit < float("inf"):
        exit_with(f"--fail_above: {_FAIL_ABOVE.value!r} is no positive number")
    return limit


def main(argv: list[str]) -> int:
    """Compares; returns the exit code."""
    if len(argv) != 3:
        exit_with(f"compare takes two files, got {len(argv) - 1}: compare -- A.json B.json")
    limit = _limit()
    try:
        selectors = [selecting.parse(text) for text in argv[1:]]
    except selecting.SelectorError as error:
        exit_with(str(error))
    problems = []
    sides = []
    files = {path: reading.read(path) for path in {one.path for one in selectors}}
    for file in files.values():
        problems += file.problems
    for selector in selectors:
        rows = [row for row in files[selector.path].rows if selector.keeps(row)]
        if not rows:
            problems.append(f"{selector.text}: no row is selected")
        sides.append(rows)
    for problem in problems:
        print(problem, file=sys.stderr)
    ignored = comparing.ignored_fields(dict(selectors[0].wanted), dict(selectors[1].wanted))
    outcome = comparing.compare(sides[0], sides[1], ignored)
    if not outcome.matched:
        print("no configuration is in both", file=sys.stderr)
        return 1
    print(comparing.render(outcome))
    above = [one for one in outcome.matched if limit and one.like_for_like and one.ratio > limit]
    if above:
        print(f"{len(above)} ratios are above {limit:g}", file=sys.stderr)
    return 1 if problems or above else 0


if __name__ == "__main__":
    run_app(main, lambda: f"{__doc__}\n{usage.of_flags([_FAIL_ABOVE.name])}")
