# SPDX-License-Identifier: Apache-2.0
"""Runs Bazel on a copy of the workspace, with nothing shared with the Bazel that runs the test."""

import os
import pathlib
import re
import shutil
import subprocess

_WORKSPACE_FILE = pathlib.Path(__file__).parents[2] / "WORKSPACE"


def source_tree() -> pathlib.Path:
    """Returns the checkout that the test was built from, into which runfiles are links."""
    return _WORKSPACE_FILE.resolve().parent


class Checkout:
    """A copy of the tracked files, with its own Bazel server, output root and scratch folder."""

    def __init__(self, root: pathlib.Path, name: str, jobs: int):
        if "NESTED" not in os.environ:
            raise RuntimeError(
                "run this test with --config=nested, which lets the inner Bazel fetch"
            )
        self.root = root
        self.folder = root / name
        self._jobs = jobs
        self._poison: dict[str, str] = {}
        self._scratch = root / f"{name}-scratch"
        self._scratch.mkdir(parents=True)
        tree = source_tree()
        listed = subprocess.run(
            [
                "git",
                "-C",
                str(tree),
                "ls-files",
                "--cached",
                "--others",
                "--exclude-standard",
                "-z",
            ],
            capture_output=True,
            check=True,
        ).stdout.decode()
        for file in filter(None, listed.split("\0")):
            if (tree / file).is_file():
                (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(tree / file, self.folder / file)

    def bazel(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
        """Runs a Bazel command and returns the finished process."""
        kept = ("PATH", "HOME", "PIP_", "SSL_", "http_proxy", "https_proxy", "HERMETIC_", "PYENV_")
        environ = {k: v for k, v in os.environ.items() if k.startswith(kept)}
        environ |= {"TMPDIR": str(self._scratch)} | self._poison | variables
        startup = [f"--output_user_root={self.root / 'output' / self.folder.name}"]
        command, *rest = arguments
        flags = [] if command in ("info", "shutdown") else [f"--jobs={self._jobs}", "--config=ci"]
        return subprocess.run(
            [self._program(), *startup, command, *flags, *rest],
            cwd=self.folder,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )

    def build(self, *targets: str) -> pathlib.Path:
        """Builds targets and returns the folder of the outputs."""
        process = self.bazel("build", *targets)
        assert process.returncode == 0, process.stderr[-4000:]
        return self.folder / "bazel-bin"

    def close(self) -> None:
        """Stops the server."""
        self.bazel("shutdown")

    def poison(self) -> None:
        """Offers every later command a CUDA installation that must not be used.

        Its programs fail, its headers do not compile, and options for nvcc are wrong.
        """
        root = self.root / "poison"
        for folder in ("bin", "include", "lib64"):
            (root / folder).mkdir(parents=True)
        for name in ("nvcc", "cicc", "ptxas", "fatbinary", "cudafe++", "cuobjdump"):
            program = root / "bin" / name
            program.write_text(f"#!/bin/sh\necho the {name} of the machine ran >&2\nexit 1\n")
            program.chmod(0o755)
        for name in ("cuda.h", "cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h"):
            (root / "include" / name).write_text(f"#error the {name} of the machine was read\n")
        places = ("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CUDA_TOOLKIT_PATH", "CUDAToolkit_ROOT")
        self._poison = dict.fromkeys(places, str(root)) | {
            "PATH": f"{root / 'bin'}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": str(root / "lib64"),
            "NVCC_PREPEND_FLAGS": "--no-such-option-of-the-machine",
            "NVCC_APPEND_FLAGS": "--no-such-option-of-the-machine",
            "NVCC_CCBIN": "/no/such/compiler",
        }

    @staticmethod
    def _program() -> str:
        for name in ("bazel", "bazelisk"):
            found = shutil.which(name, path=os.environ["PATH"] + ":/usr/local/bin:/usr/bin:/bin")
            if found:
                return found
        raise FileNotFoundError("neither bazel nor bazelisk is on PATH")


def compiler_versions() -> dict[str, str]:
    """Returns the versions that the bytes of an output depend on."""
    gcc = subprocess.run(["gcc", "--version"], capture_output=True, text=True, check=True).stdout
    linker = subprocess.run(["ld", "--version"], capture_output=True, text=True, check=True).stdout
    return {
        "gcc": re.findall(r"[\d.]+\d", gcc.splitlines()[0])[-1],
        "ld": re.findall(r"[\d.]+\d", linker.splitlines()[0])[-1],
    }
