# SPDX-License-Identifier: Apache-2.0
"""The compiled CUDA kernels: instructions, registers, local memory. Needs no GPU.

ATTENTION_TEST_ARCHITECTURE names what the library was built for: sm_X, or compute_X for PTX too.
"""

import os
import pathlib
import re

import pytest

from tests.build import cuda_code, inspection

_LIBRARY = pathlib.Path(__file__).parents[2] / "kernels/ffi/libattention_cuda.so"

_BUCKETS = ["32, 32", "64, 64", "96, 96", "128, 128", "192, 128", "192, 192", "256, 256"]
_REGISTERS = 65536  # of a multiprocessor


@pytest.fixture(scope="module")
def kernels():
    return cuda_code.kernels(_LIBRARY, inspection.cuobjdump())


def _matching(kernels, pattern):
    found = {name: k for name, k in kernels.items() if re.fullmatch(pattern, name)}
    assert found, f"no kernel matches {pattern}"
    return found


def test_the_library_has_the_wanted_architecture_alone():
    kind, _, number = os.environ["ATTENTION_TEST_ARCHITECTURE"].partition("_")
    name = f"sm_{number}"
    ptx = {name} if kind == "compute" else set()
    assert inspection.cuda_architectures(_LIBRARY) == ({name}, ptx)


@pytest.mark.parametrize("bucket", _BUCKETS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_every_bucket_has_its_kernels(kernels, dtype, bucket):
    for product in ("", ", tf32x3") if dtype == "f32" else ("",):
        for rows in ("16", "64"):
            for general in ("true", "false"):
                _matching(kernels, rf"Forward<{dtype}{product}, {bucket}, {rows}, {general}>")
        for general in ("true", "false"):
            _matching(kernels, rf"BackwardQ<{dtype}{product}, {bucket}, {general}>")
            _matching(kernels, rf"BackwardKv<{dtype}{product}, {bucket}, {general}, .*>")
        _matching(kernels, rf"BackwardBias<{dtype}{product}, {bucket}>")


# Head dims 64 and 128 in 16-bit types are what nearly every model runs.
_MAIN = r"(?:Forward|BackwardQ|BackwardKv|BackwardBias)<(?:bf16|f16), (?:64, 64|128, 128)(?:, .*)?>"


# Where the compiler runs out of registers, on architectures that nobody tuned for: a few bytes of
# stack in gradient kernels of head dim 128 (docs/kernels.md).
_SPILLS = {
    "sm_80": None,
    "sm_86": "BackwardKv<b?f16, 128, 128, false, .*, true>",
    "compute_120": "BackwardKv<b?f16, 128, 128, (?:false, .*, true|true, .*, false)>",
}
_MOST_SPILLED_BYTES = 64


def test_main_kernels_use_no_local_memory(kernels):
    spills = _SPILLS[os.environ["ATTENTION_TEST_ARCHITECTURE"]]
    for name, kernel in _matching(kernels, _MAIN).items():
        if spills and re.fullmatch(spills, name):
            assert kernel["stack"] <= _MOST_SPILLED_BYTES, f"{name}: {kernel}"
            continue
        local = kernel["stack"], kernel["local_loads"], kernel["local_stores"]
        assert local == (0, 0, 0), f"{name}: stack, local loads, local stores are {local}"


def test_main_kernels_use_tensor_cores_ldmatrix_and_asynchronous_copies(kernels):
    for name, kernel in _matching(kernels, _MAIN).items():
        for operation in ("mma", "ldmatrix", "async_copies"):
            assert kernel[operation] > 0, f"{name} has no {operation}"


def test_every_kernel_fits_a_multiprocessor(kernels):
    for name, kernel in kernels.items():
        assert kernel["threads"] * kernel["registers"] <= _REGISTERS, name


def test_two_blocks_of_four_warps_fit_a_multiprocessor(kernels):
    # The planner counts on it (blocks_per_multiprocessor in kernels/cuda/plan.cc).
    for name, kernel in _matching(kernels, r"Forward<.*>").items():
        if kernel["threads"] == 128:
            assert 2 * 128 * kernel["registers"] <= _REGISTERS, name
