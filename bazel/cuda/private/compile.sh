#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs nvcc with a scratch folder of its own: compile.sh OBJECT NVCC ARGUMENT...
# nvcc names its temporary files after process ids, which repeat between sandboxes that share /tmp.
set -eu
object="$1"
shift
TMPDIR="$(mktemp -d "${PWD}/${object}.tmp.XXXXXX")"
export TMPDIR
trap 'rm -rf "${TMPDIR}"' EXIT
"$@" -o "${object}"
