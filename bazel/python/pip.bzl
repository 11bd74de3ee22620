# SPDX-License-Identifier: Apache-2.0
"""pip as the one client that fetches: always from a lock, always with hashes, from the user's indexes or a wheelhouse."""

# Environment variables that a repository rule which calls pip depends on.
PIP_ENVIRON = ["HERMETIC_WHEELHOUSE"]

def read_interpreter(rctx):
    """Reads what is known of the interpreter.

    Args:
      rctx: the repository context.

    Returns:
      The dict in @python//:interpreter.json: `path`, `version` ("3.11"), `full_version`.
    """
    return json.decode(rctx.read(rctx.path(Label("@python//:interpreter.json"))))

def _try_pip(rctx, python, arguments, what):
    """Runs pip, with the wheelhouse in place of every index if there is one; returns what went wrong, or None."""
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
        return "pip could not fetch %s%s:\n%s" % (
            what,
            " from the wheelhouse " + wheelhouse if wheelhouse else "",
            "\n".join(lines),
        )
    return None

def pip(rctx, python, arguments, what):
    """Runs pip and fails with its words.

    Args:
      rctx: the repository context.
      python: path of the interpreter whose pip is used.
      arguments: the arguments after `pip`.
      what: what is being fetched, for the error.
    """
    problem = _try_pip(rctx, python, arguments, what)
    if problem:
        fail(problem)

def try_pip_install(rctx, python, lock, target, what):
    """Installs exactly what a lock file lists, hashes checked, into a folder.

    Args:
      rctx: the repository context.
      python: path of the interpreter whose pip is used.
      lock: label of the lock file.
      target: the folder, relative to the repository.
      what: what is being fetched, for the error.

    Returns:
      What went wrong, in words, or None.
    """
    return _try_pip(rctx, python, [
        "install",
        "--require-hashes",
        "--no-deps",
        "--only-binary=:all:",
        "--no-compile",
        "--no-warn-script-location",
        "--target=" + target,
        "--requirement=" + str(rctx.path(lock)),
    ], what)

def pip_install(rctx, python, lock, target, what):
    """As try_pip_install, but fails with pip's words.

    Args:
      rctx: the repository context.
      python: path of the interpreter whose pip is used.
      lock: label of the lock file.
      target: the folder, relative to the repository.
      what: what is being fetched, for the error.
    """
    problem = try_pip_install(rctx, python, lock, target, what)
    if problem:
        fail(problem)
