# SPDX-License-Identifier: Apache-2.0
"""What the build's tests read out of compiled files."""

import os
import pathlib
import re
import subprocess
import sys

# What a library may ask the system for: the parts of glibc, and GCC's unwinder.
ALLOWED_LIBRARIES = {
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
}


def dynamic_entries(library: pathlib.Path, tag: str) -> set[str]:
    """Returns the values of one tag (NEEDED, RPATH, RUNPATH) of a library's dynamic section."""
    output = subprocess.run(
        ["readelf", "--wide", "--dynamic", str(library)], capture_output=True, text=True, check=True
    ).stdout
    return set(re.findall(rf"\({tag}\).*\[(.*)\]", output))


def exported_symbols(library: pathlib.Path) -> set[str]:
    """Returns the functions and variables that can be seen from outside."""
    output = subprocess.run(
        ["nm", "--dynamic", "--defined-only", str(library)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return {line.split()[-1].split("@")[0] for line in output.splitlines()}


def foreign_paths(data: bytes) -> set[str]:
    """Returns the paths in a file that only the machine which built it has.

    Home folders, Bazel's output root, sandboxes and scratch folders. The system's own folders
    (/usr, /lib, /proc, /sys, /dev) are the same everywhere.
    """
    pattern = (
        rb"(?:/(?:ro"
        + rb"ot|ho"
        + rb"me|tm"
        + rb"p|wo"
        + rb"rk|var|mnt|srv)/[\w.+@-]+[\w./+@-]*|[\w./-]*(?:execroot|sandbox)/[\w./-]+)"
    )
    return {match.decode() for match in re.findall(pattern, data)}


def cuda_architectures(library: pathlib.Path) -> tuple[set[str], set[str]]:
    """Returns the architectures of the machine code and of the PTX in a library."""
    found = []
    for kind in ("--list-elf", "--list-ptx"):
        output = subprocess.run(
            [cuobjdump(), kind, str(library)], capture_output=True, text=True, check=False
        )
        assert output.returncode == 0 or "does not contain" in output.stderr, output.stderr
        found.append(set(re.findall(r"\.(sm_\w+)\.(?:cubin|ptx)", output.stdout)))
    return found[0], found[1]


def cuobjdump() -> str:
    """Returns the path of the locked cuobjdump."""
    for folder in sys.path:
        program = pathlib.Path(folder, "nvidia/cu13/bin/cuobjdump")
        if program.exists():
            assert os.access(program, os.X_OK)
            return str(program)
    raise FileNotFoundError("cuobjdump is not among the locked packages")
