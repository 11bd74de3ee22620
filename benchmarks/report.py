# SPDX-License-Identifier: Apache-2.0
"""Makes one self-contained HTML page from result files, the reference data included.

usage: bazel run //benchmarks:report -- FILE... --output=report.html

Exit code: 0; 1 when something could not be read (the page is made from the rest and lists it) or
there is no row at all; 2 for a bad command.
"""

import sys

from absl import flags

from benchmarks.analysis import reading
from benchmarks.harness import usage
from benchmarks.harness.flags import exit_with, run_app, typed_path
from benchmarks.page import payload, render

_OUTPUT = flags.DEFINE_string(
    "output", "report.html", "HTML file; relative to where you typed this"
)
_TITLE = flags.DEFINE_string("title", "Attention benchmarks", "heading of the page")


def main(argv: list[str]) -> int:
    """Reads, renders and writes; returns the exit code."""
    if len(argv) < 2:
        exit_with("report takes at least one result file: report -- FILE... --output=report.html")
    output = typed_path(_OUTPUT.value)
    if output is None or not output.parent.is_dir() or output.is_dir():
        exit_with(f"--output: {output} is no file in an existing folder")
    files = []
    for text in argv[1:]:
        path = typed_path(text)
        assert path is not None
        files.append(reading.read(path))
    problems = [problem for file in files for problem in file.problems]
    for problem in problems:
        print(problem, file=sys.stderr)
    if not any(file.rows for file in files):
        print("no file holds a row: no page was made", file=sys.stderr)
        return 1
    text = render.render(payload.build(files), _TITLE.value)
    try:
        output.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        print(f"cannot write {output}: {error.strerror}", file=sys.stderr)
        return 1
    rows = sum(len(file.rows) for file in files)
    print(f"{rows} rows of {len(files)} files in {output} ({len(text) / 1e6:.1f} MB)")
    return 1 if problems else 0


if __name__ == "__main__":
    run_app(main, lambda: f"{__doc__}\n{usage.of_flags([_OUTPUT.name, _TITLE.name])}")
