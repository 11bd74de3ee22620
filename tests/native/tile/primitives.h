// SPDX-License-Identifier: Apache-2.0
// One small kernel for each primitive of the tile layer, in a form that is the same on the GPU and
// on the emulator: words in, words out. conformance.py says what each must give.
//
// Thread t of block b reads its i-th word at in[(b * kIn + i) * kThreads + t] and writes likewise.
#pragma once

#include "kernels/cuda/tile/tile.h"

namespace attention::conformance {

using namespace tile;

// Words of one thread.
template <int Threads, int In, int Out>
class Words {
 public:
  ATTENTION_DEVICE Words(const u32* in, u32* out)
      : in_(in + static_cast<int>(block_index().x) * In * Threads + thread_index()),
        out_(out + static_cast<int>(block_index().x) * Out * Threads + thread_index()) {}
  ATTENTION_DEVICE u32 get(int i) const { return global_load_constant(in_ + i * Threads)[0]; }
  ATTENTION_DEVICE f32 get_f32(int i) const { return bits_to_f32(get(i)); }
  ATTENTION_DEVICE void put(int i, u32 x) const { global_store(out_ + i * Threads, x); }
  ATTENTION_DEVICE void put_f32(int i, f32 x) const { put(i, f32_to_bits(x)); }

 private:
  const u32* in_;
  u32* out_;
};

// A primitive P has kThreads, kBlocks, kIn, kOut (words a thread), kSmem (bytes) and run(words,
// params, smem).
template <typename P>
struct Conformance {
  static constexpr int kThreads = P::kThreads;
  static constexpr int kMinBlocks = 1;
  struct Params {
    const u32* in;
    u32* out;
    u32* counters;  // kCounters zeros
  };
  static constexpr int kCounters = 16;
  static ATTENTION_HOST_DEVICE int smem_bytes(const Params&) { return P::kSmem; }
  static ATTENTION_DEVICE void run(const Params& p, Smem& smem) {
    P::run(Words<kThreads, P::kIn, P::kOut>(p.in, p.out), p.counters, smem);
  }
};

// ---- mma ----

// In: a (4 registers), two b (2 each), two c (4 floats each). Out: two d.
template <typename T, F32Products Products>
struct Mma {
  static constexpr int kThreads = 32, kBlocks = 8, kIn = 16, kOut = 8, kSmem = 0;
  template <typename W>
  static ATTENTION_DEVICE void run(const W& w, u32*, Smem&) {
    AFragment<T> a;
    BFragment<T> b[2];
    AccBlock d[2];
    ATTENTION_UNROLL
    for (int i = 0; i < 4; ++i) a.reg[i] = w.get(i);
    ATTENTION_UNROLL
    for (int i = 0; i < 4; ++i) b[i / 2].reg[i % 2] = w.get(4 + i);
    ATTENTION_UNROLL
    for (int i = 0; i < 8; ++i) d[i / 4].c[i % 4] = w.get_f32(8 + i);
    mma<Products>(d, a, b);
    ATTENTION_UNROLL
    for (int i = 0; i < 8; ++i) w.put_f32(i, d[i / 4].c[i % 4]);
  }
};

// ---- loads of matrices ----

// In: 8 words of shared memory a thread (word i of thread t at 8 t + i), then a row number (of 16
// bytes). Out: 4 registers.
template <bool Transposed>
struct Ldmatrix {
  static constexpr int kThreads = 32, kBlocks = 4, kIn = 9, kOut = 4, kSmem = 1024;
  template <typename W>
  static ATTENTION_DEVICE void run(const W& w, u32*, Smem& smem) {
    const Shared<u32> s = smem.take<u32>(256);
    for (int i = 0; i < 8; ++i) shared_store(s + 8 * thread_index() + i, w.get(i));
    sync_block();
    u32 reg[4];
    const Shared<u32> row = s + 4 * static_cast<int>(w.get(8));
    if constexpr (Transposed) {
      tile::detail::load_matrices_transposed(reg, row.as<bf16>());
    } else {
      tile::detail::load_matrices(reg, row);
    }
    for (int i = 0; i < 4; ++i) w.put(i, reg[i]);
  }
};

enum class Operand { kA, kB, kATransposed, kBTransposed, kAPacked };

// In: a 32 x Cols tile, row-major, word i of thread t at 32 i + t. Out: the registers of the
// operand whose first element is (16, 16): 4 registers of A or two B.
template <typename T, int Cols, Operand Which>
struct LoadOperand {
  using Tile = SharedTile<T, 32, Cols>;
  static constexpr int kRowWords = Cols * static_cast<int>(sizeof(T)) / 4;
  static constexpr int kThreads = 32, kBlocks = 2, kIn = kRowWords, kOut = 4, kSmem = Tile::kBytes;
  template <typename W>
  static ATTENTION_DEVICE void run(const W& w, u32*, Smem& smem) {
    const Tile tile = Tile::take(smem);
    for (int i = 0; i < kRowWords; ++i) {
      const int word = 32 * i + thread_index();
      const int col = word % kRowWords * (4 / static_cast<int>(sizeof(T)));
      shared_store(tile.at(word / kRowWords, col).template as<u32>(), w.get(i));
    }
    sync_block();
    u32 reg[4];
    if constexpr (Which == Operand::kA || Which == Operand::kATransposed ||
                  Which == Operand::kAPacked) {
      const auto put = [&](const auto& a) {
        for (int i = 0; i < 4; ++i) reg[i] = a.reg[i];
      };
      if constexpr (Which == Operand::kA) put(load_a(tile, 16, 16));
      if constexpr (Which == Operand::kATransposed) put(load_a_transposed(tile, 16, 16));
      if constexpr (Which == Operand::kAPacked) put(load_a_packed(tile, 16, 16));
    } else if constexpr (Which == Operand::kB) {
      BFragment<T> b[2];
      load_b(b, tile, 16, 16);
      for (int i = 0; i < 4; ++i) reg[i] = b[i / 2].reg[i % 2];
    } else {
      BFragment<T, kPackedOrder<T>> b[2];
      load_b_transposed(b, tile, 16, 16);
      for (int i = 0; i < 4; ++i) reg[i] = b[i / 2].reg[i % 2];
    }
    for (int i = 0; i < 4; ++i) w.put(i, reg[i]);
  }
};

// In: the 8 slots of a 16 x 16 accumulator. Out: the A operand that it packs to (4 registers; for
// f32 the first k block), then the tile it was stored to, row-major: 16 x 16 elements, word i of
// thread t at 32 i + t.
template <typename T>
struct PackAndStore {
  using Tile = SharedTile<T, 16, 16>;
  static constexpr int kTileWords = 16 * 16 * static_cast<int>(sizeof(T)) / 4 / 32;
  static constexpr int kThreads = 32, kBlocks = 2, kIn = 8, kOut = 4 + kTileWords,
                       kSmem = Tile::kBytes;
  template <typename W>
  static ATTENTION_DEVICE void run(const W& w, u32*, Smem& smem) {
    const Tile tile = Tile::take(smem);
    Accumulator<16, 16> acc;
    ATTENTION_UNROLL
    for (int i = 0; i < 8; ++i) acc.at(i / 4, i % 4) = w.get_f32(i);
    const auto a = pack_a<T>(acc, 0, 0);
    ATTENTION_UNROLL
    for (int i = 0; i < 4; ++i) w.put(i, a.reg[i]);
    store_accumulator(tile, 0, 0, acc);
    sync_block();
    constexpr int kRowWords = 16 * static_cast<int>(sizeof(T)) / 4;
    for (int i = 0; i < kTileWords; ++i) {
      const int word = 32 * i + thread_index();
      const int col = word % kRowWords * (4 / static_cast<int>(sizeof(T)));
      w.put(4 + i, shared_load(tile.at(word / kRowWords, col).template as<u32>())[0]);
    }
  }
};

// ---- copies ----

// In: 4 words of data (read by the copy from global memory), then the number of valid bytes. Out:
// what arrived, 4 words.
template <int Bytes>
struct AsyncCopy {
  static constexpr int kThreads = 64, kBlocks = 2, kIn = 1, kOut = 4, kSmem = 64 * 16;
  template <typename W>
  static ATTENTION_DEVICE void run(const W& w, u32* counters, Smem& smem) {
    // The source is 16 aligned words that the launcher fills: counters[i] = 0x01010101 * (i + 1).
    const Shared<u32> s = smem.take<u32>(64 * 4);
    const Shared<u32> mine = s + 4 * thread_index();
    shared_store(mine, Vec<u32, 4>{{7, 7, 7, 7}});
    sync_block();
    const u32* from = counters + 4 * (thread_index() % 4);
    async_copy<Bytes>(mine, from, static_cast<int>(w.get(0)));
    async_commit();
    // Two copies to one place would race, so the 16-byte form has no second one.
    if constexpr (Bytes < 16) async_copy_or_zero<4>(mine + 3, from, false);
    async_commit();
    async_wait<1>();
    async_wait<0>();
    sync_block();
    const Vec<u32, 4> got = shared_load<4>(s + 4 * (thread_index() ^ 1));
    for (int i = 0; i < 4; ++i) w.put(i, got[i]);
  }
};

// Loads and stores of 1, 2, 4, 8 and 16 bytes, global and shared. In and out: 16 words.
struct VectorAccess {
  static constexpr int kThreads = 32, kBlocks = 1, kIn = 4, kOut = 4, kSmem = 32 * 16;
  template <typename W>
  static ATTENTION_DEVICE void run(const W& w, u32*, Smem& smem) {
    const Shared<u32> s = smem.take<u32>(32 * 4);
    const Shared<u32> mine = s + 4 * thread_index();
    shared_store(mine, Vec<u32, 2>{{w.get(0), w.get(1)}});
    shared_store((mine + 2).as<u16>(), static_cast<u16>(w.get(2)));
    shared_store((mine + 2).as<u16>() + 1, static_cast<u16>(w.get(2) >> 16));
    for (int i = 0; i < 4; ++i)
      shared_store((mine + 3).as<u8>() + i, static_cast<u8>(w.get(3) >> 8 * i));
    sync_block();
    const Vec<u16, 8> got = shared_load<8>((s + 4 * (thread_index() ^ 2)).as<u16>());
    for (int i = 0; i < 4; ++i) w.put(i, got[2 * i] | static_cast<u32>(got[2 * i + 1]) << 16);
  }
};

// ---- warp functions ----

// In: a word, a source lane. Out: shuffle_xor by 1, 2, 4, 8, 16; shuffle; ballot of the lowest bit;
// any; all; and as floats the sums and maxima of quads, warp and columns.
struct WarpFunctions {
  static constexpr int kThreads = 64, kBlocks = 4, kIn = 2, kOut = 14, kSmem = 0;
  template <typename W>
  static ATTENTION_DEVICE void run(const W& w, u32*, Smem&) {
    const u32 x = w.get(0);
    for (int i = 0; i < 5; ++i) w.put(i, shuffle_xor(x, 1 << i));
    w.put(5, shuffle(x, static_cast<int>(w.get(1))));
    w.put(6, ballot((x & 1u) != 0));
    w.put(7, any_in_warp(x % 37u == 0));
    w.put(8, all_in_warp(x % 37u != 0));
    // Small integers: every order of additions gives the same sum.
    const f32 f = static_cast<f32>(static_cast<i32>(x % 2001u) - 1000);
    w.put_f32(9, quad_sum(f));
    w.put_f32(10, quad_max(f));
    w.put_f32(11, warp_sum(f));
    w.put_f32(12, warp_max(f));
    w.put_f32(13, column_sum(f));
  }
};

// In: a word. Out: sync_block_or of (word == 5), indices, and a hand-over between two warps through
// named barriers.
struct Barriers {
  static constexpr int kThreads = 64, kBlocks = 6, kIn = 1, kOut = 6, kSmem = 128;
  template <typename W>
  static ATTENTION_DEVICE void run(const W& w, u32*, Smem& smem) {
    const Shared<u32> s = smem.take<u32>(32);
    const int lane = lane_index();
    w.put(0, sync_block_or(w.get(0) == 5u));
    w.put(1, static_cast<u32>(thread_index()));
    w.put(2, static_cast<u32>(warp_index()));
    w.put(3, block_index().x + 100u * block_index().y);
    w.put(4, grid_size().x);
    u32 seen = w.get(0);
    for (int i = 0; i < 3; ++i) {
      if (warp_index() == 0) {
        if (i > 0) named_sync(2, 64);
        shared_store(s + lane, w.get(0) + static_cast<u32>(i));
        named_arrive(1, 64);
      } else {
        named_sync(1, 64);
        seen = seen * 3u + shared_load(s + (lane ^ 3))[0];
        if (i < 2) named_arrive(2, 64);
      }
    }
    w.put(5, seen);
  }
};

// In: a word. Out: in the last block to arrive, the sum of all blocks' words of this lane (else 0);
// the ticket of the block (the same in all threads) replaced by its number of distinct values; the
// order of turns.
struct BetweenBlocks {
  static constexpr int kThreads = 64, kBlocks = 40, kIn = 1, kOut = 3, kSmem = 128;
  template <typename W>
  static ATTENTION_DEVICE void run(const W& w, u32* counters, Smem& smem) {
    const u32 ticket = take_ticket(counters, smem.take<u32>(1));
    // counters[3] is a chain: the first warp of each block in turn maps x to 3 x + ticket.
    if (warp_index() == 0) {
      wait_turn(counters + 1, ticket);
      const u32 chain = global_load(counters + 3)[0] * 3u + ticket;
      sync_warp();
      if (lane_index() == 0) global_store(counters + 3, chain);
      signal_turn(counters + 1, ticket + 1);
    }
    if (thread_index() < 8) atomic_add(counters + 4 + thread_index(), w.get(0));
    const bool last = last_block_arrives(counters + 2, kBlocks);
    w.put(0, last ? 1u : 0u);
    w.put(1, last ? global_load(counters + 3)[0] : 0u);
    w.put(2, last && thread_index() < 8 ? global_load(counters + 4 + thread_index())[0] : 0u);
  }
};

// ---- arithmetic ----

// In: two floats. Out: bf16 and f16 of the first, both packed, back to f32, tf32.
struct Conversions {
  static constexpr int kThreads = 128, kBlocks = 64, kIn = 2, kOut = 8, kSmem = 0;
  template <typename W>
  static ATTENTION_DEVICE void run(const W& w, u32*, Smem&) {
    const f32 x = w.get_f32(0), y = w.get_f32(1);
    w.put(0, from_f32<bf16>(x).bits);
    w.put(1, from_f32<f16>(x).bits);
    w.put(2, pack2<bf16>(x, y));
    w.put(3, pack2<f16>(x, y));
    w.put_f32(4, to_f32(bf16{static_cast<u16>(w.get(0))}));
    w.put_f32(5, unpack_low<f16>(w.get(0)));
    w.put_f32(6, unpack_high<f16>(w.get(0)));
    w.put(7, round_tf32(x));
  }
};

// In: three floats. Out: exp2, log2(|x|), tanh, fma, max, min, |x|.
struct Functions {
  static constexpr int kThreads = 128, kBlocks = 64, kIn = 3, kOut = 7, kSmem = 0;
  template <typename W>
  static ATTENTION_DEVICE void run(const W& w, u32*, Smem&) {
    const f32 x = w.get_f32(0), y = w.get_f32(1), z = w.get_f32(2);
    w.put_f32(0, exp2_approx(x));
    w.put_f32(1, log2_approx(abs_f32(x)));
    w.put_f32(2, tanh_accurate(x));
    w.put_f32(3, tile::fma(x, y, z));
    w.put_f32(4, max_f32(x, y));
    w.put_f32(5, min_f32(x, y));
    w.put_f32(6, abs_f32(x));
  }
};

// AsyncCopy reads its source from where the others have their counters.
template <typename P>
inline constexpr bool kCountersHoldPattern = false;
template <int Bytes>
inline constexpr bool kCountersHoldPattern<AsyncCopy<Bytes>> = true;

// name, type. The order is the number in the C interface.
#define ATTENTION_FOR_EACH_PRIMITIVE(X)                                 \
  X(mma_bf16, Mma<bf16, F32Products::kTf32>)                            \
  X(mma_f16, Mma<f16, F32Products::kTf32>)                              \
  X(mma_tf32, Mma<f32, F32Products::kTf32>)                             \
  X(mma_tf32x3, Mma<f32, F32Products::kTf32x3>)                         \
  X(ldmatrix, Ldmatrix<false>)                                          \
  X(ldmatrix_trans, Ldmatrix<true>)                                     \
  X(load_a_16, LoadOperand<bf16, 32, Operand::kA>)                      \
  X(load_b_16, LoadOperand<bf16, 96, Operand::kB>)                      \
  X(load_a_transposed_16, LoadOperand<bf16, 64, Operand::kATransposed>) \
  X(load_b_transposed_16, LoadOperand<bf16, 64, Operand::kBTransposed>) \
  X(load_a_packed_16, LoadOperand<bf16, 64, Operand::kAPacked>)         \
  X(load_a_32, LoadOperand<f32, 32, Operand::kA>)                       \
  X(load_b_32, LoadOperand<f32, 64, Operand::kB>)                       \
  X(load_a_transposed_32, LoadOperand<f32, 32, Operand::kATransposed>)  \
  X(load_b_transposed_32, LoadOperand<f32, 64, Operand::kBTransposed>)  \
  X(load_a_packed_32, LoadOperand<f32, 64, Operand::kAPacked>)          \
  X(pack_store_bf16, PackAndStore<bf16>)                                \
  X(pack_store_f16, PackAndStore<f16>)                                  \
  X(pack_store_f32, PackAndStore<f32>)                                  \
  X(async_copy_16, AsyncCopy<16>)                                       \
  X(async_copy_8, AsyncCopy<8>)                                         \
  X(async_copy_4, AsyncCopy<4>)                                         \
  X(vector_access, VectorAccess)                                        \
  X(warp_functions, WarpFunctions)                                      \
  X(barriers, Barriers)                                                 \
  X(between_blocks, BetweenBlocks)                                      \
  X(conversions, Conversions)                                           \
  X(functions, Functions)

}  // namespace attention::conformance
