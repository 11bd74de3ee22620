# SPDX-License-Identifier: Apache-2.0
"""Installs one locked set of wheels into a repository.

A whole set is one repository with one folder, `packages`, because packages of one set find each other by their place in it:
JAX's plugins are namespace packages and entry points, and the CUDA wheels' libraries have relative search paths. The folder is
handed to Bazel as one directory: listing its ten thousand files would cost more than every test.
"""

load(":versions.bzl", "SITES", "lock_file")

PIP_ENVIRON = ["HERMETIC_WHEELHOUSE"]

_FOLDER = "packages"

def read_interpreter(rctx):
    """Returns what @python//:interpreter.json says about the interpreter."""
    return json.decode(rctx.read(rctx.path(Label("@python//:interpreter.json"))))

def pip(rctx, python, arguments, what):
    """Runs pip, with the wheelhouse in place of every index if there is one, and fails with its words.

    Args:
      rctx: the repository context.
      python: path of the interpreter whose pip is used.
      arguments: the arguments after `pip`.
      what: what is being fetched, for the error.
    """
    if rctx.execute([python, "-m", "pip", "--version"]).return_code != 0:
        fail("%s has no pip, which fetches %s; install it (Debian and Ubuntu: apt-get install python3-pip)" % (python, what))
    wheelhouse = rctx.os.environ.get("HERMETIC_WHEELHOUSE", "")
    source = []
    if wheelhouse:
        workspace = rctx.path(Label("@//:WORKSPACE")).dirname
        folder = rctx.path(wheelhouse if wheelhouse.startswith("/") else "%s/%s" % (workspace, wheelhouse))
        if not folder.exists:
            fail("HERMETIC_WHEELHOUSE is '%s', which is no folder; fill it with `bazel run //tools:wheelhouse`" % wheelhouse)
        source = ["--no-index", "--find-links=%s" % folder]
    result = rctx.execute(
        [python, "-m", "pip"] + arguments + source + ["--quiet", "--disable-pip-version-check"],
        timeout = 3600,
        # Settings of a user's own virtual environments would only get in the way of --target.
        environment = {"PIP_REQUIRE_VIRTUALENV": "0", "PIP_USER": "0", "PYTHONPATH": "", "PYTHONHOME": ""},
    )
    if result.return_code != 0:
        lines = [line for line in result.stderr.splitlines() if not line.startswith("WARNING: Location")]
        fail("pip could not fetch %s%s:\n%s" %
             (what, " from the wheelhouse " + wheelhouse if wheelhouse else "", "\n".join(lines)))

def pip_install(rctx, python, lock, target, what):
    """Installs exactly what a lock file lists, hashes checked, into a folder."""
    pip(rctx, python, [
        "install",
        "--require-hashes",
        "--no-deps",
        "--only-binary=:all:",
        "--no-compile",
        "--no-warn-script-location",
        "--target=" + target,
        "--requirement=" + str(rctx.path(lock)),
    ], what)

def _needs_torch_cuda(rctx):
    """Tells whether the torch that pip chose is the CUDA build, whose libraries are locked apart."""
    for entry in rctx.path(_FOLDER).readdir():
        if entry.basename.startswith("torch-") and entry.basename.endswith(".dist-info"):
            return "+cpu" not in entry.basename
    return False

def _pip_site_impl(rctx):
    interpreter = read_interpreter(rctx)
    python = interpreter["path"]
    lock = Label(lock_file(rctx.attr.site, interpreter["version"]))
    what = "the Python packages of %s" % lock.name
    if hasattr(rctx, "report_progress"):
        rctx.report_progress("installing " + what)
    pip_install(rctx, python, lock, _FOLDER, what)
    if rctx.attr.site == "peers" and _needs_torch_cuda(rctx):
        extra = Label(lock_file("peers_torch_cuda", interpreter["version"]))
        pip_install(rctx, python, extra, _FOLDER, "the CUDA libraries of torch in %s" % extra.name)

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

pip_site = repository_rule(
    implementation = _pip_site_impl,
    attrs = {"site": attr.string(mandatory = True, values = SITES)},
    environ = PIP_ENVIRON,
    doc = "Makes @pip_<site>//:site, a py_library of every package of one lock file.",
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
