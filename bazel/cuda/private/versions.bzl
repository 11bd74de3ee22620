# SPDX-License-Identifier: Apache-2.0
"""The CUDA toolkits that have a lock file."""

DEFAULT_CUDA_VERSION = "13.0.2"

# Release to the folder that its wheels unpack to.
CUDA_VERSIONS = {
    "13.0.2": "nvidia/cu13",
}

def cuda_version_problem(version):
    """Checks a value of HERMETIC_CUDA_VERSION.

    Args:
      version: the value.

    Returns:
      What is wrong with it, in words, or None.
    """
    allowed = ", ".join(CUDA_VERSIONS.keys())
    parts = version.split(".")
    if len(parts) != 3 or not all([part.isdigit() for part in parts]):
        return "HERMETIC_CUDA_VERSION is '%s'; it must be written x.y.z, one of: %s" % (version, allowed)
    if version not in CUDA_VERSIONS:
        return "HERMETIC_CUDA_VERSION is '%s'; versions with a lock file: %s" % (version, allowed)
    return None
