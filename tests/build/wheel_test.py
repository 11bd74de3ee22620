# SPDX-License-Identifier: Apache-2.0
"""The wheel as it would be published, but for one GPU architecture: contents and libraries."""

import contextlib
import io
import pathlib
import re
import subprocess
import sys
import zipfile

import pytest
from auditwheel.wheel_abi import analyze_wheel_abi

import jax_ops
from tests.build import inspection

_ROOT = pathlib.Path(__file__).parents[2]
_LIBRARIES = ("libattention_cpu.so", "libattention_cuda.so")


@pytest.fixture(scope="module")
def wheel() -> pathlib.Path:
    (path,) = (_ROOT / "jax_ops/wheel").iterdir()
    return path


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(params=_LIBRARIES)
def library(request, unpacked) -> pathlib.Path:
    return unpacked / "jax_ops/_lib" / request.param


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top = {name.split("/")[0] for name in names}
    assert top == {"jax_ops", f"jax_ops_attention-{jax_ops.__version__}.dist-info"}
    assert {n.split("/")[-1] for n in names if n.endswith(".so")} == set(_LIBRARIES)
    assert "jax_ops/py.typed" in names
    assert "jax_ops/__init__.py" in names
    assert not [n for n in names if n.endswith((".pyc", ".bazel", "_test.py"))]


def test_every_module_of_the_source_is_in_the_wheel(wheel):
    package = pathlib.Path(jax_ops.__file__).parent
    sources = {str(p.relative_to(package.parent)) for p in package.rglob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        assert {n for n in archive.namelist() if n.endswith(".py")} == sources


def test_auditwheel_agrees_with_the_tag(wheel):
    tag = re.search(r"-(manylinux_\d+_\d+)_x86_64\.whl$", wheel.name)[1]
    with contextlib.redirect_stderr(io.StringIO()):
        abi = analyze_wheel_abi(
            None, None, wheel, frozenset(), disable_isa_ext_check=False, allow_graft=False
        )
    promised = tuple(map(int, tag.split("_")[1:]))
    allowed = tuple(map(int, abi.overall_policy.name.split("_")[1:3]))
    assert allowed <= promised


def test_libraries_need_nothing_but_the_c_library(library):
    assert inspection.dynamic_entries(library, "NEEDED") <= inspection.ALLOWED_LIBRARIES
    assert not inspection.dynamic_entries(library, "RPATH")
    assert not inspection.dynamic_entries(library, "RUNPATH")


def test_libraries_show_only_the_interface(library):
    shown = inspection.exported_symbols(library)
    assert shown
    assert {name for name in shown if not name.startswith("attention_")} == set()


def test_no_path_of_the_build_is_in_any_file(unpacked):
    for path in unpacked.rglob("*"):
        if path.is_file():
            assert inspection.foreign_paths(path.read_bytes()) == set(), path


def test_the_cuda_library_holds_the_architecture_it_was_built_for(unpacked):
    machine_code, ptx = inspection.cuda_architectures(
        unpacked / "jax_ops/_lib/libattention_cuda.so"
    )
    assert machine_code == {"sm_80"}
    assert ptx == set()


def test_the_cuda_library_loads_without_a_gpu(unpacked):
    # In a process of its own: a library that crashes when it is loaded must not take the tests
    # along.
    program = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    library = unpacked / "jax_ops/_lib/libattention_cuda.so"
    subprocess.run([sys.executable, "-c", program, str(library)], check=True)
