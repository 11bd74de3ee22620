# SPDX-License-Identifier: Apache-2.0
"""Writes the linker script that says which symbols a shared library shows."""

def _version_script_impl(ctx):
    script = ctx.actions.declare_file(ctx.label.name)
    shown = "".join(["    %s;\n" % symbol for symbol in ctx.attr.exports])
    ctx.actions.write(script, "{\n  global:\n%s  local:\n    *;\n};\n" % shown)
    return [DefaultInfo(files = depset([script]))]

version_script = rule(
    implementation = _version_script_impl,
    attrs = {"exports": attr.string_list(
        allow_empty = False,
        mandatory = True,
        doc = "Symbol names or globs, as the linker reads them.",
    )},
)
