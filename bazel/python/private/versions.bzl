# SPDX-License-Identifier: Apache-2.0
"""The Python versions and sites that have lock files."""

# In the order in which they are tried when HERMETIC_PYTHON_VERSION is not set.
PYTHON_VERSIONS = ["3.11", "3.12", "3.13"]

# One repository of installed wheels each, named @pip_<site>; what each is for is told in requirements/<site>.in.
SITES = ["runtime", "floor", "test", "peers", "cuda", "lint"]

def lock_file(site, version):
    """Names a lock file.

    Args:
      site: one of SITES, or a build of torch, "peers_torch_cpu" or "peers_torch_cuda".
      version: one of PYTHON_VERSIONS.

    Returns:
      The file's label.
    """
    return "@//bazel/python/locks:%s-%s.txt" % (site, version)

def python_version_problem(version):
    """Checks a value of HERMETIC_PYTHON_VERSION.

    Args:
      version: the value; empty if it is not set.

    Returns:
      What is wrong with it, in words, or None.
    """
    if version and version not in PYTHON_VERSIONS:
        return "HERMETIC_PYTHON_VERSION is '%s'; versions with a lock file: %s" % (
            version,
            ", ".join(PYTHON_VERSIONS),
        )
    return None
