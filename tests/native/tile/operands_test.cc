// SPDX-License-Identifier: Apache-2.0
// Every way to load operands and to multiply them, against a product in double precision; and no
// bank conflicts where the tile layer promises none.
#include <cmath>
#include <vector>

#include "kernels/cuda/tile/launch.h"
#include "kernels/emulator/emulator.h"
#include "tests/native/check/check.h"

namespace attention::tile {
namespace {

constexpr int kThreads = 64;  // two warps, 16 rows of the result each

enum class LoadA { kRows, kTransposed, kPacked, kAccumulator };
enum class LoadB { kRows, kTransposed };

// c[M x N] = a b with M = 32. a and b lie in shared memory as the loads under test want them.
template <typename T, int N, int K, LoadA A, LoadB B, F32Products Products>
struct Product {
  static constexpr int kThreads = tile::kThreads;
  static constexpr int kMinBlocks = 1;
  static constexpr int kM = 32;
  static constexpr bool kATransposed = A == LoadA::kTransposed;
  using TileA = SharedTile<T, kATransposed ? K : kM, kATransposed ? kM : K>;
  using TileB = SharedTile<T, B == LoadB::kRows ? N : K, B == LoadB::kRows ? K : N>;
  struct Params {
    const T* a;
    const T* b;
    f32* c;
  };
  static constexpr int smem_bytes(const Params&) { return TileA::kBytes + TileB::kBytes; }

  template <typename Tile>
  static void fill(const Tile& t, const T* from) {
    for (int i = thread_index(); i < Tile::kRows * Tile::kChunks; i += kThreads) {
      const int row = i / Tile::kChunks, chunk = i % Tile::kChunks;
      async_copy_or_zero<16>(t.chunk(row, chunk), from + row * Tile::kCols + chunk * Tile::kChunk,
                             true);
    }
  }

  static void run(const Params& p, Smem& smem) {
    const TileA a = TileA::take(smem);
    const TileB b = TileB::take(smem);
    fill(a, p.a);
    fill(b, p.b);
    async_commit();
    async_wait<0>();
    sync_block();
    const int m0 = warp_index() * 16;
    Accumulator<16, N> acc;
    acc.fill(0.0f);
    // kAccumulator: a is turned into an accumulator first, as the probabilities of attention are.
    Accumulator<16, K> pa;
    if constexpr (A == LoadA::kAccumulator) {
      pa.each(m0, 0, [&](f32& x, int row, int col, int, int) {
        x = to_f32(shared_load(a.at(row, col))[0]);
      });
    }
    for (int k = 0; k < K; k += kMmaK<T>) {
      for (int n = 0; n < N; n += 16) {
        AccBlock* d = &acc.block[0][n / 8];
        if constexpr (B == LoadB::kRows) {
          BFragment<T> fb[2];
          load_b(fb, b, n, k);
          mma<Products>(d, load_a(a, m0, k), fb);
        } else {
          BFragment<T, kPackedOrder<T>> fb[2];
          load_b_transposed(fb, b, k, n);
          if constexpr (A == LoadA::kTransposed) mma<Products>(d, load_a_transposed(a, k, m0), fb);
          if constexpr (A == LoadA::kPacked) mma<Products>(d, load_a_packed(a, m0, k), fb);
          if constexpr (A == LoadA::kAccumulator)
            mma<Products>(d, pack_a<T>(pa, 0, k / kMmaK<T>), fb);
        }
      }
    }
    acc.each(m0, 0, [&](f32& x, int row, int col, int row_slot, int col_slot) {
      EXPECT(row == m0 + Accumulator<16, N>::slot_row(row_slot));
      EXPECT(col == (Accumulator<16, N>::slot_col(col_slot)));
      EXPECT(&x == &acc.at(row_slot, col_slot));
      global_store(p.c + row * N + col, x);
    });
  }
};

u32 random_state = 12345;
f32 random_value() {
  random_state = random_state * 1664525u + 1013904223u;
  return static_cast<f32>(random_state >> 8) * (4.0f / 16777216.0f) - 2.0f;
}

template <typename T, int N, int K, LoadA A, LoadB B, F32Products Products = F32Products::kTf32>
emulator::Counters check_product(double tolerance) {
  using Kernel = Product<T, N, K, A, B, Products>;
  constexpr int M = Kernel::kM;
  std::vector<T> a(M * K), b(N * K);
  std::vector<f32> c(M * N);
  for (T& x : a) x = from_f32<T>(random_value());
  for (T& x : b) x = from_f32<T>(random_value());
  emulator::Session session;
  session.add("a", a.data(), a.size() * sizeof(T), emulator::Access::kInput);
  session.add("b", b.data(), b.size() * sizeof(T), emulator::Access::kInput);
  session.add("c", c.data(), c.size() * sizeof(f32), emulator::Access::kOutput);
  emulator::Options options;
  options.checked = true;
  emulator::set_options(options);
  emulator::reset_counters();
  const Status status =
      launch<Kernel>(Dim3{1}, nullptr, typename Kernel::Params{a.data(), b.data(), c.data()});
  EXPECT_THAT(status.ok(), status.message());
  EXPECT_THAT(session.unwritten("c").empty(), session.unwritten("c"));
  double worst = 0.0;
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) {
      double expected = 0.0, size = 0.0;
      for (int k = 0; k < K; ++k) {
        const double x = to_f32(Kernel::kATransposed ? a[static_cast<std::size_t>(k * M + m)]
                                                     : a[static_cast<std::size_t>(m * K + k)]);
        const double y = to_f32(B == LoadB::kRows ? b[static_cast<std::size_t>(n * K + k)]
                                                  : b[static_cast<std::size_t>(k * N + n)]);
        expected += x * y;
        size += std::fabs(x * y);
      }
      worst = std::fmax(worst, std::fabs(c[static_cast<std::size_t>(m * N + n)] - expected) / size);
    }
  }
  EXPECT_THAT(worst <= tolerance, "error " + std::to_string(worst * 1e6) + "e-6, allowed " +
                                      std::to_string(tolerance * 1e6) + "e-6");
  return emulator::counters();
}

void expect_no_conflicts(const emulator::Counters& c) {
  EXPECT(c.ldmatrix_conflicts == 0);
  EXPECT(c.shared_conflicts == 0);
}

template <typename T, int K>
void all_16_bit() {
  constexpr double kExact = 1e-6;  // products are exact: only f32 additions round
  expect_no_conflicts(check_product<T, 64, K, LoadA::kRows, LoadB::kRows>(kExact));
  expect_no_conflicts(check_product<T, K, 64, LoadA::kTransposed, LoadB::kTransposed>(kExact));
  expect_no_conflicts(check_product<T, K, 64, LoadA::kPacked, LoadB::kTransposed>(kExact));
  check_product<T, K, 64, LoadA::kAccumulator, LoadB::kTransposed>(kExact);
}

TEST(products_of_bf16) {
  all_16_bit<bf16, 16>();
  all_16_bit<bf16, 32>();
  all_16_bit<bf16, 48>();
  all_16_bit<bf16, 64>();
  all_16_bit<bf16, 80>();
  all_16_bit<bf16, 96>();
  all_16_bit<bf16, 128>();
  all_16_bit<bf16, 160>();
  all_16_bit<bf16, 192>();
  all_16_bit<bf16, 256>();
}

TEST(products_of_f16) {
  all_16_bit<f16, 32>();
  all_16_bit<f16, 96>();
  all_16_bit<f16, 128>();
}

template <int K, F32Products Products>
void all_f32(double tolerance) {
  expect_no_conflicts(check_product<f32, 64, K, LoadA::kRows, LoadB::kRows, Products>(tolerance));
  const auto transposed =
      check_product<f32, K, 64, LoadA::kTransposed, LoadB::kTransposed, Products>(tolerance);
  EXPECT(transposed.shared_conflicts == 0);
  check_product<f32, K, 64, LoadA::kPacked, LoadB::kTransposed, Products>(tolerance);
  check_product<f32, K, 64, LoadA::kAccumulator, LoadB::kTransposed, Products>(tolerance);
}

TEST(products_of_f32_as_tf32) {
  // 2^-11 for each of the two operands, at worst.
  all_f32<32, F32Products::kTf32>(1e-3);
  all_f32<96, F32Products::kTf32>(1e-3);
  all_f32<128, F32Products::kTf32>(1e-3);
}

TEST(products_of_f32_as_three_tf32) {
  all_f32<32, F32Products::kTf32x3>(2e-6);
  all_f32<64, F32Products::kTf32x3>(2e-6);
  all_f32<256, F32Products::kTf32x3>(2e-6);
}

// ---- writing an accumulator to a tile ----

template <typename T, int N>
struct StoreBack {
  static constexpr int kThreads = 32;
  static constexpr int kMinBlocks = 1;
  using Tile = SharedTile<T, 32, N>;
  struct Params {
    T* out;
  };
  static constexpr int smem_bytes(const Params&) { return Tile::kBytes; }
  static void run(const Params& p, Smem& smem) {
    const Tile t = Tile::take(smem);
    Accumulator<32, N> acc;
    acc.each(0, 0, [](f32& x, int row, int col, int, int) { x = static_cast<f32>(row * N + col); });
    store_accumulator(t, 0, 0, acc);
    sync_warp();
    for (int i = lane_index(); i < 32 * Tile::kChunks; i += 32) {
      const int row = i / Tile::kChunks, chunk = i % Tile::kChunks;
      global_store(p.out + row * N + chunk * Tile::kChunk,
                   shared_load<Tile::kChunk>(t.chunk(row, chunk)));
    }
  }
};

template <typename T, int N>
emulator::Counters check_store_back() {
  std::vector<T> out(32 * N);
  emulator::Options options;
  options.checked = true;
  emulator::set_options(options);
  emulator::reset_counters();
  const Status status =
      launch<StoreBack<T, N>>(Dim3{1}, nullptr, typename StoreBack<T, N>::Params{out.data()});
  EXPECT_THAT(status.ok(), status.message());
  for (int i = 0; i < 32 * N; ++i) {
    EXPECT(to_f32(out[static_cast<std::size_t>(i)]) == to_f32(from_f32<T>(static_cast<f32>(i))));
  }
  return emulator::counters();
}

TEST(accumulators_are_stored_and_read_back_without_conflicts) {
  expect_no_conflicts(check_store_back<bf16, 32>());
  expect_no_conflicts(check_store_back<bf16, 64>());
  expect_no_conflicts(check_store_back<bf16, 96>());
  expect_no_conflicts(check_store_back<f16, 128>());
  expect_no_conflicts(check_store_back<f16, 192>());
  expect_no_conflicts(check_store_back<f16, 256>());
  // 8-byte pairs of f32 collide two by two: known, and only used off the critical path.
  EXPECT(check_store_back<f32, 64>().shared_conflicts > 0);
}

// The counter itself: a column of a tile without swizzle meets one bank group.
struct Unswizzled {
  static constexpr int kThreads = 32;
  static constexpr int kMinBlocks = 1;
  struct Params {};
  static constexpr int smem_bytes(const Params&) { return 32 * 128; }
  static void run(const Params&, Smem& smem) {
    const Shared<bf16> s = smem.take<bf16>(32 * 64);
    const int lane = lane_index();
    for (int i = lane; i < 32 * 8; i += 32) shared_store(s + i * 8, Vec<bf16, 8>{});
    sync_warp();
    u32 reg[4];
    detail::load_matrices(reg, s + (lane % 8 + lane / 8 % 2 * 8) * 64 + lane / 16 * 8);
    shared_load(s.as<u32>() + lane * 32);
    sync_warp();
  }
};

TEST(conflicts_are_counted) {
  emulator::Options options;
  options.checked = true;
  emulator::set_options(options);
  emulator::reset_counters();
  const Status status = launch<Unswizzled>(Dim3{1}, nullptr, Unswizzled::Params{});
  EXPECT_THAT(status.ok(), status.message());
  EXPECT(emulator::counters().ldmatrix_conflicts == 4 * 7);
  EXPECT(emulator::counters().shared_accesses == 8 + 1);
  EXPECT(emulator::counters().shared_conflicts == 31);
}

}  // namespace
}  // namespace attention::tile

TEST_MAIN()
