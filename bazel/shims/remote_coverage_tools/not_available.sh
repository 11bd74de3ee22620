#!/bin/sh
# Answers `bazel coverage`: the coverage tools are a download that this project does without.
echo "bazel coverage is not set up in this workspace; run the tests with bazel test" >&2
exit 1
