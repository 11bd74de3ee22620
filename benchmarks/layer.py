# SPDX-License-Identifier: Apache-2.0
"""A multi-head attention layer with projections, forward and training step."""

from benchmarks.harness import runner

if __name__ == "__main__":
    runner.main("layer")
