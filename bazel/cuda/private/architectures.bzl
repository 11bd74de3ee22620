# SPDX-License-Identifier: Apache-2.0
"""Reads lists of GPU architectures as JAX users write them, and makes nvcc's options of them."""

DEFAULT_ARCHITECTURES = "sm_80,sm_90,compute_90"

def parse_architectures(text, known, source):
    """Reads a list such as sm_80,sm_90,compute_90.

    `sm_X` asks for machine code for X, `compute_X` for machine code and for PTX, from which later GPUs' drivers make their own.

    Args:
      text: the list, separated by commas.
      known: the suffixes that the compiler at hand knows, such as ["80", "90", "90a"].
      source: what the text came from, for the error.

    Returns:
      A struct: `machine_code` and `ptx`, sorted lists of suffixes; or the string that says what is wrong.
    """
    allowed = ", ".join(["sm_%s" % k for k in known] + ["compute_%s" % k for k in known])
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        return "%s is empty; allowed, separated by commas: %s" % (source, allowed)
    machine_code = {}
    ptx = {}
    for name in names:
        kind, _, suffix = name.partition("_")
        if kind not in ["sm", "compute"] or suffix not in known:
            return "%s has '%s'; this nvcc allows: %s" % (source, name, allowed)
        machine_code[suffix] = True
        if kind == "compute":
            ptx[suffix] = True
    return struct(machine_code = sorted(machine_code), ptx = sorted(ptx))

def gencode_options(architectures):
    """Makes nvcc's options of a list of architectures.

    Args:
      architectures: what parse_architectures returned.

    Returns:
      One -gencode option for each GPU architecture.
    """
    options = []
    for suffix in architectures.machine_code:
        code = "sm_" + suffix
        if suffix in architectures.ptx:
            code = "[compute_%s,%s]" % (suffix, code)
        options.append("-gencode=arch=compute_%s,code=%s" % (suffix, code))
    return options
