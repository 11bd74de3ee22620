# SPDX-License-Identifier: Apache-2.0
"""The rule that packs the wheel; see ../defs.bzl."""

def _wheel_impl(ctx):
    output = ctx.actions.declare_directory(ctx.label.name)
    prefix = ctx.attr.top_level + "/"
    files = {}
    runfiles = ctx.attr.package[DefaultInfo].default_runfiles.files.to_list()
    for file in runfiles + ctx.files.libraries:
        if file.short_path.startswith(prefix):
            files[file.short_path] = file
    inputs = [files[name] for name in sorted(files)]

    arguments = ctx.actions.args()
    arguments.use_param_file("@%s", use_always = True)
    arguments.set_param_file_format("multiline")
    arguments.add("--output=" + output.path)
    arguments.add("--version_file=" + ctx.file.version_file.path)
    arguments.add("--floor=" + ctx.file.floor.path)
    arguments.add("--readme=" + ctx.file.readme.path)
    arguments.add("--license=" + ctx.file.license.path)
    for file in inputs:
        arguments.add("--file=%s=%s" % (file.short_path, file.path))
    ctx.actions.run(
        executable = ctx.executable._builder,
        arguments = [arguments],
        inputs = inputs + [ctx.file.version_file, ctx.file.floor, ctx.file.readme, ctx.file.license],
        outputs = [output],
        mnemonic = "PackWheel",
        progress_message = "Packing the wheel of %s" % ctx.attr.top_level,
    )
    return [DefaultInfo(files = depset([output]), runfiles = ctx.runfiles([output]))]

wheel = rule(
    implementation = _wheel_impl,
    attrs = {
        "floor": attr.label(mandatory = True, allow_single_file = True, doc = "Requirements that pin the oldest jax and jaxlib."),
        "libraries": attr.label_list(allow_files = True, doc = "Files to add to those that the package depends on."),
        "license": attr.label(mandatory = True, allow_single_file = True),
        "package": attr.label(mandatory = True, doc = "The py_library to pack."),
        "readme": attr.label(mandatory = True, allow_single_file = True),
        "top_level": attr.string(mandatory = True, doc = "The package's import name; only files below it are packed."),
        "version_file": attr.label(mandatory = True, allow_single_file = True, doc = "The module that holds __version__."),
        "_builder": attr.label(
            default = "//bazel/python/private:wheel_builder",
            executable = True,
            cfg = "exec",
        ),
    },
    doc = "A folder with one wheel in it, whose name tells version and platform.",
)
