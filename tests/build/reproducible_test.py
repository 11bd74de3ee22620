# SPDX-License-Identifier: Apache-2.0
"""Two checkouts give the same bytes.

Their paths differ in length, and so do output roots, numbers of jobs and scratch folders; the
second one's environment offers a CUDA installation that would break the build. Compared
are every shared library, the objects of one CUDA unit per operation and the wheel; with NIGHTLY=1
every CUDA object. A mismatch names the file and its differing sections.

A manual, local test: it runs Bazel twice from nothing, with the network for pip.
"""

import hashlib
import os
import pathlib
import re
import subprocess

import pytest

from tests.build import nested

# The CUDA library of the wheel takes minutes even for one architecture: the full check is for the
# night.
_QUICK = (
    "//tests/build:cuda_units",
    "//tests/build:libfixture.so",
    "//kernels/ffi:libattention_cpu.so",
)
_FULL = (*_QUICK, "//kernels/ffi:libattention_cuda.so", "//jax_ops:wheel")
_SUFFIXES = (".so", ".pic.o", ".whl")


def _digests(outputs: pathlib.Path) -> dict[str, str]:
    return {
        str(path.relative_to(outputs)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(outputs.rglob("*"))
        if path.name.endswith(_SUFFIXES) and path.is_file() and ".runfiles" not in str(path)
    }


def _differing_sections(first: pathlib.Path, second: pathlib.Path) -> str:
    """Names the sections of two object files whose contents differ."""

    def sections(path: pathlib.Path) -> dict[str, str]:
        listed = subprocess.run(
            ["readelf", "--wide", "--section-headers", str(path)],
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        names = [line.split("]")[1].split()[0] for line in listed.splitlines() if "] ." in line]
        return {
            name: subprocess.run(
                ["readelf", "--wide", f"--hex-dump={name}", str(path)],
                capture_output=True,
                text=True,
                check=False,
            ).stdout
            for name in names
        }

    one, two = sections(first), sections(second)
    return ", ".join(n for n in one.keys() | two.keys() if one.get(n) != two.get(n)) or "no section"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Builds in two checkouts, one after the other."""
    root = tmp_path_factory.mktemp("reproducible")
    targets = _FULL if os.environ.get("NIGHTLY") else _QUICK
    checkouts = (
        nested.Checkout(root / "a", "short", jobs=2),
        nested.Checkout(root / "b", "a-much-longer-name-of-a-checkout", jobs=1),
    )
    flags = ["--//bazel/cuda:architectures=sm_80", "--output_groups=+cuda_objects"]
    built = []
    checkouts[1].poison()
    for checkout in checkouts:
        built.append(checkout.build(*flags, *targets))
        checkout.close()
    return built


def test_two_checkouts_give_the_same_bytes(outputs, capsys):
    first, second = (_digests(folder) for folder in outputs)
    assert first.keys() == second.keys()
    different = [
        f"{name}: {_differing_sections(outputs[0] / name, outputs[1] / name)}"
        for name in first
        if first[name] != second[name]
    ]
    assert different == []
    with capsys.disabled():
        print(f"\n{len(first)} files are equal; compilers: {nested.compiler_versions()}")


def test_the_comparison_covers_what_it_should(outputs):
    names = _digests(outputs[0]).keys()
    assert any(n.endswith("libattention_cpu.so") for n in names)
    objects = [n for n in names if "_objs/cuda_units/" in n]
    by_operation = {n.split("kernels_cuda_")[1].split("_")[0]: n for n in objects}
    assert by_operation.keys() == {"forward", "backward"}
    # Both forms of the backward pass: of the flags of BackwardKv the last says that it adds up dQ.
    symbols = (outputs[0] / by_operation["backward"]).read_bytes()
    for one_kernel in (0, 1):
        assert re.search(rf"BackwardKv\w*Lb0ELb1ELb1ELb{one_kernel}E".encode(), symbols)


def test_an_object_that_differs_is_named_with_its_section(tmp_path):
    paths = []
    for value in (1, 2):
        source = tmp_path / f"{value}.c"
        source.write_text(f"const int x = {value};\n")
        paths.append(tmp_path / f"{value}.o")
        subprocess.run(["gcc", "-c", str(source), "-o", str(paths[-1])], check=True)
    assert ".rodata" in _differing_sections(*paths)
