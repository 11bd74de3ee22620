# SPDX-License-Identifier: Apache-2.0
"""Reading, matching and comparing result files: what compare and report share."""
