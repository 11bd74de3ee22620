# SPDX-License-Identifier: Apache-2.0
"""bazelw finds Bazel, installs only where it may, and else says in one message what to install.

Each test makes a PATH of its own, with stand-ins that write down how they were called.
"""

import os
import pathlib
import shutil
import subprocess

import pytest

_BAZELW = pathlib.Path(__file__).parents[2] / "bazelw"

# What the script itself calls; linked one by one, so that nothing else of the machine is on PATH.
_COREUTILS = ("cat", "dirname", "env", "mktemp", "rm", "sed", "sh", "tail", "tr")


class Machine:
    """A pretended machine: a folder of programs."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.log = folder / "log"
        self.log.touch()
        for name in _COREUTILS:
            (folder / name).symlink_to(shutil.which(name))

    def add(self, name: str, body: str = "") -> None:
        """Adds a program that logs its name and arguments, then does `body`."""
        program = self.folder / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >>"{self.log}"\n{body}\n')
        program.chmod(0o755)

    def add_compiler(self) -> None:
        self.add("gcc")
        self.add("g++")

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
        """Runs bazelw with only these programs."""
        return subprocess.run(
            ["sh", str(_BAZELW), *arguments],
            env={"PATH": str(self.folder), "TMPDIR": str(self.folder)} | variables,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            check=False,
        )

    def calls(self, name: str) -> list[str]:
        """Returns how a program was called."""
        return [c for c in self.log.read_text().splitlines() if c.split(" ")[0] == name]


@pytest.fixture
def machine(tmp_path) -> Machine:
    folder = tmp_path / "bin"
    folder.mkdir()
    return Machine(folder)


@pytest.fixture
def complete(machine) -> Machine:
    machine.add_compiler()
    machine.add("python3")
    machine.add("bazel", "exit 7")
    return machine


def test_arguments_and_exit_code_pass_through(complete):
    process = complete.run("test", "//a b", "--x=*")
    assert process.returncode == 7
    assert complete.calls("bazel") == ["bazel test //a b --x=*"]
    assert process.stderr == ""


def test_bazelisk_gets_the_pinned_version(complete):
    (complete.folder / "bazel").unlink()
    complete.add("bazelisk", f'echo "version ${{USE_BAZEL_VERSION}}" >>"{complete.log}"')
    assert complete.run("version").returncode == 0
    assert complete.calls("version") == ["version 4.2.4"]
    complete.log.write_text("")
    complete.run("version", USE_BAZEL_VERSION="5.0.0")
    assert complete.calls("version") == ["version 5.0.0"]


def test_bazel_is_preferred_to_bazelisk(complete):
    complete.add("bazelisk")
    complete.run("version")
    assert complete.calls("bazel") and not complete.calls("bazelisk")


def test_a_switch_forbids_installing(machine):
    machine.add("apt-get")
    machine.add("id", "echo 0")
    process = machine.run("test", BAZELW_INSTALL="no")
    assert process.returncode == 1
    assert "missing: bazel-bootstrap g++ python3 python3-pip" in process.stderr
    assert "BAZELW_INSTALL=no" in process.stderr
    assert not machine.calls("apt-get")


def test_elsewhere_one_message_says_what_to_install(machine):
    machine.add_compiler()
    machine.add("python3")
    process = machine.run("test")
    assert process.returncode == 1
    assert "no Debian or Ubuntu" in process.stderr
    for word in ("Bazel (4.2.3", "C++17 compiler", "Python 3.11, 3.12 or 3.13 with pip"):
        assert word in process.stderr


def test_without_root_or_sudo_nothing_is_tried(machine):
    machine.add("apt-get")
    machine.add("id", "echo 1000")
    process = machine.run("test")
    assert process.returncode == 1
    assert "needs root or sudo" in process.stderr
    assert not machine.calls("apt-get")


def _installs(machine: Machine, *programs: str) -> None:
    """Makes apt-get bring programs."""
    body = 'case "$*" in *install*)\n'
    for name in programs:
        body += f'printf "#!/bin/sh\\necho {name} \\"\\$*\\" >>{machine.log}\\n" '
        body += f'>"{machine.folder}/{name}"\n/bin/chmod +x "{machine.folder}/{name}"\n'
    machine.add("apt-get", body + ";; esac")


def test_root_installs_what_is_missing_and_goes_on(machine):
    machine.add("id", "echo 0")
    _installs(machine, "bazel", "gcc", "g++", "python3")
    process = machine.run("build", "//x")
    assert process.returncode == 0, process.stderr
    assert "installing with apt-get: bazel-bootstrap g++ python3 python3-pip" in process.stderr
    update, install = machine.calls("apt-get")
    assert update == "apt-get update"
    assert install.endswith("bazel-bootstrap g++ python3 python3-pip")
    assert machine.calls("bazel") == ["bazel build //x"]


def test_only_what_is_missing_is_installed(complete):
    (complete.folder / "bazel").unlink()
    complete.add("id", "echo 1000")
    complete.add("sudo", 'while [ "$1" = -n ]; do shift; done\n[ "$1" = true ] || "$@"')
    _installs(complete, "bazel")
    process = complete.run("version")
    assert process.returncode == 0, process.stderr
    assert complete.calls("apt-get")[-1].endswith("--no-install-recommends bazel-bootstrap")
    assert len(complete.calls("sudo")) == 3


def test_a_failing_installation_shows_its_log(machine):
    machine.add("id", "echo 0")
    machine.add("apt-get", 'echo "E: no space" >&2\nexit 100')
    process = machine.run("test")
    assert process.returncode == 1
    assert "E: no space" in process.stderr
    assert "could not install" in process.stderr


def test_an_old_python_counts_as_missing(complete):
    complete.add("python3", "exit 1")
    process = complete.run("test", BAZELW_INSTALL="no")
    assert process.returncode == 1
    assert "missing: python3 python3-pip" in process.stderr


def test_it_finds_the_pinned_version_from_any_folder(complete, tmp_path):
    (complete.folder / "bazel").unlink()
    complete.add("bazelisk", f'echo "version ${{USE_BAZEL_VERSION}}" >>"{complete.log}"')
    before = os.getcwd()
    try:
        os.chdir(tmp_path)
        complete.run("version")
    finally:
        os.chdir(before)
    assert complete.calls("version") == ["version 4.2.4"]
