// SPDX-License-Identifier: Apache-2.0
// Memory checks: races, missing waits, bounds, initialisation, write-once outputs. Each bug is
// planted and must be named.
#include <cmath>
#include <vector>

#include "tests/native/emulator/harness.h"

namespace attention::emulator {
namespace {

using tile::Shared;
using tile::Smem;
using tile::Vec;

std::string run64(const std::function<void(Smem&)>& body, int smem = 4096) {
  return run_kernel<64>(checked_options(), body, smem);
}

Options fast() { return Options(); }

// ---- races ----

TEST(hand_over_through_a_barrier_is_no_race) {
  const std::string report = run64([](Smem& smem) {
    const Shared<u32> s = smem.take<u32>(64);
    const int t = tile::thread_index();
    for (int round = 0; round < 3; ++round) {
      tile::shared_store(s + t, static_cast<u32>(t + round));
      tile::sync_block();
      EXPECT(tile::shared_load(s + (63 - t))[0] == static_cast<u32>(63 - t + round));
      tile::sync_block();
    }
  });
  EXPECT_THAT(report.empty(), report);
}

TEST(bug_missing_barrier_before_a_read) {
  for (Schedule schedule : {Schedule::kForward, Schedule::kReverse, Schedule::kRandom}) {
    Options o = checked_options();
    o.schedule = schedule;
    const std::string report = run_kernel<64>(
        o,
        [](Smem& smem) {
          const Shared<u32> s = smem.take<u32>(64);
          const int t = tile::thread_index();
          tile::shared_store(s + t, 0u);
          tile::sync_block();
          tile::shared_store(s + t, 1u);
          tile::shared_load(s + (t ^ 32));
        },
        1024);
    EXPECT_CONTAINS(report, "race");
  }
}

TEST(bug_missing_barrier_after_a_read) {
  const std::string report = run64([](Smem& smem) {
    const Shared<u32> s = smem.take<u32>(64);
    const int t = tile::thread_index();
    tile::shared_store(s + t, 1u);
    tile::sync_block();
    tile::shared_load(s + (t ^ 32));
    tile::shared_store(s + t, 2u);  // the other warp may not have read yet
  });
  EXPECT_CONTAINS(report, "race");
  EXPECT_CONTAINS(report, "without a barrier between");
}

TEST(bug_two_warps_write_one_place) {
  const std::string report = run64([](Smem& smem) {
    const Shared<u32> s = smem.take<u32>(64);
    tile::shared_store(s + tile::lane_index(), static_cast<u32>(tile::warp_index()));
  });
  EXPECT_CONTAINS(report, "race: write");
  EXPECT_CONTAINS(report, "written by warp 0");
}

TEST(lanes_of_a_warp_need_sync_warp) {
  const auto body = [](bool sync) {
    return [sync](Smem& smem) {
      const Shared<u32> s = smem.take<u32>(64);
      const int t = tile::thread_index();
      tile::shared_store(s + t, static_cast<u32>(t));
      if (sync) tile::sync_warp();
      EXPECT(!sync || tile::shared_load(s + (t ^ 1))[0] == static_cast<u32>(t ^ 1));
      if (!sync) tile::shared_load(s + (t ^ 1));
    };
  };
  EXPECT_THAT(run64(body(true)).empty(), "sync_warp orders the lanes of a warp");
  const std::string report = run64(body(false));
  EXPECT_THAT(!report.empty(), "a lane read what another wrote without sync_warp");
}

TEST(bug_sync_warp_does_not_order_two_warps) {
  const std::string report = run64([](Smem& smem) {
    const Shared<u32> s = smem.take<u32>(64);
    const int t = tile::thread_index();
    tile::shared_store(s + t, 1u);
    tile::sync_warp();
    if (t >= 32) tile::shared_load(s + (t - 32));
  });
  EXPECT_CONTAINS(report, "race: read");
}

TEST(neighbouring_16_bit_elements_are_separate) {
  const std::string report = run64([](Smem& smem) {
    const Shared<u16> s = smem.take<u16>(64);
    tile::shared_store(s + tile::thread_index(), u16{3});
  });
  EXPECT_THAT(report.empty(), report);
}

TEST(bug_ldmatrix_without_sync_after_stores) {
  const auto body = [](bool sync) {
    return [sync](Smem& smem) {
      using Tile = tile::SharedTile<tile::bf16, 16, 16>;
      Tile t = Tile::take(smem);
      const int lane = tile::lane_index();
      tile::shared_store(t.chunk(lane / 2, lane % 2), Vec<tile::bf16, 8>{});
      if (sync) tile::sync_warp();
      tile::load_a(t, 0, 0);
    };
  };
  const std::string good = run_kernel<32>(checked_options(), body(true), 512);
  EXPECT_THAT(good.empty(), good);
  EXPECT_CONTAINS(run_kernel<32>(checked_options(), body(false), 512), "race: read");
}

TEST(named_barriers_order_producer_and_consumer) {
  const auto body = [](bool wait_for_free) {
    return [wait_for_free](Smem& smem) {
      const Shared<u32> s = smem.take<u32>(32);
      const int lane = tile::lane_index();
      for (int i = 0; i < 3; ++i) {
        if (tile::warp_index() == 0) {
          if (i > 0 && wait_for_free) tile::named_sync(2, 64);
          tile::shared_store(s + lane, static_cast<u32>(i));
          tile::named_arrive(1, 64);
        } else {
          tile::named_sync(1, 64);
          EXPECT(!wait_for_free || tile::shared_load(s + (lane ^ 1))[0] == static_cast<u32>(i));
          if (!wait_for_free) tile::shared_load(s + (lane ^ 1));
          if (i < 2 && wait_for_free) tile::named_arrive(2, 64);
        }
      }
    };
  };
  const std::string good = run64(body(true));
  EXPECT_THAT(good.empty(), good);
  // The planted bug: the producer refills before the consumer has read (a stage released too
  // early).
  const std::string bad = run64(body(false));
  EXPECT_THAT(!bad.empty(), "a stage was written again before it was read");
}

// ---- asynchronous copies ----

struct CopyTest {
  std::vector<u32> data = std::vector<u32>(256);
  CopyTest() {
    for (u32 i = 0; i < 256; ++i) data[i] = i;
  }
  // Every thread copies 16 bytes in each of two groups, then waits as asked and reads what its
  // neighbour copied.
  std::string run(const Options& o, bool wait_all, bool barrier, int read_group, bool* poison) {
    return run_kernel<32>(
        o,
        [&](Smem& smem) {
          const Shared<u32> s = smem.take<u32>(256);
          const int t = tile::thread_index();
          for (int g = 0; g < 2; ++g) {
            const int at = g * 128 + t * 4;
            tile::async_copy<16>(s + at, &data[static_cast<std::size_t>(at)], 16);
            tile::async_commit();
          }
          if (wait_all) {
            tile::async_wait<0>();
          } else {
            tile::async_wait<1>();
          }
          if (barrier) tile::sync_block();
          const int at = read_group * 128 + (t ^ 1) * 4;
          const Vec<u32, 4> got = tile::shared_load<4>(s + at);
          if (got[0] == 0xffffffffu) *poison = true;
          if (!barrier || (!wait_all && read_group == 1)) {
            tile::async_wait<0>();
            return;
          }
          EXPECT(got[2] == static_cast<u32>(at + 2));
          tile::async_wait<0>();
        },
        1024);
  }
};

TEST(copies_are_there_after_wait_and_barrier) {
  CopyTest test;
  bool poison = false;
  std::string report = test.run(checked_options(), true, true, 1, &poison);
  EXPECT_THAT(report.empty(), report);
  report = test.run(checked_options(), false, true, 0, &poison);
  EXPECT_THAT(report.empty(), report);
  EXPECT(!poison);
}

TEST(bug_wait_allows_one_group_too_many) {
  CopyTest test;
  bool poison = false;
  EXPECT_CONTAINS(test.run(checked_options(), false, true, 1, &poison),
                  "which an asynchronous copy of warp 0 lane");
  // Without the checks the data itself shows it.
  const std::string report = test.run(fast(), false, true, 1, &poison);
  EXPECT_THAT(report.empty(), report);
  EXPECT(poison);
}

TEST(bug_wait_without_barrier) {
  CopyTest test;
  bool poison = false;
  EXPECT_THAT(!test.run(checked_options(), true, false, 1, &poison).empty(),
              "waiting covers a thread's own copies only");
}

TEST(bug_copy_is_never_waited_for) {
  u32 data[4] = {};
  const std::string report = run_kernel<32>(
      fast(),
      [&](Smem& smem) {
        const Shared<u32> s = smem.take<u32>(128);
        tile::async_copy<16>(s + tile::lane_index() * 4, data, 16);
        tile::async_commit();
      },
      512);
  EXPECT_CONTAINS(report, "returns with asynchronous copies in flight");
}

TEST(bug_copy_without_commit_is_not_covered_by_the_wait) {
  u32 data[4] = {};
  const std::string report = run_kernel<32>(
      fast(),
      [&](Smem& smem) {
        const Shared<u32> s = smem.take<u32>(128);
        tile::async_copy<16>(s + tile::lane_index() * 4, data, 16);
        tile::async_wait<0>();
      },
      512);
  EXPECT_CONTAINS(report, "in flight");
}

TEST(copies_read_their_source_as_late_as_the_wait) {
  u32 data[4] = {1, 2, 3, 4};
  const std::string report = run_kernel<32>(
      fast(),
      [&](Smem& smem) {
        const Shared<u32> s = smem.take<u32>(128);
        tile::async_copy<16>(s + tile::lane_index() * 4, data, 16);
        tile::async_commit();
        data[0] = 9;
        tile::async_wait<0>();
        EXPECT(tile::shared_load(s + tile::lane_index() * 4)[0] == 9);
      },
      512);
  EXPECT_THAT(report.empty(), report);
}

TEST(copies_fill_with_zeros) {
  alignas(16) u32 data[4] = {1, 2, 3, 4};
  const std::string report = run_kernel<32>(
      checked_options(),
      [&](Smem& smem) {
        const Shared<u32> s = smem.take<u32>(512);
        const int at = tile::lane_index() * 16;
        tile::async_copy<16>(s + at, data, 8);
        tile::async_copy_or_zero<16>(s + at + 4, data, false);
        tile::async_copy<8>(s + at + 8, data + 2, 8);
        tile::async_copy<4>(s + at + 12, data + 1, 4);
        tile::async_commit();
        tile::async_wait<0>();
        const Vec<u32, 4> a = tile::shared_load<4>(s + at), b = tile::shared_load<4>(s + at + 4);
        EXPECT(a[0] == 1 && a[1] == 2 && a[2] == 0 && a[3] == 0);
        EXPECT(b[0] == 0 && b[3] == 0);
        const Vec<u32, 2> c = tile::shared_load<2>(s + at + 8);
        EXPECT(c[0] == 3 && c[1] == 4 && tile::shared_load(s + at + 12)[0] == 2);
      },
      2048);
  EXPECT_THAT(report.empty(), report);
}

TEST(bug_misaligned_accesses) {
  alignas(16) u32 data[8] = {};
  EXPECT_CONTAINS(run_kernel<32>(fast(), [&](Smem&) { tile::global_load<4>(data + 1); }),
                  "misaligned global load of 16 bytes");
  EXPECT_CONTAINS(run_kernel<32>(
                      fast(), [&](Smem& s) { tile::shared_load<2>(s.take<u32>(4) + 1); }, 128),
                  "misaligned shared load of 8 bytes");
  EXPECT_CONTAINS(
      run_kernel<32>(
          fast(), [&](Smem& s) { tile::async_copy<16>(s.take<u32>(8), data + 1, 16); }, 128),
      "misaligned asynchronous copy from global memory");
}

// ---- shared memory bounds and initialisation ----

TEST(shared_memory_starts_as_nan) {
  const std::string report = run_kernel<32>(
      fast(),
      [&](Smem& smem) {
        EXPECT(std::isnan(tile::shared_load(smem.take<f32>(32) + tile::lane_index())[0]));
        EXPECT(std::isnan(
            tile::to_f32(tile::shared_load(smem.take<tile::bf16>(32) + tile::lane_index())[0])));
        EXPECT(std::isnan(
            tile::to_f32(tile::shared_load(smem.take<tile::f16>(32) + tile::lane_index())[0])));
      },
      384);
  EXPECT_THAT(report.empty(), report);
}

TEST(bug_read_of_uninitialised_shared_memory) {
  EXPECT_CONTAINS(run64([](Smem& smem) { tile::shared_load(smem.take<u32>(64)); }),
                  "read of uninitialised shared memory: byte 0 of take 0 (256 bytes)");
}

TEST(bug_store_past_the_end_of_a_take) {
  EXPECT_CONTAINS(run64([](Smem& smem) {
                    const Shared<u32> s = smem.take<u32>(64);
                    tile::shared_store(s + tile::thread_index() + 1, 0u);
                  }),
                  "out of bounds: it touches 0 bytes past the end of take 0 (256 bytes)");
  // A take of 65 words is followed by padding that belongs to nobody.
  EXPECT_CONTAINS(run64([](Smem& smem) {
                    const Shared<u32> s = smem.take<u32>(65);
                    if (tile::thread_index() == 0) tile::shared_store(s + 65, 0u);
                  }),
                  "out of bounds");
}

TEST(bug_store_from_one_stage_into_the_next) {
  EXPECT_CONTAINS(run64([](Smem& smem) {
                    const auto ring = tile::Ring<u32>::take(smem, 2, 64);
                    tile::shared_store(ring[0] + 64 + tile::thread_index(), 0u);
                  }),
                  "out of bounds");
}

#if !defined(__SANITIZE_ADDRESS__)  // which stops at the store itself
TEST(bug_damaged_red_zone_is_noticed_without_checks) {
  const std::string report = run_kernel<32>(
      fast(),
      [&](Smem& smem) {
        const Shared<u32> s = smem.take<u32>(64);
        if (tile::lane_index() == 0) tile::shared_store(s + 64, 0u);
      },
      256);
  EXPECT_CONTAINS(report, "shared memory damaged: 0 bytes past the end of take 0");
}
#endif

TEST(bug_more_shared_memory_taken_than_asked_for) {
  EXPECT_CONTAINS(run_kernel<32>(
                      fast(), [](Smem& smem) { smem.take<u32>(65); }, 256),
                  "384 bytes taken, smem_bytes() is 256");
}

TEST(bug_threads_take_different_sizes) {
  EXPECT_CONTAINS(run64([](Smem& smem) { smem.take<u32>(tile::thread_index() == 9 ? 8 : 16); }),
                  "take number 0 of shared memory has 32 bytes in this thread and 64 in another");
}

// ---- global memory ----

TEST(outputs_are_written_once_and_completely) {
  std::vector<u32> in(64, 7), out(64);
  Session session;
  session.add("in", in.data(), 256, Access::kInput);
  session.add("out", out.data(), 256, Access::kOutput);
  const std::string report = run64([&](Smem&) {
    const auto t = static_cast<std::size_t>(tile::thread_index());
    if (t != 13) tile::global_store(&out[t], tile::global_load_constant(&in[t])[0]);
  });
  EXPECT_THAT(report.empty(), report);
  EXPECT_CONTAINS(session.unwritten("out"), "out: byte 52 of 256 was never written");
  const std::string again = run64([&](Smem&) {
    if (tile::thread_index() == 13) tile::global_store(&out[13], 7u);
  });
  EXPECT_THAT(again.empty(), again);
  EXPECT(session.unwritten("out").empty());
}

TEST(bug_output_written_twice) {
  std::vector<u32> out(64);
  Session session;
  session.add("out", out.data(), 256, Access::kOutput);
  EXPECT_CONTAINS(run64([&](Smem&) {
                    tile::global_store(&out[static_cast<std::size_t>(tile::lane_index())], 0u);
                  }),
                  "of out is written twice");
}

TEST(bug_access_outside_every_buffer) {
  std::vector<u32> in(65);
  Session session;
  session.add("in", in.data(), 256, Access::kInput);
  EXPECT_CONTAINS(
      run64([&](Smem&) {
        tile::global_load_constant(&in[static_cast<std::size_t>(tile::thread_index()) + 1]);
      }),
      "outside every registered buffer: it starts at byte 256 of in, which has 256");
}

TEST(bug_write_to_an_input_and_read_of_an_output) {
  std::vector<u32> in(64), out(64);
  Session session;
  session.add("in", in.data(), 256, Access::kInput);
  session.add("out", out.data(), 256, Access::kOutput);
  EXPECT_CONTAINS(run64([&](Smem&) { tile::global_store(&in[0], 0u); }), "which is an input");
  EXPECT_CONTAINS(run64([&](Smem&) { tile::global_load(&out[0]); }), "which is an output");
}

TEST(bug_workspace_read_before_it_is_written) {
  std::vector<u32> work(64);
  Session session;
  session.add("work", work.data(), 256, Access::kWorkspace);
  EXPECT_CONTAINS(run64([&](Smem&) { tile::global_load(&work[1]); }),
                  "read of byte 4 of work, which nothing has written");
  EXPECT_CONTAINS(
      run64([&](Smem&) {
        tile::global_store(&work[static_cast<std::size_t>(tile::thread_index())], 0u);
        tile::global_load_constant(&work[static_cast<std::size_t>(tile::thread_index())]);
      }),
      "which the same grid has written");
  EXPECT(zero_async(nullptr, work.data(), 256).ok());
  // What an earlier launch wrote may be read either way.
  const std::string report = run64([&](Smem&) {
    tile::global_load(&work[1]);
    tile::global_load_constant(&work[1]);
  });
  EXPECT_THAT(report.empty(), report);
}

}  // namespace
}  // namespace attention::emulator

TEST_MAIN()
