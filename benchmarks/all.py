# SPDX-License-Identifier: Apache-2.0
"""Every suite, one result file."""

from benchmarks.harness import runner

if __name__ == "__main__":
    runner.main("all")
