# SPDX-License-Identifier: Apache-2.0
"""The measuring code that every suite shares; see docs/benchmarks.md for what it promises."""
