# SPDX-License-Identifier: Apache-2.0
"""Decode over key tile sizes."""

from benchmarks.harness import runner

if __name__ == "__main__":
    runner.main("blockk")
