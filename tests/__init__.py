# SPDX-License-Identifier: Apache-2.0
"""Every test of the project. Python tests share the case base in tests/cases."""
