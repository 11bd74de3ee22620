#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds //tests/fuzz:call_decoding_fuzzer for libFuzzer and runs it: bash tests/fuzz/libfuzzer.sh [options of libFuzzer]
#
#   FUZZ_CORPUS=DIR   where new inputs are kept (default: a new folder, named at the start)
#
# Needs clang with libFuzzer (Debian: clang and libclang-rt-14-dev). What is fuzzed, handlers and planners, is compiled by it with
# coverage, AddressSanitizer and UndefinedBehaviorSanitizer; kernels come from Bazel's build as they are. A crash leaves its input in
# the folder where this was started: add it to tests/fuzz/corpus when it is repaired.
set -euo pipefail
started="${PWD}"
cd "$(dirname "$0")/../.."

if ! command -v clang++ >/dev/null; then
  echo "libfuzzer: clang++ is not on PATH; on Debian: apt-get install clang libclang-rt-14-dev" >&2
  exit 1
fi

emulated=(attention_emulated {forward,backward}_units_emulator)
kernels=(//kernels/cpu:cpu //kernels/cpu:{portable,avx2,avx512,avx512_bf16} "${emulated[@]/#///kernels/cuda:}"
  //kernels/emulator:emulator)
# The headers of XLA are fetched for the handlers.
./bazelw build "${kernels[@]}" //kernels/ffi:cpu_handlers
bin="$(./bazelw info bazel-bin)"
headers="$(./bazelw info output_base)/external/xla_ffi/include"

build="$(mktemp -d)"
trap 'rm -rf "${build}"' EXIT
flags=(-std=c++17 -O1 -g -fno-omit-frame-pointer -I. -isystem "${headers}"
  "-fsanitize=address,undefined" -fno-sanitize-recover=undefined)

# compile NAME SOURCE [OPTION...]
compile() {
  local name="$1" source="$2"
  shift 2
  clang++ "${flags[@]}" -fsanitize=fuzzer-no-link "$@" -c "${source}" -o "${build}/${name}.o"
}
compile fuzzer tests/fuzz/call_decoding_fuzzer.cc
compile make tests/fuzz/hostile_call.cc
compile run tests/fuzz/run_call.cc
compile check tests/fuzz/check_call.cc
compile decode kernels/ffi/decode.cc
compile checks kernels/ffi/checks.cc
compile schema kernels/ffi/schema.cc
compile cpu_handlers kernels/ffi/cpu_handlers.cc
compile emulated_handlers kernels/ffi/cuda_handlers.cc -DATTENTION_EMULATED
compile cpu_plan kernels/cpu/plan.cc
compile emulated_plan kernels/cuda/plan.cc -DATTENTION_PLAN_FUNCTION=attention_plan_emulated
# Objects of the build that are not named above, in any order.
find "${bin}/kernels/cpu" "${emulated[@]/#/${bin}/kernels/cuda/_objs/}" "${bin}/kernels/emulator" -name '*.pic.o' \
  ! -name 'plan.pic.o' >"${build}/objects"
clang++ "${flags[@]}" -fsanitize=fuzzer "${build}"/*.o "@${build}/objects" -lpthread -o "${build}/call_decoding_fuzzer"

corpus="${FUZZ_CORPUS:-$(mktemp -d)}"
mkdir -p "${corpus}"
echo "libfuzzer: new inputs go to ${corpus}"
seeds="${PWD}/tests/fuzz/corpus"
cd "${started}"
"${build}/call_decoding_fuzzer" -max_len=128 "$@" "${corpus}" "${seeds}"
