# SPDX-License-Identifier: Apache-2.0
"""The longest sequence before memory, time or --max_seq ends it."""

from benchmarks.harness import runner

if __name__ == "__main__":
    runner.main("max_seq")
