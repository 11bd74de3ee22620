# SPDX-License-Identifier: Apache-2.0
"""Faults around a call: no memory, no disk, threads, fork, interrupt, thread pools of any size.

Each runs in a process of its own with a time limit: nothing hangs, nothing is lost, and the message
says what happened.
"""

import os
import subprocess
import sys
import textwrap

import pytest

_PRELUDE = """
import signal
import sys
import numpy as np
import jax
import jax.numpy as jnp
import jax_ops

backend = sys.argv[1]
# What a shell starts in the background begins with interrupts ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

def inputs(length=128, heads=4, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=(1, length, heads, 32)), jnp.float32) for _ in range(3)]

@jax.jit
def attend(q, k, v):
    return jax_ops.dot_product_attention(q, k, v, is_causal=True, implementation=backend)

@jax.jit
def gradient(q, k, v):
    return jax.grad(lambda *x: (attend(*x) ** 2).sum(), (0, 1, 2))(q, k, v)
"""


def run_script(script, backend, timeout=120, **env):
    """Runs the prelude and the script in a fresh process; its standard output."""
    child = subprocess.run(
        [sys.executable, "-c", _PRELUDE + textwrap.dedent(script), backend.name],
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)), **env),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert child.returncode == 0, (
        f"exit status {child.returncode}\n{child.stdout[-2000:]}\n{child.stderr[-4000:]}"
    )
    return child.stdout


def _host_only(backend):
    if backend.name == "cuda":
        pytest.skip("the address-space limit is about host memory; a CUDA context needs more")


def test_no_memory_left_is_an_exception_that_says_so(backend):
    """A limit on the address space: the big call fails, and a small one still works after it."""
    _host_only(backend)
    out = run_script(
        """
        import resource
        small = inputs()
        expected = np.asarray(attend(*small))
        big = jax.eval_shape(lambda: jnp.zeros((1, 300_000, 16, 128)))
        compiled = jax.jit(lambda q: attend(q, q, q)).lower(big).compile()
        q = jnp.zeros(big.shape)  # 2.3 GiB
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
        try:
            jax.block_until_ready(compiled(q))
            print("no failure")
        except Exception as e:
            print("failed:", type(e).__name__, str(e).splitlines()[0])
        del q
        np.testing.assert_array_equal(np.asarray(attend(*small)), expected)
        print("still works")
        """,
        backend,
    )
    assert "failed:" in out and "memory" in out.lower(), out
    assert "still works" in out


def test_many_python_threads_share_programs(backend):
    """Eight threads over several programs, forward and backward: every result is the right one."""
    out = run_script(
        """
        import threading
        shapes = [(64, 2), (128, 4), (192, 3)]
        args = [inputs(*shape) for shape in shapes]
        expected = [[np.asarray(x) for x in (attend(*a), *gradient(*a))] for a in args]
        wrong = []

        def work(seed):
            for i in np.random.default_rng(seed).integers(0, 3, 12):
                got = (attend(*args[i]), *gradient(*args[i]))
                if not all((np.asarray(x) == y).all() for x, y in zip(got, expected[i])):
                    wrong.append(i)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert not wrong, wrong
        print("done")
        """,
        backend,
    )
    assert "done" in out


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_thread_pools_of_any_size(backend, threads):
    """Independent calls inside one program, and two programs at once, on a pool of each size.

    XLA sizes its pool by NPROC. A handler that waits inside a one-thread pool would hang.
    """
    out = run_script(
        """
        import os
        import threading
        q, k, v = inputs(160)

        @jax.jit
        def several(q, k, v):
            return [attend(q * (i + 1), k, v) for i in range(4)] + list(gradient(q, k, v))

        first = [np.asarray(x) for x in several(q, k, v)]
        results = {}

        def work(n):
            results[n] = [np.asarray(x) for x in several(q, k, v)]

        pair = [threading.Thread(target=work, args=(n,)) for n in range(2)]
        [t.start() for t in pair]
        [t.join() for t in pair]
        for n in range(2):
            for x, y in zip(first, results[n]):
                np.testing.assert_array_equal(x, y)
        print("done with", os.environ["NPROC"])
        """,
        backend,
        NPROC=str(threads),
    )
    assert f"done with {threads}" in out


def test_fork_before_the_first_call(backend):
    """The library is imported but has done nothing: a child and its parent both work."""
    _host_only(backend)
    out = run_script(
        """
        import os
        child = os.fork()
        arguments = inputs()
        total = float(np.asarray(attend(*arguments)).astype(np.float64).sum())
        if child == 0:
            print("child", total, flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print("parent", total)
        """,
        backend,
    )
    values = {line.split()[0]: line.split()[1] for line in out.splitlines()}
    assert values["child"] == values["parent"]


def test_an_interrupt_ends_a_loop_of_calls_and_loses_nothing(backend):
    out = run_script(
        """
        import os
        import threading
        arguments = inputs(256)
        expected = np.asarray(attend(*arguments))
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        calls = 0
        try:
            while calls < 10**6:
                jax.block_until_ready(attend(*arguments))
                calls += 1
        except KeyboardInterrupt:
            print("interrupted")
        np.testing.assert_array_equal(np.asarray(attend(*arguments)), expected)
        print("still works")
        """,
        backend,
    )
    assert "interrupted" in out and "still works" in out


def test_an_interrupt_during_one_long_call(backend):
    """The call ends, the interrupt is raised, and the next call is right."""
    out = run_script(
        """
        import os
        import threading
        import time
        length, seconds = 256, 0.0
        while seconds < 0.4:
            length *= 2
            arguments = inputs(length)
            expected = np.asarray(attend(*arguments))
            begin = time.perf_counter()
            attend(*arguments).block_until_ready()
            seconds = time.perf_counter() - begin
        threading.Timer(seconds / 4, os.kill, (os.getpid(), signal.SIGINT)).start()
        begin = time.perf_counter()
        try:
            attend(*arguments).block_until_ready()
            time.sleep(10)
            print("not interrupted")
        except KeyboardInterrupt:
            print("interrupted")
        assert time.perf_counter() - begin < 9 + 9 * seconds
        np.testing.assert_array_equal(np.asarray(attend(*arguments)), expected)
        print("still works")
        """,
        backend,
    )
    assert out.split("\n")[:2] == ["interrupted", "still works"]


def test_no_home_and_no_space_on_any_disk(backend):
    """Nothing is written: below a device there is no folder, and no file may grow."""
    _host_only(backend)
    out = run_script(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        out = np.asarray(attend(*inputs()))
        total = sum(float(jnp.abs(x).sum()) for x in gradient(*inputs()))
        assert np.isfinite(out).all() and 0 < total < 1e9
        sys.stdout.write("works")
        """,
        backend,
        HOME="/dev/null/home",
        XDG_CACHE_HOME="/dev/null/home",
    )
    assert out == "works"
