# SPDX-License-Identifier: Apache-2.0
"""Finds the Python interpreter once, checks it and makes it the toolchain of every Python target.

The interpreter that installs the locked wheels and the one that runs the tests are the same by construction: both are read
from the file `interpreter.json` of this repository.
"""

load(":versions.bzl", "PYTHON_VERSIONS", "python_version_problem")

# Prints what has to be known of an interpreter. The real path leads out of virtual environments and past version managers'
# shims, so that nothing that is installed there is seen.
_PROBE = """
import json, os, platform, sys
print(json.dumps({
    "path": os.path.realpath(sys.executable),
    "version": "%d.%d" % sys.version_info[:2],
    "full_version": platform.python_version(),
    "implementation": platform.python_implementation(),
}))
"""

def _probe(rctx, candidate):
    result = rctx.execute([candidate, "-I", "-c", _PROBE])
    if result.return_code != 0:
        return None
    found = json.decode(result.stdout)
    return found if found["implementation"] == "CPython" else None

def _candidates(rctx, version):
    """Returns programs that may be a Python of one version, the likeliest first."""
    candidates = [rctx.which("python" + version), rctx.which("python3"), rctx.which("python")]

    # pyenv's shims refuse every version but the active one, so its folder is looked at too.
    home = rctx.os.environ.get("HOME", "")
    pyenv = rctx.os.environ.get("PYENV_ROOT", home + "/.pyenv")
    versions = rctx.path(pyenv + "/versions") if pyenv.startswith("/") else None
    if versions and versions.exists:
        for folder in versions.readdir():
            if folder.basename.startswith(version + "."):
                candidates.append(folder.get_child("bin").get_child("python3"))
    return [c for c in candidates if c and c.exists]

def _find(rctx, wanted):
    """Returns the first interpreter of one of the wanted versions, and what was seen instead."""
    seen = []
    for version in wanted:
        for candidate in _candidates(rctx, version):
            found = _probe(rctx, candidate)
            if found and found["version"] == version:
                return found, seen
            if found:
                line = "%s is %s" % (found["path"], found["full_version"])
                if line not in seen:
                    seen.append(line)
    return None, seen

def _python_toolchain_impl(rctx):
    version = rctx.os.environ.get("HERMETIC_PYTHON_VERSION", "")
    given = rctx.os.environ.get("PYTHON_BIN_PATH", "")
    allowed = ", ".join(PYTHON_VERSIONS)
    problem = python_version_problem(version)
    if problem:
        fail(problem)

    if given:
        found = _probe(rctx, given)
        if not found:
            fail("PYTHON_BIN_PATH is '%s', which does not run as CPython" % given)
        wanted = [version] if version else PYTHON_VERSIONS
        if found["version"] not in wanted:
            fail("PYTHON_BIN_PATH is '%s', Python %s; versions allowed here: %s" %
                 (given, found["full_version"], ", ".join(wanted)))
    else:
        found, seen = _find(rctx, [version] if version else PYTHON_VERSIONS)
        if not found:
            fail("no Python %s was found on PATH or in pyenv%s; install one (Debian and Ubuntu: apt-get install python3 " %
                 (version or allowed.replace(", ", " or "), " (" + "; ".join(seen) + ")" if seen else "") +
                 "python3-pip), or name one with PYTHON_BIN_PATH")

    rctx.file("interpreter.json", json.encode(found) + "\n", executable = False)

    # -S and -s: only the locked wheels can be imported, never what the machine has installed beside the interpreter.
    rctx.file(
        "python",
        "#!/bin/sh\nexec '%s' -s -S \"$@\"\n" % found["path"],
    )
    rctx.file("WORKSPACE", "workspace(name = \"%s\")\n" % rctx.name, executable = False)
    rctx.file("BUILD.bazel", """\
# Made by bazel/python/private/toolchain.bzl.
load("@rules_python//python:defs.bzl", "py_runtime", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

exports_files(["interpreter.json", "python"])

py_runtime(
    name = "runtime",
    interpreter = ":python",
    python_version = "PY3",
    # Python's own start-up script runs under this line; the user's PYTHONPATH must not reach the program.
    stub_shebang = "#!/usr/bin/env -S -u PYTHONPATH -u PYTHONHOME {path} -I",
)

py_runtime_pair(
    name = "runtime_pair",
    py3_runtime = ":runtime",
)

toolchain(
    name = "toolchain",
    toolchain = ":runtime_pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)
""".format(path = found["path"]), executable = False)

python_toolchain = repository_rule(
    implementation = _python_toolchain_impl,
    environ = ["HERMETIC_PYTHON_VERSION", "PYTHON_BIN_PATH", "PATH", "PYENV_ROOT"],
    local = True,
    doc = "Makes @python: the checked interpreter as a toolchain, and interpreter.json for other repository rules.",
)
