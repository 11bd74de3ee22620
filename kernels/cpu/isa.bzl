# SPDX-License-Identifier: Apache-2.0
"""One library for each instruction set: the same headers, compiled once more."""

load("//bazel/cc:defs.bzl", "cc_library")

# What each set of instructions needs from the compiler.
_OPTIONS = {
    "portable": [
        # Compilers fuse a * b + c where the architecture has it (arm64); x86-64's baseline has not.
        "-ffp-contract=fast",
    ],
    # GCC would keep loop counters in vector registers, of which the products need all (forward 2 % slower).
    "avx2": ["-mavx2", "-mfma", "-mf16c", "-mno-stv"],
    "avx512": ["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
}
_OPTIONS["avx512_bf16"] = _OPTIONS["avx512"] + ["-mavx512bf16"]
_OPTIONS["amx"] = _OPTIONS["avx512_bf16"] + ["-mamx-tile", "-mamx-bf16"]

def isa_library(name, hdrs, deps):
    """Compiles isa_<name>.cc for the instruction set `name`.

    Args:
      name: the target's name, one of portable, avx2, avx512, avx512_bf16, amx.
      hdrs: the kernel headers.
      deps: libraries whose headers the kernels include.
    """
    cc_library(
        name = name,
        srcs = ["isa_%s.cc" % name] + hdrs,
        copts = _OPTIONS[name] + [
            # Lets comparisons and selections become vector instructions; no result depends on traps or errno.
            "-fno-math-errno",
            "-fno-trapping-math",
            # GCC 12 takes the undefined vectors of its own AVX-512 headers for uninitialised variables.
            "-Wno-maybe-uninitialized",
            "-Wno-uninitialized",
            # Vector types are passed between inlined functions only.
            "-Wno-psabi",
        ],
        deps = deps,
    )
