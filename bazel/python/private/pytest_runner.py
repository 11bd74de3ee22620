# SPDX-License-Identifier: Apache-2.0
"""Runs pytest under `bazel test` and `bazel run //tests:pytest`.

Arguments before `--` are test files and pytest's own options; arguments after it are pytest's too.
Bazel's test protocol is translated: the filter, the XML report, the scratch folder and the shards.
"""

import os
import pathlib
import sys

import pytest


class _Shard:
    """Keeps every n-th collected test, so that shards differ by at most one test."""

    def __init__(self, index: int, total: int):
        self._index = index
        self._total = total
        self.collected = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        self.collected = len(items)
        mine = items[self._index :: self._total]
        others = [item for i, item in enumerate(items) if i % self._total != self._index]
        config.hook.pytest_deselected(items=others)
        items[:] = mine


def _arguments(arguments: list[str]) -> list[str]:
    """Drops the `--` that parts the macro's files from the user's options."""
    if "--" in arguments:
        split = arguments.index("--")
        return arguments[:split] + arguments[split + 1 :]
    return arguments


def main() -> int:
    """Runs pytest and returns the exit code."""
    options = ["--import-mode=importlib", "-p", "no:cacheprovider", "-rs"]
    plugins = []
    environ = os.environ
    filtered = False

    typed_in = environ.get("BUILD_WORKING_DIRECTORY")
    if typed_in and "TEST_SRCDIR" not in environ:
        # `bazel run`: paths mean the folder where the command was typed.
        os.chdir(typed_in)
    config = pathlib.Path(__file__).parents[3] / "pyproject.toml"
    options.append(f"--config-file={config}")

    if "TEST_TMPDIR" in environ:
        options.append(f"--basetemp={environ['TEST_TMPDIR']}/pytest")
    if "XML_OUTPUT_FILE" in environ:
        options.append(f"--junitxml={environ['XML_OUTPUT_FILE']}")
    if environ.get("TESTBRIDGE_TEST_ONLY"):
        options += ["-k", environ["TESTBRIDGE_TEST_ONLY"]]
        filtered = True

    shard = None
    if "TEST_TOTAL_SHARDS" in environ:
        shard = _Shard(int(environ["TEST_SHARD_INDEX"]), int(environ["TEST_TOTAL_SHARDS"]))
        plugins.append(shard)
        # Tells Bazel that this runner shards; without it every shard would have to run everything.
        pathlib.Path(environ["TEST_SHARD_STATUS_FILE"]).touch()

    code = pytest.main(options + _arguments(sys.argv[1:]), plugins=plugins)
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        # Nothing to run is a mistake, except where a filter or an empty shard left nothing on
        # purpose.
        if filtered or (shard is not None and shard.collected > 0):
            return 0
        print("pytest_runner: no test was collected", file=sys.stderr)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
