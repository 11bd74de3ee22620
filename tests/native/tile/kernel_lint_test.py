# SPDX-License-Identifier: Apache-2.0
"""Kernel sources keep the tile layer's rules. Each rule is broken here once: is it noticed?"""

import pathlib

import pytest

from tests.native.tile.kernel_lint import complaints, pointer_members

_ROOT = pathlib.Path(__file__).parents[3]
_KERNELS = _ROOT / "kernels/cuda"
# Host code beside the kernels.
_HOST = {"attention.h", "units.h", "forward_unit.h", "backward_unit.h"}


def _members() -> set[str]:
    headers = [_ROOT / "kernels/common/problem.h", *_KERNELS.glob("*_params.h")]
    return set().union(*(pointer_members(h.read_text()) for h in headers))


def _device_headers() -> list[pathlib.Path]:
    return sorted(h for h in _KERNELS.glob("*.h") if h.name not in _HOST)


def test_there_is_something_to_check():
    assert len(_device_headers()) >= 10
    assert {"q", "data", "partial_out", "lse"} <= _members()


@pytest.mark.parametrize("header", [h.name for h in _device_headers()])
def test_kernels_keep_the_rules(header):
    found = complaints((_KERNELS / header).read_text(), _members())
    assert not found, "\n".join(f"kernels/cuda/{header}:{line}: {why}" for line, why in found)


@pytest.mark.parametrize(
    "code",
    [
        'asm volatile("bar.sync 0;");',
        "kernel<<<1, 32>>>(p);",
        "const int t = threadIdx.x;",
        "__shared__ float s[32];",
        "__global__ void f() {}",
        "__syncthreads();",
        "x = __shfl_xor_sync(0xffffffffu, x, 1);",
        "y = __ldg(p);",
        "atomicAdd(counter, 1);",
        "#if ATTENTION_ON_GPU\n#endif",
        "#ifdef __CUDA_ARCH__\n#endif",
        "#include <cstdint>",
        "#include <cuda_fp16.h>",
        "emulator::mma(d, a, b);",
        "memcpy(a, b, 4);",
        "const f32* from = params.x; f32 y = from[3];",
        "const f32* from = params.x; f32 y = *from;",
        "const f32* from = params.x;\n  if (*from > 0) y = 1;",
        "T* to = params.out;\n  to[i] = 1;",
        "T* to = params.out;\n  *to = x;",
        "f32 y = params.partial_out[3];",
        "f32 y = ctx.problem->data[3];",
        "f32 y = *params.partial_out;",
        "i32 n = p.kv_lengths.row(b)[0];",
        "i32 n = *p.kv_lengths.row(b);",
        "f32 y = *tile.at(r, c).p;",
    ],
)
def test_each_rule_can_be_broken(code):
    found = complaints(f"void run() {{\n  {code}\n}}\n", {"partial_out", "data"})
    assert found and found[0][0] >= 2


@pytest.mark.parametrize(
    "code",
    [
        '#include "kernels/cuda/tile/tile.h"',
        "// asm, threadIdx.x and *pointers[i] in a comment",
        "const f32* from = params.x + i * stride;\n  f32 y = tile::global_load(from)[0];",
        "f32 lse[4];\n  lse[r] = a * b;",
        "y = 2.f * scale * lse;",
        "if (params.partial_out) store(params.partial_out + i * n);",
        "const i64 at = i * data;",
        "[&](i32 i) -> f32* { return params.partial_out + i; }",
        "tile::atomic_add(counter, 1);",
    ],
)
def test_what_is_allowed(code):
    assert complaints(f"void run() {{\n  {code}\n}}\n", {"partial_out", "data"}) == []
