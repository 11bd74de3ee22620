# SPDX-License-Identifier: Apache-2.0
"""Picks a few files of a target by name."""

def _pick_impl(ctx):
    found = {file.basename: file for file in ctx.files.srcs}
    missing = [name for name in ctx.attr.names if name not in found]
    if missing:
        fail("names: got %s; allowed: %s" % (", ".join(missing), ", ".join(sorted(found))))
    return [DefaultInfo(files = depset([found[name] for name in ctx.attr.names]))]

pick = rule(
    implementation = _pick_impl,
    attrs = {
        "names": attr.string_list(mandatory = True, doc = "Base names."),
        "srcs": attr.label_list(mandatory = True, allow_files = True),
    },
)
