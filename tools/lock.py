# SPDX-License-Identifier: Apache-2.0
"""Resolves bazel/*/requirements/*.in to lock files with a hash for every wheel.

`bazel run //tools:lock` keeps every present pin that the requirements still allow; `--upgrade` lets
all of them move and `--upgrade_package=NAME` only one. `--check` writes nothing and fails where a
lock would change. pip does the resolving, so indexes, mirrors and credentials are whatever pip is
set up with.

One lock is made per Python version, because JAX's newest release differs between them, and only for
Linux on x86-64. A Python version that is not installed keeps its locks and is named at the end.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable

PYTHON_VERSIONS = ("3.11", "3.12", "3.13")

# Extra sites are searched beside `runtime`, so they repeat none of its packages and agree with its
# versions.
BASE_SITE = "runtime"
EXTRA_SITES = ("test", "peers", "cuda")
STANDALONE_SITES = ("floor", "lint")

# torch exists as a CPU build and as a CUDA build of one version, locked apart from the other peers:
# a machine that is offered the CPU build does not download gigabytes that it cannot use.
TORCH_CPU_SITE = "peers_torch_cpu"
TORCH_CUDA_SITE = "peers_torch_cuda"
TORCH_CUDA_ONLY = re.compile(r"^(nvidia-|cuda-|triton$)")

HEADER = """\
# Made by `bazel run //tools:lock` from {source}; change that file, not this one.
# Linux x86-64, {python}. Every wheel that may be installed has its hash here.
"""


@dataclasses.dataclass
class Pin:
    """One locked package: its exact version and the hashes of every wheel that may be installed."""

    version: str
    hashes: set[str]


Lock = dict[str, Pin]


def canonical(name: str) -> str:
    """Returns the package name in the form that indexes compare."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(path: pathlib.Path) -> Lock:
    """Reads a lock file; a missing one is empty."""
    lock: Lock = {}
    if not path.exists():
        return lock
    joined = path.read_text().replace("\\\n", " ")
    for line in joined.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        requirement, *options = line.split()
        name, version = requirement.split("==")
        lock[name] = Pin(version, {o.removeprefix("--hash=") for o in options})
    return lock


def format_lock(lock: Lock, source: str, python: str) -> str:
    """Formats a lock file, sorted, so that equal locks are equal files."""
    lines = [HEADER.format(source=source, python=python)]
    for name, pin in sorted(lock.items()):
        lines.append(f"{name}=={pin.version} \\\n")
        lines.append(" \\\n".join(f"    --hash={h}" for h in sorted(pin.hashes)) + "\n")
    return "".join(lines)


def find_python(version: str) -> str | None:
    """Finds an interpreter of one minor version, or None."""
    roots = [pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))]
    candidates = [f"python{version}", "python3"]
    for root in roots:
        candidates += map(str, sorted(root.glob(f"versions/{version}.*/bin/python3")))
    for candidate in candidates:
        try:
            out = subprocess.run(
                [
                    candidate,
                    "-c",
                    "import sys, pip; print('%d.%d' % sys.version_info[:2], sys.executable)",
                ],
                capture_output=True,
                text=True,
                check=True,
            ).stdout.split()
        except (OSError, subprocess.CalledProcessError):
            continue
        if out[0] == version:
            return out[1]
    return None


def resolve(python: str, requirements: list[str], constraints: dict[str, str]) -> Lock:
    """Asks pip which wheels it would install.

    Args:
      python: the interpreter whose pip resolves.
      requirements: requirement lines.
      constraints: package name to exact version.

    Returns:
      The lock; a local version such as 2.13.0+cpu keeps its local part.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        (folder / "requirements.txt").write_text("\n".join(requirements) + "\n")
        (folder / "constraints.txt").write_text(
            "".join(f"{name}=={version}\n" for name, version in sorted(constraints.items()))
        )
        report = folder / "report.json"
        result = subprocess.run(
            [
                *(python, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"),
                *("--only-binary=:all:", f"--report={report}"),
                f"--requirement={folder / 'requirements.txt'}",
                f"--constraint={folder / 'constraints.txt'}",
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode != 0:
            sys.exit(
                f"lock: pip could not resolve {', '.join(requirements)}:\n{result.stderr}"
                "lock: where a present pin stands in the way: --upgrade_package=NAME or --upgrade"
            )
        installed = json.loads(report.read_text())["install"]
    lock: Lock = {}
    for item in installed:
        sha256 = item["download_info"]["archive_info"]["hashes"]["sha256"]
        lock[canonical(item["metadata"]["name"])] = Pin(
            item["metadata"]["version"], {f"sha256:{sha256}"}
        )
    return lock


def read_requirements(path: pathlib.Path) -> list[str]:
    """Reads requirement lines without comments."""
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def pins(lock: Lock) -> dict[str, str]:
    """Returns the exact public version of each package."""
    return {name: pin.version.split("+")[0] for name, pin in lock.items()}


def resolve_peers(
    python: str, requirements: list[str], constraints: dict[str, str]
) -> tuple[Lock, Lock, Lock]:
    """Resolves the peers, with torch's CPU build if pip is offered one and its CUDA build.

    Returns:
      The locks of all but torch, of torch's CPU build (empty where pip finds none) and of torch's
      CUDA build with what only that needs.
    """
    lock = resolve(python, requirements, constraints)
    cpu: Lock = {}
    public, _, local = lock["torch"].version.partition("+")
    if local:
        cpu["torch"] = lock["torch"]
        # `===` compares the whole string, so it excludes the local build; a constraint `==` would
        # let it in again.
        exact = [f"torch==={public}" if r.startswith("torch") else r for r in requirements]
        others = {n: v for n, v in (constraints | pins(lock)).items() if n != "torch"}
        lock = resolve(python, exact, others)
    cuda = {n: pin for n, pin in lock.items() if n == "torch" or TORCH_CUDA_ONLY.match(n)}
    return {n: pin for n, pin in lock.items() if n not in cuda}, cpu, cuda


class Locker:
    """Makes every lock file below one workspace folder."""

    def __init__(self, workspace: pathlib.Path, upgrade: bool, upgrade_packages: list[str]):
        self._workspace = workspace
        self._upgrade = upgrade
        self._upgrade_packages = {canonical(p) for p in upgrade_packages}
        self.files: dict[pathlib.Path, str] = {}

    def _kept(self, *paths: pathlib.Path) -> dict[str, str]:
        if self._upgrade:
            return {}
        kept: dict[str, str] = {}
        for path in paths:
            kept |= pins(read_lock(path))
        return {name: v for name, v in kept.items() if name not in self._upgrade_packages}

    def lock_python(self, version: str, python: str) -> None:
        """Makes the locks of one Python version."""
        folder = self._workspace / "bazel/python"
        requirements = {
            p.stem: read_requirements(p) for p in sorted((folder / "requirements").glob("*.in"))
        }

        def path(site: str) -> pathlib.Path:
            return folder / "locks" / f"{site}-{version}.txt"

        def save(site: str, lock: Lock, source: str) -> None:
            text = format_lock(lock, f"bazel/python/requirements/{source}.in", f"Python {version}")
            self.files[path(site)] = text

        base = resolve(python, requirements[BASE_SITE], self._kept(path(BASE_SITE)))
        save(BASE_SITE, base, BASE_SITE)
        for site in EXTRA_SITES:
            if site == "peers":
                self._lock_peers(python, requirements, base, path, save)
                continue
            constraints = self._kept(path(site)) | pins(base)
            lock = resolve(python, requirements[site] + requirements[BASE_SITE], constraints)
            save(site, {name: pin for name, pin in lock.items() if name not in base}, site)
        for site in STANDALONE_SITES:
            save(site, resolve(python, requirements[site], self._kept(path(site))), site)

    def _lock_peers(
        self,
        python: str,
        requirements: dict[str, list[str]],
        base: Lock,
        path: Callable[[str], pathlib.Path],
        save: Callable[[str, Lock, str], None],
    ) -> None:
        constraints = self._kept(path("peers"), path(TORCH_CUDA_SITE)) | pins(base)
        wanted = requirements["peers"] + requirements[BASE_SITE]
        peers, cpu, cuda = resolve_peers(python, wanted, constraints)
        save("peers", {name: pin for name, pin in peers.items() if name not in base}, "peers")
        save(TORCH_CUDA_SITE, cuda, "peers")
        if cpu:
            save(TORCH_CPU_SITE, cpu, "peers")
            return
        # Made where pip was offered a CPU build. It stays as long as it is of the same version.
        present = pins(read_lock(path(TORCH_CPU_SITE)))
        if present and present["torch"] != cuda["torch"].version:
            sys.exit(f"lock: {path(TORCH_CPU_SITE).name} is of another torch; delete it")

    def lock_cuda(self, python: str) -> None:
        """Makes the CUDA toolkit's locks; its wheels are the same for every Python version."""
        folder = self._workspace / "bazel/cuda"
        for source in sorted((folder / "requirements").glob("*.in")):
            lock = resolve(python, read_requirements(source), {})
            text = format_lock(lock, f"bazel/cuda/requirements/{source.name}", "any Python")
            self.files[folder / "locks" / f"{source.stem}.txt"] = text


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--upgrade", action="store_true", help="let every pin move to the newest version"
    )
    parser.add_argument("--upgrade_package", action="append", default=[], metavar="NAME")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where a lock would change"
    )
    parser.add_argument(
        "--python", action="append", choices=PYTHON_VERSIONS, help="only these versions"
    )
    args = parser.parse_args()

    workspace = pathlib.Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", os.getcwd()))
    locker = Locker(workspace, args.upgrade, args.upgrade_package)
    missing = []
    found = {}
    for version in args.python or PYTHON_VERSIONS:
        python = find_python(version)
        if python is None:
            missing.append(version)
            continue
        print(f"lock: Python {version} ({python})", flush=True)
        locker.lock_python(version, python)
        found[version] = python
    if not found:
        sys.exit(
            "lock: found no Python with pip among " + ", ".join(args.python or PYTHON_VERSIONS)
        )
    locker.lock_cuda(next(iter(found.values())))

    changed = [p for p, text in locker.files.items() if not p.exists() or p.read_text() != text]
    for path in changed:
        print(f"lock: {'would change' if args.check else 'wrote'} {path.relative_to(workspace)}")
        if not args.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(locker.files[path])
    print(f"lock: {len(locker.files) - len(changed)} of {len(locker.files)} lock files unchanged")
    if missing:
        print(f"lock: not installed here, locks kept as they are: Python {', '.join(missing)}")
    if args.check and changed:
        sys.exit("lock: run `bazel run //tools:lock` and commit the result")


if __name__ == "__main__":
    main()
