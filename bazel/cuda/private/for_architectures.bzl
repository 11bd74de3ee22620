# SPDX-License-Identifier: Apache-2.0
"""Builds a target for given GPU architectures, whatever the rest of the command is built for."""

def _transition_impl(settings, attr):
    _ignore = [settings]  # @unused
    return {"//bazel/cuda:architectures": attr.architectures}

_architectures = transition(
    implementation = _transition_impl,
    inputs = [],
    outputs = ["//bazel/cuda:architectures"],
)

def _for_architectures_impl(ctx):
    target = ctx.attr.target[0]
    return [DefaultInfo(
        files = target[DefaultInfo].files,
        runfiles = ctx.runfiles(transitive_files = target[DefaultInfo].files),
    )]

for_architectures = rule(
    implementation = _for_architectures_impl,
    attrs = {
        "architectures": attr.string(mandatory = True, doc = "A list such as sm_80,compute_90."),
        "target": attr.label(mandatory = True, cfg = _architectures, doc = "What is built."),
        "_allowlist_function_transition": attr.label(
            default = "@bazel_tools//tools/allowlists/function_transition_allowlist",
        ),
    },
    doc = "The files of `target`, compiled for `architectures`; see bazel/cuda/defs.bzl.",
)
