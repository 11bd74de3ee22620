# SPDX-License-Identifier: Apache-2.0
"""Checks every file of the repository, or with --fix repairs what can be repaired by itself.

`bazel run //tools:lint` runs all checks; `-- --only=ruff,mypy` some of them. Every tool is a locked
package, so that the verdict is the same everywhere.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterable

MAX_LINES = 500

# What must not be in any file, and why. The patterns are written so that they do not match
# themselves.
FORBIDDEN = (
    (re.compile(r"(?<![\w.])/(?:root|work|home|opt)/\w"), "a path of one machine"),
    (re.compile(r"(?<![\w.])/tmp/[a-z]"), "a fixed path in a folder that everybody shares"),
    (
        re.compile(r"\bpypi\.(?:org|io)|pythonhosted\.(?:org)|registry\.npmjs\.(?:org)"),
        "a package registry's host",
    ),
    (re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|X" + r"XX|HA" + r"CK)\b"), "a note of work not done"),
)

# Data and texts, which have no maximum length.
LONG_SUFFIXES = {".json", ".txt", ".md", ".html", ".svg"}

SOURCE_SUFFIXES = {".py", ".bzl", ".bazel", ".cc", ".cu", ".h", ".cuh", ".inc", ".sh"}
CXX_SUFFIXES = {".cc", ".cu", ".h", ".cuh", ".inc"}


class Files:
    """The files that git would track, as paths relative to the workspace."""

    def __init__(self, workspace: pathlib.Path):
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=workspace,
            capture_output=True,
            check=True,
        ).stdout.decode()
        self.workspace = workspace
        self.all = sorted(
            p
            for name in listed.split("\0")
            if name and (p := pathlib.Path(name)) and (workspace / p).is_file()
        )

    def with_suffix(self, suffixes: Iterable[str]) -> list[str]:
        """Returns the files whose names end in one of the suffixes."""
        return [str(p) for p in self.all if p.suffix in suffixes]

    def text(self, path: pathlib.Path) -> str | None:
        """Returns a file's text, or None for binary files."""
        try:
            return (self.workspace / path).read_text()
        except UnicodeDecodeError:
            return None


def run(files: Files, command: list[str], paths: list[str]) -> list[str]:
    """Runs a tool on files, and returns its output as complaints if it fails."""
    if not paths:
        return []
    result = subprocess.run(
        command + paths, cwd=files.workspace, capture_output=True, text=True, check=False
    )
    if result.returncode == 0:
        return []
    output = (result.stdout + result.stderr).strip()
    return output.splitlines() or [f"{command[0]} ended with exit code {result.returncode}"]


def packaged_program(name: str) -> str:
    """Finds a program that a locked package brings."""
    for folder in map(pathlib.Path, sys.path):
        for place in (folder / "bin", folder / "clang_format" / "data" / "bin"):
            if (place / name).exists():
                return str(place / name)
    sys.exit(f"lint: {name} is not among the locked packages")


def check_buildifier(files: Files, fix: bool) -> list[str]:
    """Bazel files: layout and lint warnings."""
    runfiles = pathlib.Path(__file__).absolute().parents[2]
    program = str(runfiles / "buildifier" / "buildifier")
    paths = [str(p) for p in files.all if p.suffix in (".bzl", ".bazel") or p.name == "WORKSPACE"]
    # Bazel 4 has its own rules and providers built in, and names them as the warnings of the first
    # line dislike. Macros that only WORKSPACE calls have no name.
    off = ("native-cc-common", "native-cc-info", "native-sh-binary", "unnamed-macro")
    warnings = ",".join(f"-{name}" for name in off)
    mode = ["-mode=fix", "-lint=fix"] if fix else ["-mode=diff", "-lint=warn"]
    return run(files, [program, *mode, f"-warnings={warnings}"], paths)


def check_ruff(files: Files, fix: bool) -> list[str]:
    """Python files: lint."""
    paths = files.with_suffix({".py"})
    return run(
        files, [packaged_program("ruff"), "check", "--no-cache", "--quiet"] + ["--fix"] * fix, paths
    )


def check_ruff_format(files: Files, fix: bool) -> list[str]:
    """Python files: layout."""
    paths = files.with_suffix({".py"})
    command = [packaged_program("ruff"), "format", "--no-cache", "--quiet"]
    return run(files, command + ([] if fix else ["--diff"]), paths)


def check_clang_format(files: Files, fix: bool) -> list[str]:
    """C++ and CUDA files: layout."""
    command = [packaged_program("clang-format"), "--style=file"]
    return run(
        files,
        command + (["-i"] if fix else ["--dry-run", "-Werror"]),
        files.with_suffix(CXX_SUFFIXES),
    )


def check_mypy(files: Files, fix: bool) -> list[str]:
    """Types of the jax_ops package."""
    del fix
    return run(
        files,
        [sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir=/dev/null"],
        ["--package=jax_ops"],
    )


def check_shell(files: Files, fix: bool) -> list[str]:
    """Shell scripts."""
    del fix
    paths = []
    for path in files.all:
        if path.suffix in ("", ".sh") and re.match(
            r"#!/bin/(ba)?sh|#!/usr/bin/env bash", files.text(path) or ""
        ):
            paths.append(str(path))
    return run(files, [packaged_program("shellcheck")], paths)


def check_lengths(files: Files, fix: bool) -> list[str]:
    """A file that grows past the limit holds two ideas."""
    del fix
    complaints = []
    for path in files.all:
        text = files.text(path)
        if text is None or path.suffix in LONG_SUFFIXES or path.name == "LICENSE":
            continue
        lines = text.count("\n")
        if lines > MAX_LINES:
            complaints.append(f"{path}: {lines} lines; at most {MAX_LINES}")
    return complaints


def check_forbidden(files: Files, fix: bool) -> list[str]:
    """Words that must not be committed."""
    del fix
    complaints = []
    for path in files.all:
        for number, line in enumerate((files.text(path) or "").splitlines(), 1):
            for pattern, why in FORBIDDEN:
                match = pattern.search(line)
                if match:
                    complaints.append(f"{path}:{number}: '{match[0]}' is {why}")
    return complaints


def check_licence(files: Files, fix: bool) -> list[str]:
    """Every source file names its licence in its first lines."""
    del fix
    complaints = []
    for path in files.all:
        if path.suffix in SOURCE_SUFFIXES and "shims" not in path.parts:
            head = (files.text(path) or "").splitlines()[:3]
            if any(head) and not any(
                "SPDX-License-Identifier: Apache-2.0" in line for line in head
            ):
                complaints.append(
                    f"{path}: no line `SPDX-License-Identifier: Apache-2.0` among the first three"
                )
    return complaints


CHECKS: dict[str, Callable[[Files, bool], list[str]]] = {
    "buildifier": check_buildifier,
    "ruff": check_ruff,
    "ruff-format": check_ruff_format,
    "clang-format": check_clang_format,
    "mypy": check_mypy,
    "shellcheck": check_shell,
    "lengths": check_lengths,
    "forbidden": check_forbidden,
    "licence": check_licence,
}


def main() -> int:
    """Runs the checks and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fix", action="store_true", help="repair what can be repaired")
    parser.add_argument(
        "--only", default=",".join(CHECKS), help=f"separated by commas: {', '.join(CHECKS)}"
    )
    args = parser.parse_args()
    wanted = args.only.split(",")
    unknown = [name for name in wanted if name not in CHECKS]
    if unknown:
        parser.error(f"--only: got {', '.join(unknown)}; allowed: {', '.join(CHECKS)}")

    files = Files(pathlib.Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", os.getcwd())))
    failed = []
    for name in wanted:
        complaints = CHECKS[name](files, args.fix)
        print(
            f"lint: {name}: {'ok' if not complaints else f'{len(complaints)} lines of complaints'}",
            flush=True,
        )
        for line in complaints:
            print(f"  {line}")
        if complaints:
            failed.append(name)
    if failed:
        print(
            f"lint: failed: {', '.join(failed)}"
            " (some can be repaired with `bazel run //tools:lint -- --fix`)"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
