// SPDX-License-Identifier: Apache-2.0
// Public interface of the emulator for tests and for the 'emulated' backend: options, registered
// buffers, counters.
//
// The emulator runs kernels/cuda source on the host, one fiber for each CUDA thread. See
// docs/emulator.md.
#pragma once

#include <cstdint>
#include <string>

namespace attention::emulator {

// In which order warps and lanes that could all run get their turn. A correct kernel gives the same
// bits under each.
enum class Schedule { kForward, kReverse, kRandom };

struct Options {
  // Race, bounds, initialisation and write-once checks. Off, only misalignment, divergence,
  // deadlock and damaged red zones are noticed, at about a third of the time.
  bool checked = false;
  Schedule schedule = Schedule::kForward;
  std::uint64_t seed = 0;       // of kRandom
  bool reverse_blocks = false;  // start blocks from the last to the first
  int host_threads = 1;
  // Blocks that one host thread keeps alive while they wait for others (grid_sync.h).
  int max_waiting_blocks = 8;
};

// Options of all later runs in this process. Until the first call they come from the environment
// variable ATTENTION_EMULATOR: a comma-separated list of checked, reverse_blocks,
// schedule=forward|reverse|random, seed=N, host_threads=N, max_waiting_blocks=N. An unknown entry
// makes every run fail with a report that names it.
void set_options(const Options& options);
Options get_options();

// What a kernel may do with a registered buffer.
enum class Access {
  kInput,      // read only
  kOutput,     // every byte written at most once by the whole grid, never read
  kWorkspace,  // read and written; reading a byte that nothing wrote is an error
};

// Declares the global memory of the runs that happen while it lives, in checked mode. With at least
// one session alive, any access outside the registered buffers is reported.
class Session {
 public:
  Session();
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // name appears in reports.
  void add(const std::string& name, const void* p, std::uint64_t bytes, Access access);

  // Empty if every byte of the output buffer was written; otherwise says where the first gap is.
  std::string unwritten(const std::string& name) const;
};

// Counters since the last reset, summed over all blocks. Bank conflicts are the extra passes that
// the accesses of one warp instruction need; they are counted in checked mode only.
struct Counters {
  std::uint64_t blocks = 0;
  std::uint64_t mma = 0;       // 16 x 8 blocks multiplied
  std::uint64_t ldmatrix = 0;  // x4 loads
  std::uint64_t ldmatrix_conflicts = 0;
  std::uint64_t shared_accesses = 0;  // warp-wide: shared_load, shared_store, async_copy
  std::uint64_t shared_conflicts = 0;
  std::uint64_t async_copies = 0;  // of one thread
  std::uint64_t barriers = 0;
};

void reset_counters();
Counters counters();

}  // namespace attention::emulator
