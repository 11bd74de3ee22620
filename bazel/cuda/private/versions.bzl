# SPDX-License-Identifier: Apache-2.0
"""The CUDA toolkits that have a lock file: name of the release to the folder that its wheels unpack to."""

DEFAULT_CUDA_VERSION = "13.0.2"

CUDA_VERSIONS = {
    "13.0.2": "nvidia/cu13",
}
