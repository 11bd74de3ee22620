# SPDX-License-Identifier: Apache-2.0
"""The one check that most tests make: results and gradients of a case obey the accuracy rule."""

from tests.cases import accuracy, run
from tests.cases.backends import Backend
from tests.cases.case import Case
from tests.cases.problem import Problem


def check(problem: Problem, backend: Backend, cotangents, **extra):
    """Runs forward and backward, checks every result, and returns ({'out', 'lse'}, gradients).

    cotangents: (dout, dlse). extra: keyword arguments of the call, and `entry` of run.call.
    """
    results, gradients = run.vjp(problem, backend, *cotangents, **extra)
    tf32 = backend.tf32 and extra.get("precision") != "highest"
    capped = problem.soft_cap is not None
    accuracy.assert_all_accurate(
        results, accuracy.expected_forward(problem, tf32=tf32), soft_cap=capped
    )
    accuracy.assert_all_accurate(
        gradients, accuracy.expected_backward(problem, *cotangents, tf32=tf32), soft_cap=capped
    )
    for name, g in gradients.items():
        operand = getattr(problem, name)
        assert (g.shape, g.dtype) == (operand.shape, operand.dtype), name
    assert results["out"].dtype == problem.query.dtype
    return results, gradients


def check_case(case: Case, backend: Backend, **extra):
    """`check` of a case with its own cotangents."""
    return check(case.problem(), backend, case.cotangents(), **extra)
