# SPDX-License-Identifier: Apache-2.0
"""Peak memory of one call, each in a process of its own."""

from benchmarks.harness import runner

if __name__ == "__main__":
    runner.main("peak")
