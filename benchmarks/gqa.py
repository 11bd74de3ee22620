# SPDX-License-Identifier: Apache-2.0
"""Grouped-query self-attention: native GQA against repeated K and V, and against peers."""

from benchmarks.harness import runner

if __name__ == "__main__":
    runner.main("gqa")
