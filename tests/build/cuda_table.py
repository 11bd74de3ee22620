# SPDX-License-Identifier: Apache-2.0
"""Writes tests/build/cuda_kernels.json: bazel run //tests/build:cuda_table."""

import os
import pathlib
import sys

from tests.build import cuda_code, inspection


def main() -> None:
    """Reads the library that was built and rewrites the table in the workspace."""
    workspace = os.environ.get("BUILD_WORKSPACE_DIRECTORY")
    if workspace is None:
        sys.exit("cuda_table: run it with `bazel run //tests/build:cuda_table`")
    library = pathlib.Path(__file__).parent.parent.parent / "kernels/ffi/libattention_cuda.so"
    table = cuda_code.kernels(library, inspection.cuobjdump())
    path = pathlib.Path(workspace, "tests/build/cuda_kernels.json")
    path.write_text(cuda_code.to_text(table))
    print(f"{path}: {len(table)} kernels")


if __name__ == "__main__":
    main()
