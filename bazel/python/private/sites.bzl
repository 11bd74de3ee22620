# SPDX-License-Identifier: Apache-2.0
"""Installs one locked set of wheels into a repository.

A whole set is one repository with one folder, `packages`, because packages of one set find each other by their place in it:
JAX's plugins are namespace packages and entry points, and the CUDA wheels' libraries have relative search paths. The folder is
handed to Bazel as one directory: listing its ten thousand files would cost more than every test.
"""

load("//bazel/python:pip.bzl", "PIP_ENVIRON", "pip", "pip_install", "read_interpreter", "try_pip_install")
load(":versions.bzl", "SITES", "lock_file")

_FOLDER = "packages"

def _install_torch(rctx, interpreter):
    """Installs torch, of which two builds are locked: one for CPUs, and one with CUDA that is gigabytes larger.

    The CPU build is taken where its lock exists and pip finds it, unless HERMETIC_TORCH_BUILD says otherwise. One that is found and
    is another file than the locked one is an error, not a reason to take the CUDA build.
    """
    build = rctx.os.environ.get("HERMETIC_TORCH_BUILD", "")
    if build not in ["", "cpu", "cuda"]:
        fail("HERMETIC_TORCH_BUILD is '%s'; allowed: cpu, cuda" % build)
    python = interpreter["path"]
    version = interpreter["version"]
    folder = rctx.path(Label(lock_file("peers", version))).dirname
    if build != "cuda":
        name = "peers_torch_cpu-%s.txt" % version
        if folder.get_child(name).exists:
            what = "the CPU build of torch in %s" % name
            lock = Label(lock_file("peers_torch_cpu", version))
            problem = try_pip_install(rctx, python, lock, _FOLDER, what)
            if not problem:
                return
            if "DO NOT MATCH THE HASHES" in problem:
                fail(problem)
        else:
            problem = "Python %s has no lock for the CPU build of torch" % version
        if build == "cpu":
            fail("HERMETIC_TORCH_BUILD is 'cpu': " + problem)
    lock = Label(lock_file("peers_torch_cuda", version))
    pip_install(rctx, python, lock, _FOLDER, "the CUDA build of torch in %s" % lock.name)

def _pip_site_impl(rctx):
    interpreter = read_interpreter(rctx)
    python = interpreter["path"]
    lock = Label(lock_file(rctx.attr.site, interpreter["version"]))
    what = "the Python packages of %s" % lock.name
    if hasattr(rctx, "report_progress"):
        rctx.report_progress("installing " + what)
    pip_install(rctx, python, lock, _FOLDER, what)
    if rctx.attr.site == "peers":
        _install_torch(rctx, interpreter)

    # Compiled once here instead of at every start of every test. Hash-based, so that the bytes do not depend on the time.
    rctx.execute([
        python,
        "-I",
        "-m",
        "compileall",
        "-q",
        "-j0",
        "--invalidation-mode=unchecked-hash",
        "-s",
        str(rctx.path(".")),
        _FOLDER,
    ], timeout = 1800)

    rctx.file("WORKSPACE", "workspace(name = \"%s\")\n" % rctx.name, executable = False)
    rctx.file("BUILD.bazel", """\
# Made by bazel/python/private/sites.bzl.
load("@rules_python//python:defs.bzl", "py_library")

package(default_visibility = ["//visibility:public"])

filegroup(
    name = "files",
    srcs = ["{folder}"],
)

py_library(
    name = "site",
    data = [":files"],
    imports = ["{folder}"],
)
""".format(folder = _FOLDER), executable = False)

_SITE_ATTRS = {"site": attr.string(mandatory = True, values = SITES)}

pip_site = repository_rule(
    implementation = _pip_site_impl,
    attrs = _SITE_ATTRS,
    environ = PIP_ENVIRON,
    doc = "Makes @pip_<site>//:site, a py_library of every package of one lock file.",
)

pip_site_with_torch = repository_rule(
    implementation = _pip_site_impl,
    attrs = _SITE_ATTRS,
    environ = PIP_ENVIRON + ["HERMETIC_TORCH_BUILD"],
    doc = "As pip_site, for the site that holds torch; apart, because its variable would have every site fetched again.",
)

def _ffi_headers_impl(rctx):
    interpreter = read_interpreter(rctx)
    lock = Label(lock_file("floor", interpreter["version"]))
    lines = rctx.read(rctx.path(lock)).replace("\\\n", " ").splitlines()
    requirement = [line for line in lines if line.startswith("jaxlib==")]
    if len(requirement) != 1:
        fail("%s must list jaxlib once" % lock)
    rctx.file("jaxlib.txt", requirement[0] + "\n", executable = False)
    pip(rctx, interpreter["path"], [
        "download",
        "--require-hashes",
        "--no-deps",
        "--only-binary=:all:",
        "--dest=wheel",
        "--requirement=jaxlib.txt",
    ], "the XLA FFI headers in jaxlib")
    wheels = rctx.path("wheel").readdir()
    rctx.symlink(wheels[0], "wheel.zip")  # Bazel knows a zip file only by its ending.
    rctx.extract("wheel.zip", output = "unpacked")
    include = rctx.path("unpacked/jaxlib/include/xla/ffi/api")
    if not include.exists:
        fail("%s holds no jaxlib/include/xla/ffi/api" % wheels[0].basename)
    for header in include.readdir():
        rctx.file("include/xla/ffi/api/" + header.basename, rctx.read(header), executable = False)
    rctx.delete("unpacked")
    rctx.delete("wheel.zip")
    rctx.delete("wheel")
    rctx.file("WORKSPACE", "workspace(name = \"%s\")\n" % rctx.name, executable = False)
    rctx.file("BUILD.bazel", """\
# Made by bazel/python/private/sites.bzl from {source}.
load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

cc_library(
    name = "headers",
    hdrs = glob(["include/**/*.h"]),
    includes = ["include"],
)
""".format(source = wheels[0].basename), executable = False)

ffi_headers = repository_rule(
    implementation = _ffi_headers_impl,
    environ = PIP_ENVIRON,
    doc = "Makes @xla_ffi//:headers from the oldest supported jaxlib, the one of the `floor` lock.",
)
