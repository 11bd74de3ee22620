# SPDX-License-Identifier: Apache-2.0
"""Python rules of this workspace.

    load("//bazel/python:defs.bzl", "py_binary", "py_benchmark", "py_library", "pytest_test")

Imports are workspace paths (`import jax_ops`, `from tests.cases import ...`). Only what `deps` reach can be imported, and of
installed packages only the locked ones: JAX, NumPy and absl are there for every binary and test without being named;
pytest, hypothesis and flatbuffers for every test; torch, flax and matplotlib with --config=peers. Packages that happen to
be installed on the machine are never seen.

py_library(name, srcs, deps, data, ...)
    The usual rule. Data that Python opens lies beside the module, as in the source tree.

py_binary(name, main, srcs = [main], deps, data, ...)
    The usual rule with the locked packages added. `bazel run` starts it in the workspace's runfiles; the folder where the command
    was typed is in the variable BUILD_WORKING_DIRECTORY.

pytest_test(name, srcs, deps, data, args, size = "medium", tags, shard_count, peers = False, env)
    Runs pytest on the files in `srcs` whose names match *_test.py or test_*.py; conftest.py files and helpers go
    into a py_library in `deps`. `args` are pytest's. A run that collects no test fails. `shard_count` spreads test functions over
    shards. `bazel test --test_filter=EXPR` is pytest's -k. A test that needs torch, flax or matplotlib says `peers = True`: it is
    skipped by wildcards without --config=peers. Each test may use one core; say `tags = ["cpu:2"]` for two.

pytest_binary(name, deps, data)
    pytest itself as a program for `bazel run`, with the packages of pytest_test and `deps` at hand.

py_benchmark(name, main, deps, smoke_args, data)
    Makes the binary `name` and the test `<name>_smoke_test`, which runs the binary with `smoke_args` and --output=FILE and
    demands exit code 0 and at least one measured row and no `error` row in FILE. List the smoke tests in the test_suite
    //tests/benchmarks:smoke, so that `bazel test //tests/...` runs them.

wheel(name, package, top_level, libraries, version_file, floor, readme, license)
    Packs the py_library `package` and `libraries` into a wheel that plain pip installs. The output is a folder `name` with one
    file, whose name carries the version and the platform tag that the libraries really need. Equal inputs give equal bytes.
"""

load("@rules_python//python:defs.bzl", _py_binary = "py_binary", _py_library = "py_library", _py_test = "py_test")
load("//bazel/python/private:wheel.bzl", _wheel = "wheel")

_RUNNER = "//bazel/python/private:pytest_runner.py"
_SMOKE = "//bazel/python/private:smoke_runner.py"
_RUNTIME = "//bazel/python:runtime"
_TEST = "//bazel/python:test"

# Only a build with --config=peers has torch; elsewhere such a test is skipped by wildcards and refused by name.
_NEEDS_PEERS = select({
    "//bazel/python:with_peers": [],
    "//conditions:default": ["//bazel/python:peers_are_off"],
})

wheel = _wheel

def py_library(name, **kwargs):
    """See the head of this file.

    Args:
      name: the target's name.
      **kwargs: what the usual rule takes.
    """
    _py_library(name = name, **kwargs)

def py_binary(name, main, srcs = None, deps = [], **kwargs):
    """See the head of this file.

    Args:
      name: the target's name.
      main: the file that is run.
      srcs: every source file, main included.
      deps: py_library targets.
      **kwargs: what the usual rule takes.
    """
    _py_binary(
        name = name,
        srcs = srcs if srcs != None else [main],
        main = main,
        deps = deps + [_RUNTIME],
        **kwargs
    )

def pytest_test(
        name,
        srcs,
        deps = [],
        data = [],
        args = [],
        size = "medium",
        tags = [],
        shard_count = None,
        peers = False,
        env = {},
        **kwargs):
    """See the head of this file.

    Args:
      name: the target's name.
      srcs: test files.
      deps: py_library targets.
      data: files for run time.
      args: arguments for pytest.
      size: Bazel's test size, which sets the time limit.
      tags: Bazel's tags.
      shard_count: number of shards.
      peers: whether torch, flax or matplotlib are needed.
      env: environment variables.
      **kwargs: what py_test takes besides.
    """
    tests = ["$(rootpath %s)" % src for src in srcs]
    _py_test(
        name = name,
        srcs = [_RUNNER] + srcs,
        main = _RUNNER,
        deps = deps + [_TEST],
        data = data + ["//:pyproject.toml"],
        args = tests + ["--"] + args,
        size = size,
        tags = tags + (["peers"] if peers else []),
        shard_count = shard_count,
        target_compatible_with = _NEEDS_PEERS if peers else [],
        env = env,
        **kwargs
    )

def pytest_binary(name, deps = [], data = []):
    """See the head of this file.

    Args:
      name: the target's name.
      deps: py_library targets.
      data: files for run time.
    """
    _py_binary(
        name = name,
        srcs = [_RUNNER],
        main = _RUNNER,
        deps = deps + [_TEST],
        data = data + ["//:pyproject.toml"],
        testonly = True,
    )

def py_benchmark(name, main, deps = [], smoke_args = [], data = [], size = "medium", tags = []):
    """See the head of this file.

    Args:
      name: the binary's name.
      main: the file that is run.
      deps: py_library targets.
      smoke_args: flags for a run of seconds.
      data: files for run time.
      size: Bazel's size of the smoke test.
      tags: Bazel's tags of the smoke test.
    """
    py_binary(
        name = name,
        main = main,
        deps = deps,
        data = data,
    )
    _py_test(
        name = name + "_smoke_test",
        srcs = [_SMOKE],
        main = _SMOKE,
        data = [":" + name],
        args = ["$(rootpath :%s)" % name] + smoke_args,
        size = size,
        tags = tags,
    )
