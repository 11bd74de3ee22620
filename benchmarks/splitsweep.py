# SPDX-License-Identifier: Apache-2.0
"""Decode over split counts: how far the automatic one is from the best."""

from benchmarks.harness import runner

if __name__ == "__main__":
    runner.main("splitsweep")
