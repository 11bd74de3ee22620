# SPDX-License-Identifier: Apache-2.0
"""Many calls over many shapes: after one warm cycle memory stays flat and no call gets slower.

A few cycles by default; NIGHTLY=1 (--config=nightly) makes 10,000 calls. Prints what it measured.
"""

import json
import os

from tests.cases.backends import BACKENDS
from tests.faults_test import run_script

CALLS = 10_000 if os.environ.get("NIGHTLY") == "1" else 1_000

# Over one run of any length, in a process that has made every program before.
FLAT_MIB = 4.0

_SCRIPT = """
import json
import os
import time

calls, kept = int(os.environ["CALLS"]), []

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20

# 50 shapes, no two alike; every fifth with its gradient.
shapes = [(7 + 5 * n % 97, 1 + n % 3) for n in range(50)]
assert len(set(shapes)) == 50
arguments = [inputs(*shape) for shape in shapes]
compiled = [
    jax.jit(gradient if n % 5 == 0 else attend).lower(*x).compile()
    for n, x in enumerate(arguments)
]

def cycle():
    begin = time.process_time()
    for program, x in zip(compiled, arguments):
        result = jax.block_until_ready(program(*x))
        if os.environ.get("LEAK"):
            kept.append(result)
    return time.process_time() - begin

for _ in range(2):
    cycle()
first = resident()
seconds, memory = [], []
for _ in range(calls // len(shapes)):
    seconds.append(cycle())
    memory.append(resident())
print(json.dumps({"first": first, "memory": memory, "seconds": seconds}))
"""


def measured(backend, **env):
    out = run_script(_SCRIPT, backend, timeout=3000, CALLS=str(CALLS), **env)
    return json.loads(out.splitlines()[-1])


def test_memory_is_flat_and_calls_keep_their_speed(backend, capsys):
    # A neighbour on the core that begins in the middle slows late cycles (1.37, seen once); it does
    # not begin in the middle of three runs.
    for _ in range(3):
        result = measured(backend)
        growth = result["memory"][-1] - result["first"]
        seconds = result["seconds"]
        third = len(seconds) // 3
        # The fastest cycles: what else runs on the machine only adds.
        ratio = min(seconds[-third:]) / min(seconds[:third])
        with capsys.disabled():
            print(
                f"\n{backend.name}: {CALLS} calls over 50 shapes: {result['first']:.1f} MiB at "
                f"first, {growth:+.2f} MiB at the end; late cycles take {ratio:.3f} of early ones"
            )
        assert growth < FLAT_MIB
        if ratio < 1.25:
            return
    raise AssertionError(f"late cycles took {ratio:.3f} of early ones, in three runs")


def test_a_leak_would_be_seen():
    """Keeping each call's results grows beyond the limit above; on the quickest backend."""
    result = measured(BACKENDS["cpu"], LEAK="1")
    assert result["memory"][-1] - result["first"] > FLAT_MIB
