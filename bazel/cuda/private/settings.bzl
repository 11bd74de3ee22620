# SPDX-License-Identifier: Apache-2.0
"""A build setting that holds any text."""

StringSettingInfo = provider(
    doc = "The value of a string_setting.",
    fields = {"value": "the text"},
)

def _string_setting_impl(ctx):
    return [StringSettingInfo(value = ctx.build_setting_value)]

string_setting = rule(
    implementation = _string_setting_impl,
    build_setting = config.string(flag = True),
)
