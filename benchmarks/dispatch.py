# SPDX-License-Identifier: Apache-2.0
"""Small to medium self-attention: the default choice against each alternative."""

from benchmarks.harness import runner

if __name__ == "__main__":
    runner.main("dispatch")
