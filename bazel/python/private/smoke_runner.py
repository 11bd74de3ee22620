# SPDX-License-Identifier: Apache-2.0
"""Runs a benchmark binary for seconds and checks the file that it writes.

The first argument is the binary, the rest are its flags. --output is added.
"""

import json
import os
import pathlib
import subprocess
import sys

# What a row tells, by suite: a time, a peak of memory, or the longest sequence that fits.
MEASURES = ("median_ms", "peak_mb", "longest_seq")


def problems(results: dict) -> list[str]:
    """Returns what is wrong with a results file, in words."""
    rows = results["results"]
    measured = [row for row in rows if any((row.get(name) or 0) > 0 for name in MEASURES)]
    found = [f"error row: {row}" for row in rows if "error" in row]
    if not measured:
        found.append(f"no measured row among {len(rows)}")
    return found


def main() -> int:
    """Runs the binary and returns the exit code of the test."""
    binary, *flags = sys.argv[1:]
    output = pathlib.Path(os.environ["TEST_TMPDIR"]) / "results.json"
    code = subprocess.run([binary, *flags, f"--output={output}"], check=False).returncode
    if code != 0:
        print(f"smoke: {binary} ended with exit code {code}", file=sys.stderr)
        return 1
    found = problems(json.loads(output.read_text()))
    for line in found:
        print(f"smoke: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
