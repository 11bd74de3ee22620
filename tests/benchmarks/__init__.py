# SPDX-License-Identifier: Apache-2.0
"""Tests of the benchmark harness, comparison and report."""
