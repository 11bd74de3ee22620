# SPDX-License-Identifier: Apache-2.0
"""backend_tests: the same pytest files on each backend, one target a backend."""

load("//bazel/python:defs.bzl", "pytest_test")

BACKENDS = ["xla", "cpu", "emulated", "cuda"]

def backend_tests(name, srcs, data = [], backends = BACKENDS, sizes = {}, tags = []):
    """Makes <name>_<backend> for each backend.

    The CUDA targets need a GPU: they are built everywhere and run under --config=cuda, where a missing GPU is a failure.

    Args:
      name: what the targets' names start with.
      srcs: pytest files whose tests take the fixture `backend`.
      data: files for run time.
      backends: on which to run.
      sizes: Bazel's test size of a backend, where it is not "medium".
      tags: Bazel's tags.
    """
    for backend in backends:
        pytest_test(
            name = "%s_%s" % (name, backend),
            srcs = srcs,
            args = ["--backends=" + backend],
            size = sizes.get(backend, "medium"),
            data = data + (["//jax_ops:emulated_library"] if backend == "emulated" else []),
            tags = tags + (["gpu", "requires-gpu-nvidia"] if backend == "cuda" else []),
            deps = [
                "//jax_ops",
                "//tests:cases",
            ],
        )
