# SPDX-License-Identifier: Apache-2.0
"""The runner keeps Bazel's test protocol: exit codes, filter, shards, report."""

import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

_RUNNER = pathlib.Path(__file__).parents[2] / "bazel/python/private/pytest_runner.py"

_TESTS = """
import pytest

@pytest.mark.parametrize("i", range(7))
def test_number(i):
    print("ran", i)

def test_other():
    print("ran other")
"""


@pytest.fixture
def run(tmp_path):
    """Runs the runner on a text, and returns the finished process."""

    def run_text(text: str, arguments=(), **variables: str) -> subprocess.CompletedProcess:
        path = tmp_path / "some_test.py"
        path.write_text(text)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TEST", "XML"))}
        return subprocess.run(
            [sys.executable, "-S", str(_RUNNER), str(path), "--", "-s", *arguments],
            env=kept | variables,
            capture_output=True,
            text=True,
            check=False,
        )

    return run_text


def _ran(process: subprocess.CompletedProcess) -> set[str]:
    return {
        line.split("ran ")[1].split(".")[0]
        for line in process.stdout.splitlines()
        if "ran " in line
    }


def test_passing_and_failing_files(run):
    assert run(_TESTS).returncode == 0
    assert run("def test_wrong():\n    assert 1 == 2\n").returncode == 1


def test_nothing_collected_is_a_failure(run):
    process = run("x = 1\n")
    assert process.returncode != 0
    assert "no test was collected" in process.stderr


def test_an_error_at_import_is_a_failure(run):
    assert run("import no_such_module\n").returncode != 0


def test_filter_selects_and_may_leave_nothing(run):
    process = run(_TESTS, TESTBRIDGE_TEST_ONLY="other")
    assert (process.returncode, _ran(process)) == (0, {"other"})
    assert run(_TESTS, TESTBRIDGE_TEST_ONLY="no_such_name").returncode == 0


def test_shards_part_the_tests_evenly_and_completely(run, tmp_path):
    status = tmp_path / "status"
    parts = []
    for index in range(3):
        process = run(
            _TESTS,
            TEST_TOTAL_SHARDS="3",
            TEST_SHARD_INDEX=str(index),
            TEST_SHARD_STATUS_FILE=str(status),
        )
        assert process.returncode == 0
        parts.append(_ran(process))
    assert status.exists()
    assert sorted(map(len, parts)) == [2, 3, 3]
    assert set.union(*parts) == {*map(str, range(7)), "other"}


def test_an_empty_shard_passes_but_an_empty_file_does_not(run, tmp_path):
    shard = {
        "TEST_TOTAL_SHARDS": "20",
        "TEST_SHARD_INDEX": "19",
        "TEST_SHARD_STATUS_FILE": str(tmp_path / "status"),
    }
    assert run(_TESTS, **shard).returncode == 0
    assert run("x = 1\n", **shard).returncode != 0


def test_report_counts_skips(run, tmp_path):
    report = tmp_path / "report.xml"
    text = "import pytest\n\n@pytest.mark.skip(reason='no such device')\ndef test_a():\n    pass\n"
    process = run(text + _TESTS, XML_OUTPUT_FILE=str(report))
    assert "no such device" in process.stdout
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert (suite.get("tests"), suite.get("skipped"), suite.get("failures")) == ("9", "1", "0")
