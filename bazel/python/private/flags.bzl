# SPDX-License-Identifier: Apache-2.0
"""A build setting whose value is one of a few words."""

def _choice_flag_impl(ctx):
    value = ctx.build_setting_value
    if value not in ctx.attr.choices:
        fail("--%s is '%s'; allowed: %s" % (str(ctx.label).lstrip("@"), value, ", ".join(ctx.attr.choices)))
    return []

choice_flag = rule(
    implementation = _choice_flag_impl,
    build_setting = config.string(flag = True),
    attrs = {"choices": attr.string_list(mandatory = True, doc = "The words that are allowed.")},
)
