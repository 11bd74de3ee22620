# SPDX-License-Identifier: Apache-2.0
"""The Python versions and sites that have lock files."""

# In the order in which they are tried when HERMETIC_PYTHON_VERSION is not set.
PYTHON_VERSIONS = ["3.11", "3.12", "3.13"]

# One repository of installed wheels each, named @pip_<site>; what each is for is told in requirements/<site>.in.
SITES = ["runtime", "floor", "test", "peers", "cuda", "lint"]

def lock_file(site, version):
    """Returns the label of a lock file."""
    return "@//bazel/python/locks:%s-%s.txt" % (site, version)
