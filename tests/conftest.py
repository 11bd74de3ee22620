# SPDX-License-Identifier: Apache-2.0
"""pytest set-up for every Python test: backends to run on, virtual devices, the support matrix."""

import os

import jax
import pytest

from tests.cases import support_matrix
from tests.cases.backends import BACKENDS

# Nearly all the time goes into compiling hundreds of small programs once each: LLVM's optimisation
# passes cost a third of it and change no meaning. The nightly run compiles as users do.
if os.environ.get("NIGHTLY") != "1":
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
    ).strip()

# Sharding tests need several devices; eight virtual ones cost nothing.
jax.config.update("jax_num_cpu_devices", 8)

_recorded: dict = {}


def pytest_addoption(parser):
    parser.addoption(
        "--backends",
        default=os.environ.get("ATTENTION_TEST_BACKENDS", ""),
        help="comma-separated backends to test on; each named one must be there, or its tests "
        f"fail. Choices: {', '.join(BACKENDS)}. Default: those that this machine has.",
    )
    parser.addoption(
        "--write-support-matrix",
        action="store_true",
        help="rewrite tests/support_matrix.json and the README's table from this run",
    )


def _available():
    """{backend name: None, or why it cannot run here}."""
    import jax_ops

    reasons = jax_ops.available_implementations()
    return {name: reasons[name] or None for name in BACKENDS}


def _chosen(config):
    names = [n for n in config.getoption("--backends").split(",") if n]
    for name in names:
        if name not in BACKENDS:
            raise pytest.UsageError(f"--backends: got {name!r}; choices: {', '.join(BACKENDS)}")
    return names or [name for name, reason in _available().items() if reason is None]


def pytest_report_header(config):
    absent = {n: r for n, r in _available().items() if r is not None}
    lines = [f"backends: {', '.join(_chosen(config))}"]
    lines += [f"backend {name} cannot run here: {reason}" for name, reason in absent.items()]
    return lines


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        names = _chosen(metafunc.config)
        metafunc.parametrize("backend", [BACKENDS[n] for n in names], ids=str, indirect=True)


@pytest.fixture
def backend(request):
    """The backend that the test runs on. One that was asked for and is absent is a failure."""
    reason = _available()[request.param.name]
    if reason is not None:
        pytest.fail(f"backend {request.param.name!r} was asked for and cannot run: {reason}")
    return request.param


@pytest.fixture
def record_feature():
    """record(backend, feature, direction, outcome): notes an outcome for the support matrix."""

    def record(backend, feature, direction, outcome):
        column = _recorded.setdefault(backend.name, {}).setdefault(feature.name, {})
        # A feature that runs in several dtypes passes when it passes in all of them.
        if column.get(direction, outcome) != outcome:
            outcome = "failed"
        column[direction] = outcome

    return record


def pytest_sessionfinish(session, exitstatus):
    if session.config.getoption("--write-support-matrix") and exitstatus == 0:
        support_matrix.write(_recorded)
