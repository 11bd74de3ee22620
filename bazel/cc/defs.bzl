# SPDX-License-Identifier: Apache-2.0
"""C++ rules of this workspace.

    load("//bazel/cc:defs.bzl", "cc_library", "cc_shared_library_so", "cc_test")

Everything is compiled as C++17, optimised (-c opt is the only mode in use), as position-independent code, with warnings as
errors; includes are workspace paths (`#include "kernels/common/problem.h"`). The XLA FFI headers are the dependency
"@xla_ffi//:headers" (`#include "xla/ffi/api/ffi.h"`). libstdc++ is linked statically everywhere;
libgcc_s, the unwinder that every Linux has, is not: its static form would ask for a newer glibc.

cc_library(name, srcs, hdrs, deps, copts, defines, textual_hdrs, alwayslink, ...)
    The usual rule. `copts` come last, so they win. Code that only dlopen reaches (FFI handlers) needs alwayslink = True.

cc_test(name, srcs, deps, copts, args, data, size = "small", ...)
    The usual rule.

cc_binary(name, srcs, deps, ...)
    The usual rule.

cc_shared_library_so(name, deps, exports, linkopts)
    A library for ctypes or dlopen. `name` is the file's name, "libattention_cpu.so". `exports` lists the symbols that can be seen
    from outside, as linker globs (["attention_cpu_*"]); all others are hidden, so two of these libraries, or another copy of
    libstdc++ in the process, never mix. An unresolved symbol is an error at link time.

packaged_file(name, src, out)
    The file `src` again at the path `out` of this package: how a library that is built elsewhere gets to its place beside Python
    modules, in runfiles and in the wheel.
"""

load(
    "@rules_cc//cc:defs.bzl",
    _cc_binary = "cc_binary",
    _cc_library = "cc_library",
    _cc_test = "cc_test",
)
load("//bazel/cc/private:version_script.bzl", "version_script")

_COPTS = [
    "-std=c++17",
    "-O3",
    "-Wall",
    "-Wextra",
    "-Werror",
    # Results must not depend on which multiply and add the compiler fuses; kernels ask for FMA by its intrinsic.
    "-ffp-contract=off",
] + select({
    # With checks in every load, -O3 takes the compiler many minutes on fully inlined kernels. With less inlining, GCC 12 takes the
    # undefined vectors of its own AVX-512 headers for uninitialised variables.
    "//bazel/cc:sanitizers": ["-O1", "-Wno-uninitialized"],
    "//conditions:default": [],
})

def cc_library(name, copts = [], **kwargs):
    """See the head of this file.

    Args:
      name: the target's name.
      copts: compiler options, after the common ones.
      **kwargs: what the usual rule takes.
    """
    _cc_library(name = name, copts = _COPTS + copts, **kwargs)

def cc_binary(name, copts = [], linkopts = [], **kwargs):
    """See the head of this file.

    Args:
      name: the target's name.
      copts: compiler options, after the common ones.
      linkopts: linker options.
      **kwargs: what the usual rule takes.
    """
    _cc_binary(name = name, copts = _COPTS + copts, linkopts = linkopts, **kwargs)

def cc_test(name, copts = [], linkopts = [], size = "small", **kwargs):
    """See the head of this file.

    Args:
      name: the target's name.
      copts: compiler options, after the common ones.
      linkopts: linker options.
      size: Bazel's test size, which sets the time limit.
      **kwargs: what the usual rule takes.
    """
    _cc_test(name = name, copts = _COPTS + copts, linkopts = linkopts, size = size, **kwargs)

def cc_shared_library_so(name, deps, exports, linkopts = [], **kwargs):
    """See the head of this file.

    Args:
      name: the file's name, lib*.so.
      deps: cc_library and cuda_library targets.
      exports: symbols that can be seen from outside.
      linkopts: linker options.
      **kwargs: visibility and the like.
    """
    if not (name.startswith("lib") and name.endswith(".so")):
        fail("cc_shared_library_so: name: got '%s'; allowed: lib*.so" % name)
    script = name + ".lds"
    version_script(
        name = script,
        exports = exports,
    )
    _cc_binary(
        name = name,
        deps = deps,
        additional_linker_inputs = [script],
        linkopts = [
            "-Wl,--version-script,$(location %s)" % script,
            "-Wl,-z,defs",
            "-Wl,-z,relro,-z,now",
            "-Wl,--gc-sections",
        ] + linkopts,
        linkshared = True,
        linkstatic = True,
        **kwargs
    )

def packaged_file(name, src, out, **kwargs):
    """See the head of this file.

    Args:
      name: the target's name.
      src: the file's label.
      out: its path in this package.
      **kwargs: visibility and the like.
    """
    native.genrule(
        name = name,
        srcs = [src],
        outs = [out],
        cmd = "cp $< $@",
        **kwargs
    )
