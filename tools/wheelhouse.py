# SPDX-License-Identifier: Apache-2.0
"""Fills a folder with every file that a build without network needs, hashes checked.

`bazel run //tools:wheelhouse` fills `wheelhouse` of the workspace, for `bazel test --config=offline
//tests/...`. By default it takes what the default commands and CUDA targets need; `--site=peers`,
`--site=cuda` and `--site=lint` add more.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys

DEFAULT_SITES = ("runtime", "floor", "test")
MORE_SITES = ("peers", "peers_torch_cpu", "peers_torch_cuda", "cuda", "lint")


def download(lock: pathlib.Path, target: pathlib.Path) -> None:
    """Downloads what one lock file lists."""
    print(f"wheelhouse: {lock.name}", flush=True)
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"),
            *("--only-binary=:all:", f"--dest={target}", f"--requirement={lock}"),
        ],
        check=False,
    )
    if result.returncode != 0:
        sys.exit(f"wheelhouse: pip could not fetch {lock.name}")


def download_buildifier(workspace: pathlib.Path, target: pathlib.Path) -> None:
    """Downloads the npm package that the lints use; its hash is checked when it is unpacked."""
    rule = (workspace / "bazel/lint/repositories.bzl").read_text()
    version = re.search(r'_VERSION = "([^"]+)"', rule)[1]
    print(f"wheelhouse: buildifier {version}", flush=True)
    try:
        subprocess.run(
            ["npm", "pack", "--silent", f"@bazel/buildifier@{version}"], cwd=target, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"wheelhouse: npm could not fetch buildifier: {error}")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--target", type=pathlib.Path, help="the folder; default: wheelhouse in the workspace"
    )
    parser.add_argument(
        "--site", action="append", default=[], choices=MORE_SITES, help="also this lock"
    )
    args = parser.parse_args()
    workspace = pathlib.Path(os.environ["BUILD_WORKSPACE_DIRECTORY"])
    typed_in = pathlib.Path(os.environ["BUILD_WORKING_DIRECTORY"])
    target = typed_in / args.target if args.target else workspace / "wheelhouse"
    target.mkdir(parents=True, exist_ok=True)

    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    for site in [*DEFAULT_SITES, *args.site]:
        download(workspace / f"bazel/python/locks/{site}-{version}.txt", target)
    for lock in sorted((workspace / "bazel/cuda/locks").glob("*.txt")):
        download(lock, target)
    if "lint" in args.site:
        download_buildifier(workspace, target)
    print(f"wheelhouse: {len(list(target.iterdir()))} files in {target}, for Python {version}")


if __name__ == "__main__":
    main()
