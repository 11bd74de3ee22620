# SPDX-License-Identifier: Apache-2.0
"""Declares every repository that has to do with Python; WORKSPACE calls this once."""

load("//bazel/python/private:sites.bzl", "ffi_headers", "pip_site", "pip_site_with_torch")
load("//bazel/python/private:toolchain.bzl", "python_toolchain")
load("//bazel/python/private:versions.bzl", "SITES")

def python_repositories():
    """Declares @python, @pip_<site> for each lock, and @xla_ffi. Each is fetched when a target first needs it."""
    python_toolchain(name = "python")
    for site in SITES:
        rule = pip_site_with_torch if site == "peers" else pip_site
        rule(name = "pip_" + site, site = site)
    ffi_headers(name = "xla_ffi")
    native.register_toolchains("@python//:toolchain")
