# SPDX-License-Identifier: Apache-2.0
"""A few queries against a long cache: split-KV against none, and against peers."""

from benchmarks.harness import runner

if __name__ == "__main__":
    runner.main("decode")
