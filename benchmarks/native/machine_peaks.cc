// SPDX-License-Identifier: Apache-2.0
// Measures what the CPU can do at most: multiply-add throughput and memory read bandwidth.
//
// usage: machine_peaks [threads]
// Prints one JSON object: {"method": ..., "gflops": {"float32": x, ...}, "read_gb_s": y}.
// Each figure is the best of several short windows, all threads running at the same time.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kWindows = 20;
constexpr int64_t kIterations = 12 * 1000 * 1000;
// Larger than any last-level cache of a core's share.
constexpr size_t kStreamBytes = size_t{256} << 20;

// Each loop does `iterations` rounds of kChains independent multiply-adds and returns FLOPs done.
// Enough chains hide the latency of the unit; the sum at the end keeps the loop alive.
constexpr int kChains = 12;

volatile float g_sink;

int64_t ScalarLoop(int64_t iterations) {
  // Four-wide vectors that any compiler maps to its baseline SIMD unit.
  typedef float Vector __attribute__((vector_size(16)));
  Vector acc[kChains];
  for (int c = 0; c < kChains; ++c) acc[c] = Vector{1.0f, 1.1f, 1.2f, 1.3f} + float(c);
  const Vector a = {0.999f, 0.998f, 0.997f, 0.996f};
  const Vector b = {1e-3f, 2e-3f, 3e-3f, 4e-3f};
  for (int64_t i = 0; i < iterations; ++i) {
    for (int c = 0; c < kChains; ++c) acc[c] = acc[c] * a + b;
  }
  for (int c = 1; c < kChains; ++c) acc[0] += acc[c];
  g_sink = acc[0][0] + acc[0][1] + acc[0][2] + acc[0][3];
  return iterations * kChains * 4 * 2;
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) int64_t Avx2Loop(int64_t iterations) {
  __m256 acc[kChains];
  for (int c = 0; c < kChains; ++c) acc[c] = _mm256_set1_ps(1.0f + 0.1f * c);
  const __m256 a = _mm256_set1_ps(0.999f);
  const __m256 b = _mm256_set1_ps(1e-3f);
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) acc[c] = _mm256_fmadd_ps(acc[c], a, b);
  }
  for (int c = 1; c < kChains; ++c) acc[0] = _mm256_add_ps(acc[0], acc[c]);
  float lanes[8];
  _mm256_storeu_ps(lanes, acc[0]);
  g_sink = lanes[0];
  return iterations * kChains * 8 * 2;
}

__attribute__((target("avx512f"))) int64_t Avx512Loop(int64_t iterations) {
  __m512 acc[kChains];
  for (int c = 0; c < kChains; ++c) acc[c] = _mm512_set1_ps(1.0f + 0.1f * c);
  const __m512 a = _mm512_set1_ps(0.999f);
  const __m512 b = _mm512_set1_ps(1e-3f);
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) acc[c] = _mm512_fmadd_ps(acc[c], a, b);
  }
  for (int c = 1; c < kChains; ++c) acc[0] = _mm512_add_ps(acc[0], acc[c]);
  float lanes[16];
  _mm512_storeu_ps(lanes, acc[0]);
  g_sink = lanes[0];
  return iterations * kChains * 16 * 2;
}

__attribute__((target("avx512f,avx512bf16"))) int64_t Bf16DotLoop(int64_t iterations) {
  __m512 acc[kChains];
  for (int c = 0; c < kChains; ++c) acc[c] = _mm512_set1_ps(1.0f + 0.1f * c);
  const __m512bh a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5f), _mm512_set1_ps(0.25f));
  const __m512bh b = _mm512_cvtne2ps_pbh(_mm512_set1_ps(1e-3f), _mm512_set1_ps(2e-3f));
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) acc[c] = _mm512_dpbf16_ps(acc[c], a, b);
  }
  for (int c = 1; c < kChains; ++c) acc[0] = _mm512_add_ps(acc[0], acc[c]);
  float lanes[16];
  _mm512_storeu_ps(lanes, acc[0]);
  g_sink = lanes[0];
  return iterations * kChains * 32 * 2;
}

// Matrix tiles (AMX), which Linux hands out on request.
bool HasTiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

__attribute__((target("amx-tile,amx-bf16"))) int64_t TileLoop(int64_t iterations) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } shapes;
  asm volatile("ldtilecfg %0" ::"m"(shapes));  // GCC 12's own function does not say that it reads
  for (int64_t i = 0; i < iterations; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return iterations * 4 * 16 * 16 * 32 * 2;
}
#endif

// Runs `work` on every thread at once and returns the best amount per second over the windows.
double BestRate(int threads, const std::function<int64_t(int thread)>& work) {
  double best = 0;
  for (int window = 0; window < kWindows; ++window) {
    std::atomic<int> ready{0};
    std::atomic<bool> go{false};
    std::atomic<int64_t> done{0};
    std::vector<std::thread> pool;
    for (int t = 0; t < threads; ++t) {
      pool.emplace_back([&, t] {
        ready.fetch_add(1);
        while (!go.load(std::memory_order_acquire)) {
        }
        done.fetch_add(work(t));
      });
    }
    while (ready.load() != threads) {
    }
    const Clock::time_point start = Clock::now();
    go.store(true, std::memory_order_release);
    for (std::thread& thread : pool) thread.join();
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    const double rate = static_cast<double>(done.load()) / seconds;
    if (rate > best) best = rate;
  }
  return best;
}

int64_t SumBytes(const uint64_t* data, size_t words) {
  // Eight sums: enough loads in flight for the hardware prefetcher to be the limit.
  uint64_t sums[8] = {0};
  for (size_t i = 0; i + 8 <= words; i += 8) {
    for (int j = 0; j < 8; ++j) sums[j] += data[i + j];
  }
  uint64_t total = 0;
  for (int j = 0; j < 8; ++j) total += sums[j];
  g_sink = static_cast<float>(total & 0xff);
  return static_cast<int64_t>(words * sizeof(uint64_t));
}

}  // namespace

int main(int argc, char** argv) {
  const int hardware = static_cast<int>(std::thread::hardware_concurrency());
  const int threads = argc > 1 ? std::atoi(argv[1]) : (hardware > 0 ? hardware : 1);
  if (threads < 1 || threads > 4096) {
    std::fprintf(stderr, "machine_peaks: threads must be in 1..4096, got '%s'\n", argv[1]);
    return 2;
  }

  double float32 = BestRate(threads, [](int) { return ScalarLoop(kIterations / 4); });
  double bfloat16 = 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    float32 = std::max(float32, BestRate(threads, [](int) { return Avx2Loop(kIterations / 2); }));
  }
  if (__builtin_cpu_supports("avx512f")) {
    float32 = std::max(float32, BestRate(threads, [](int) { return Avx512Loop(kIterations / 4); }));
  }
  if (__builtin_cpu_supports("avx512bf16")) {
    bfloat16 = BestRate(threads, [](int) { return Bf16DotLoop(kIterations / 4); });
  }
  if (HasTiles()) {
    bfloat16 = std::max(bfloat16, BestRate(threads, [](int) { return TileLoop(kIterations / 8); }));
  }
#endif
  // 16-bit types without dot instructions of their own are widened to float32 first.
  bfloat16 = std::max(bfloat16, float32);

  const size_t words = kStreamBytes / sizeof(uint64_t);
  std::vector<std::unique_ptr<uint64_t[]>> buffers(threads);
  for (auto& buffer : buffers) {
    buffer.reset(new uint64_t[words]);
    std::memset(buffer.get(), 1, kStreamBytes);
  }
  const double read = BestRate(threads, [&](int t) { return SumBytes(buffers[t].get(), words); });

  std::printf(
      "{\"method\": \"multiply-add loops and streaming reads, %d threads\", "
      "\"gflops\": {\"float32\": %.6g, \"bfloat16\": %.6g, \"float16\": %.6g}, "
      "\"read_gb_s\": %.6g}\n",
      threads, float32 / 1e9, bfloat16 / 1e9, float32 / 1e9, read / 1e9);
  return 0;
}
