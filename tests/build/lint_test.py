# SPDX-License-Identifier: Apache-2.0
"""The lints that are this project's own find what they are for."""

import pathlib
import subprocess

import pytest

from tools import lint

_GOOD = "# SPDX-License-Identifier: Apache-2.0\n"


@pytest.fixture
def files(tmp_path):
    """Makes a repository of the given files."""

    def make(**contents: str) -> lint.Files:
        subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
        for name, text in contents.items():
            path = tmp_path / name.replace("__", "/").replace("_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return lint.Files(tmp_path)

    return make


def test_good_files_have_no_complaints(files):
    good = files(a_py=_GOOD + "x = 1\n", b_cc=_GOOD.replace("#", "//"), c_md="# Title\n")
    for check in (lint.check_lengths, lint.check_forbidden, lint.check_licence):
        assert check(good, False) == []


@pytest.mark.parametrize(
    "line",
    [
        "path = '/" + "root/x'",
        "path = '/" + "home/someone'",
        "see /" + "work/main/x.cc",
        "log = open('/" + "tmp/log')",
        "# TO" + "DO: later",
        "index = 'https://py" + "pi.org/simple'",
    ],
)
def test_forbidden_words_are_found(files, line):
    (complaint,) = lint.check_forbidden(files(a_py=_GOOD + line + "\n"), False)
    assert complaint.startswith("a.py:2: ")


@pytest.mark.parametrize(
    "line", ["homework/x", "import todo_list", "a/root/b", "url = 'x.org/tmp'"]
)
def test_words_that_only_look_alike_pass(files, line):
    assert lint.check_forbidden(files(a_py=_GOOD + line + "\n"), False) == []


def test_long_files_are_found(files):
    made = files(a_py=_GOOD * 501, b_py=_GOOD * 500, c_json="1\n" * 900)
    assert lint.check_lengths(made, False) == ["a.py: 501 lines; at most 500"]


def test_a_missing_licence_line_is_found(files):
    made = files(a_py="x = 1\n", b_py="", c_txt="x\n")
    (complaint,) = lint.check_licence(made, False)
    assert complaint.startswith("a.py: ")


def test_a_failing_tool_is_a_complaint(files, tmp_path):
    made = files(a_py=_GOOD)
    assert lint.run(made, ["false"], ["a.py"]) == ["false ended with exit code 1"]
    assert lint.run(made, ["true"], ["a.py"]) == []
    assert lint.run(made, ["false"], []) == []
    assert pathlib.Path(tmp_path, "a.py").exists()


def test_ignored_files_are_left_alone(files, tmp_path):
    (tmp_path / ".gitignore").write_text("skipped.py\n")
    made = files(skipped_py="/" + "root/x\n", a_py=_GOOD)
    assert [str(p) for p in made.all] == [".gitignore", "a.py"]
