# SPDX-License-Identifier: Apache-2.0
"""The committed table of the compiled CUDA kernels is of the kernels that are built."""

import json
import pathlib

from tests.build import cuda_code, inspection

_FOLDER = pathlib.Path(__file__).parent
_LIBRARY = _FOLDER.parents[1] / "kernels/ffi/libattention_cuda.so"
_TABLE = _FOLDER / "cuda_kernels.json"


def test_the_committed_table_is_of_these_kernels():
    # The compiler is pinned, so equal sources give equal numbers.
    kernels = cuda_code.kernels(_LIBRARY, inspection.cuobjdump())
    committed = json.loads(_TABLE.read_text())
    changed = [
        f"{name}: committed {committed.get(name)}, built {kernels.get(name)}"
        for name in sorted(committed.keys() | kernels.keys())
        if committed.get(name) != kernels.get(name)
    ]
    assert not changed, (
        "the compiled kernels changed; look at the numbers, then "
        "`bazel run //tests/build:cuda_table`:\n" + "\n".join(changed)
    )
