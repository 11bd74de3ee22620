# SPDX-License-Identifier: Apache-2.0
"""Makes @buildifier from the npm package that carries its binaries, hash checked."""

_VERSION = "8.2.1"
_INTEGRITY = "sha512-eZ/Aq+2r4PcJa6LbPCT6ffgIJfTU/gYilqIzoX2OLM4nNkbQC6tTMPZNn7aHHjhGPxbNLv41zm4Xqt1olCLgXw=="
_ARCHIVE = "bazel-buildifier-%s.tgz" % _VERSION

def _buildifier_impl(rctx):
    wheelhouse = rctx.os.environ.get("HERMETIC_WHEELHOUSE", "")
    if wheelhouse:
        workspace = rctx.path(Label("@//:WORKSPACE")).dirname
        folder = wheelhouse if wheelhouse.startswith("/") else "%s/%s" % (workspace, wheelhouse)
        archive = rctx.path("%s/%s" % (folder, _ARCHIVE))
        if not archive.exists:
            fail("HERMETIC_WHEELHOUSE has no %s; fill it with `bazel run //tools:wheelhouse`" % _ARCHIVE)
    else:
        npm = rctx.which("npm")
        if not npm:
            fail("buildifier, which the lints use, comes with npm; install it (Debian and Ubuntu: apt-get install npm)")
        result = rctx.execute([npm, "pack", "--silent", "@bazel/buildifier@" + _VERSION], timeout = 600)
        if result.return_code != 0:
            fail("npm could not fetch @bazel/buildifier %s:\n%s" % (_VERSION, result.stderr))
        archive = rctx.path(_ARCHIVE)
    rctx.download_and_extract(
        url = "file://%s" % archive,
        integrity = _INTEGRITY,
        type = "tgz",
        stripPrefix = "package",
        output = "package",
    )
    rctx.symlink("package/buildifier-linux_amd64", "buildifier")
    rctx.file("WORKSPACE", "workspace(name = \"%s\")\n" % rctx.name, executable = False)
    rctx.file("BUILD.bazel", "exports_files([\"buildifier\"])\n", executable = False)

buildifier = repository_rule(
    implementation = _buildifier_impl,
    environ = ["HERMETIC_WHEELHOUSE"],
    doc = "Makes @buildifier//:buildifier, for Linux on x86-64.",
)

def lint_repositories():
    """Declares @buildifier. It is fetched when //tools:lint is first run."""
    buildifier(name = "buildifier")
