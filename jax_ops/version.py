# SPDX-License-Identifier: Apache-2.0
"""Version of the package; the wheel reads it from here."""

__version__ = "0.1.0"
