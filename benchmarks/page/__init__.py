# SPDX-License-Identifier: Apache-2.0
"""One self-contained HTML page over any set of result files."""
