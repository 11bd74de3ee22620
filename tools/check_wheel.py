# SPDX-License-Identifier: Apache-2.0
"""Installs the wheel with plain pip in new environments and runs the example of the README there.

`bazel run //tools:check_wheel` builds the wheel and tries every Python that has a lock and is
installed, each with the oldest JAX that is supported and with the newest that pip finds. Unlike
//tests/build:installed_test it uses the network and knows nothing of Bazel's packages.
`bazel run //tests/build:check_wheel` does the same with a wheel for one GPU architecture.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from tools import lock

_JAX = ("oldest", "newest")


def readme_example(text: str) -> str:
    """Returns the first Python block of the README, the example that every reader tries."""
    match = re.search(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    if match is None:
        raise ValueError("README.md has no block marked as python")
    return match[1]


def oldest(workspace: pathlib.Path) -> list[str]:
    """Returns the requirements that pin the oldest supported JAX."""
    pinned = lock.read_requirements(workspace / "bazel/python/requirements/floor.in")
    return [line for line in pinned if "==" in line]


def check(python: str, wheel: pathlib.Path, requirements: list[str], example: str) -> str:
    """Tries one combination.

    Returns:
      The version of JAX that was installed.

    Raises:
      subprocess.CalledProcessError: a step failed; its output was printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = pathlib.Path(folder, "environment")
        # -I: Bazel's PYTHONPATH would put its own packages before those of the environment.
        subprocess.run([python, "-I", "-m", "venv", str(environment)], check=True)
        own = [str(environment / "bin/python"), "-I"]
        pip = [*own, "-m", "pip", "--disable-pip-version-check"]
        run = {"check": True, "cwd": folder}
        subprocess.run([*pip, "install", "--quiet", str(wheel), *requirements], **run)
        subprocess.run([*own, "-c", example], **run)

        # It must leave nothing behind, and come back.
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", "jax-ops-attention"], **run)
        left = list(environment.glob("lib/python*/site-packages/jax_ops*"))
        if left:
            sys.exit(f"check_wheel: uninstalling left {', '.join(p.name for p in left)}")
        subprocess.run([*pip, "install", "--quiet", "--no-deps", str(wheel)], **run)
        program = "import jax, jax_ops; print(jax.__version__, jax.__file__, jax_ops.__file__)"
        output = subprocess.run([*own, "-c", program], stdout=subprocess.PIPE, text=True, **run)
        version, *files = output.stdout.split()
        foreign = [file for file in files if environment not in pathlib.Path(file).parents]
        if foreign:
            sys.exit(f"check_wheel: imported from outside of the environment: {', '.join(foreign)}")
        pinned = [line for line in requirements if line.startswith("jax==")]
        if pinned and pinned != [f"jax=={version}"]:
            sys.exit(f"check_wheel: asked for {', '.join(pinned)}, got {version}")
        return version


def main() -> int:
    """Tries every combination and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", choices=lock.PYTHON_VERSIONS)
    parser.add_argument("--jax", action="append", choices=_JAX)
    args = parser.parse_args()
    workspace = pathlib.Path(os.environ["BUILD_WORKSPACE_DIRECTORY"])
    (wheel,) = (pathlib.Path(__file__).absolute().parents[1] / "jax_ops/wheel").iterdir()
    example = readme_example((workspace / "README.md").read_text())
    print(f"check_wheel: {wheel.name}, {wheel.stat().st_size / 2**20:.1f} MiB")

    failed = 0
    tried = 0
    for version in args.python or lock.PYTHON_VERSIONS:
        python = lock.find_python(version)
        if python is None:
            print(f"check_wheel: Python {version} is not installed here: not tried")
            continue
        for jax in args.jax or _JAX:
            tried += 1
            requirements = oldest(workspace) if jax == "oldest" else []
            try:
                installed = check(python, wheel, requirements, example)
                print(f"check_wheel: Python {version}, {jax} JAX ({installed}): ok", flush=True)
            except subprocess.CalledProcessError as error:
                failed += 1
                print(f"check_wheel: Python {version}, {jax} JAX: FAILED: {error}", flush=True)
    if not tried:
        sys.exit("check_wheel: nothing was tried")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
