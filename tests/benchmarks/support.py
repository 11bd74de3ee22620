# SPDX-License-Identifier: Apache-2.0
"""Shared by the benchmark tests: a run without flags, planted implementations, subprocesses."""

import contextlib
import io
import os
import subprocess
import sys

from benchmarks.harness.budget import Budget
from benchmarks.harness.implementations import IMPLEMENTATIONS, Implementation
from benchmarks.harness.progress import Progress
from benchmarks.harness.runner import Context, measure_group
from benchmarks.harness.settings import Settings
from benchmarks.harness.store import Store
from benchmarks.harness.suites import groups_of

# A ceiling that nothing reaches: the plausibility check has its own test.
NO_CEILING = {
    "method": "none",
    "is_bound": True,
    "gflops": {"float32": 1e12, "bfloat16": 1e12},
    "read_gb_s": 1e9,
}

TINY = Settings(
    "gqa",
    dtypes=("float32",),
    heads=(4,),
    kv_heads=(2,),
    head_dims=(16,),
    seq_lens=(32,),
    repeats=1,
    impls=("planted",),
    baseline_impl="planted",
)


@contextlib.contextmanager
def planted(build, name="planted", strict=True):
    """Registers build(case, backend) -> function of q, k, v as an implementation."""
    assert name not in IMPLEMENTATIONS
    IMPLEMENTATIONS[name] = Implementation(name, "jax_ops", "planted by a test", build, strict)
    try:
        yield
    finally:
        del IMPLEMENTATIONS[name]


def open_store(settings, path=None, resume=False):
    """A store whose run has these settings."""
    store = Store(path, {"backend": "cpu"})
    if resume:
        store.load()
    store.begin_run(settings.suite, settings.header(), resume)
    return store


def measure(settings=TINY, store=None, ceilings=NO_CEILING, cache_bytes=1, isolated=False):
    """Measures every group of `settings`; returns the store's rows."""
    groups = groups_of(settings)
    store = store or open_store(settings)
    context = Context(
        settings,
        settings.baseline_impl,
        isolated,
        "cpu",
        cache_bytes,
        {**ceilings, "gflops": dict(ceilings["gflops"])},
        store,
        Progress(len(groups), io.StringIO()),
        Budget(None, len(groups)),
    )
    for group in groups:
        context.progress.start_group(group.problem.label())
        context.budget.start_group()
        measure_group(context, group)
        context.progress.finish_group()
    return store.rows


def attention(case):
    """A right implementation in jax.numpy, for planted ones to start from."""
    import jax

    def call(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=case.causal, implementation="xla")

    return call


def run_binary(module, *flags, cwd, timeout=240):
    """Runs `python -m benchmarks.<module>`; `cwd` is where the user typed the command."""
    return _finish(start_binary(module, *flags, cwd=cwd), timeout)


def start_binary(module, *flags, cwd):
    """Starts `python -m benchmarks.<module>` without waiting."""
    return _start(["-m", f"benchmarks.{module}", *flags], cwd)


def run_script(script, *flags, cwd, timeout=240):
    """Runs Python source with command-line flags, as a binary would be run."""
    process = _start(["-c", script, *flags], cwd)
    return _finish(process, timeout)


def _start(arguments, cwd):
    environment = dict(
        os.environ,
        PYTHONPATH=os.pathsep.join(p for p in sys.path if p),
        BUILD_WORKING_DIRECTORY=str(cwd),
    )
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=cwd,
    )


def _finish(process, timeout):
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
