# SPDX-License-Identifier: Apache-2.0
"""Makes @cuda_toolkit: NVIDIA's compiler from locked wheels, merged into one folder as an installed toolkit would be.

Nothing of a CUDA installation on the machine is looked at.
"""

load("//bazel/python:pip.bzl", "PIP_ENVIRON", "pip_install", "read_interpreter")
load(":architectures.bzl", "DEFAULT_ARCHITECTURES", "parse_architectures")
load(":versions.bzl", "CUDA_VERSIONS", "DEFAULT_CUDA_VERSION", "cuda_version_problem")

def _known_architectures(rctx, nvcc):
    """Asks nvcc for the architectures that it compiles for."""

    # Without the user's environment: nvcc also takes options from there.
    result = rctx.execute(["env", "-i", "PATH=/usr/bin:/bin", nvcc, "--list-gpu-code"])
    if result.return_code != 0:
        fail("the nvcc of the locked wheels does not run on this machine:\n" + result.stderr)
    return [line.strip()[len("sm_"):] for line in result.stdout.splitlines() if line.startswith("sm_")]

def _cuda_toolkit_impl(rctx):
    version = rctx.os.environ.get("HERMETIC_CUDA_VERSION", "") or DEFAULT_CUDA_VERSION
    problem = cuda_version_problem(version)
    if problem:
        fail(problem)
    machine = rctx.execute(["uname", "-sm"]).stdout.strip()
    if machine != "Linux x86_64":
        fail("CUDA targets are locked for Linux x86_64 only; this is %s" % machine)

    if hasattr(rctx, "report_progress"):
        rctx.report_progress("installing the CUDA %s compiler" % version)
    pip_install(
        rctx,
        read_interpreter(rctx)["path"],
        Label("@//bazel/cuda/locks:%s.txt" % version),
        "packages",
        "the CUDA %s compiler" % version,
    )
    root = "packages/" + CUDA_VERSIONS[version]
    rctx.symlink(root, "toolkit")
    rctx.symlink(root + "/lib/libcudart_static.a", "lib/libcudart_static.a")

    # Host code sees the run-time API's headers, not the 3,000 files of the device libraries.
    include = rctx.path(root + "/include")
    for entry in include.readdir():
        if entry.basename not in ["cccl", "cub", "cuda", "thrust", "libcudacxx", "nv"]:
            rctx.symlink(entry, "include/" + entry.basename)

    known = _known_architectures(rctx, rctx.path(root + "/bin/nvcc"))
    wanted = rctx.os.environ.get("HERMETIC_CUDA_COMPUTE_CAPABILITIES", "") or DEFAULT_ARCHITECTURES
    parsed = parse_architectures(wanted, known, "HERMETIC_CUDA_COMPUTE_CAPABILITIES")
    if type(parsed) == type(""):
        fail(parsed)

    rctx.file("config.bzl", """\
# Made by bazel/cuda/private/toolkit.bzl.
CUDA_VERSION = {version}
KNOWN_ARCHITECTURES = {known}
ARCHITECTURES = {wanted}
""".format(version = repr(version), known = repr(known), wanted = repr(wanted)), executable = False)
    rctx.file("WORKSPACE", "workspace(name = \"%s\")\n" % rctx.name, executable = False)
    rctx.file("BUILD.bazel", """\
# Made by bazel/cuda/private/toolkit.bzl.
load("@rules_cc//cc:defs.bzl", "cc_import", "cc_library")

package(default_visibility = ["//visibility:public"])

# One directory, not its files: nvcc finds its parts by their places in it.
filegroup(
    name = "toolkit_folder",
    srcs = ["toolkit"],
)

cc_library(
    name = "headers",
    hdrs = glob(["include/**"]),
    includes = ["include"],
)

cc_import(
    name = "cudart_archive",
    static_library = "lib/libcudart_static.a",
)

cc_library(
    name = "cudart",
    linkopts = ["-ldl", "-lrt", "-lpthread"],
    deps = [
        ":cudart_archive",
        ":headers",
    ],
)
""", executable = False)

cuda_toolkit = repository_rule(
    implementation = _cuda_toolkit_impl,
    environ = PIP_ENVIRON + ["HERMETIC_CUDA_VERSION", "HERMETIC_CUDA_COMPUTE_CAPABILITIES"],
    doc = "Makes @cuda_toolkit; fetched when a cuda_library is first analysed.",
)
