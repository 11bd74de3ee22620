// SPDX-License-Identifier: Apache-2.0
// Scheduling: barriers, divergence, deadlocks, waits between blocks. Each class of bug is planted
// and must be named.
#include <atomic>
#include <vector>

#include "tests/native/emulator/harness.h"

namespace attention::emulator {
namespace {

using tile::Smem;

std::vector<Options> schedules() {
  std::vector<Options> all;
  for (Schedule schedule : {Schedule::kForward, Schedule::kReverse, Schedule::kRandom}) {
    for (bool reverse : {false, true}) {
      for (int threads : {1, 2}) {
        Options o = checked_options();
        o.schedule = schedule;
        o.reverse_blocks = reverse;
        o.host_threads = threads;
        o.seed = 17;
        all.push_back(o);
      }
    }
  }
  return all;
}

TEST(every_thread_of_every_block_runs_once) {
  for (const Options& o : schedules()) {
    std::vector<std::atomic<int>> runs(7 * 96);
    const std::string report = run_kernel<96>(
        o,
        [&](Smem&) {
          const u32 block = tile::block_index().x;
          EXPECT(tile::grid_size().x == 7);
          ++runs[block * 96 + static_cast<u32>(tile::thread_index())];
        },
        0, 7);
    EXPECT_THAT(report.empty(), report);
    for (const auto& n : runs) EXPECT(n == 1);
  }
}

struct CountBlocks {
  static constexpr int kThreads = 32;
  static constexpr int kMinBlocks = 1;
  struct Params {
    int* seen;
  };
  static int smem_bytes(const Params&) { return 0; }
  static void run(const Params& p, Smem&) {
    const Dim3 b = tile::block_index();
    if (tile::thread_index() == 0) p.seen[b.x + 2 * (b.y + 3 * b.z)] += 1;
  }
};

TEST(a_three_dimensional_grid_is_walked_completely) {
  set_options(Options());
  int seen[24] = {};
  const Status status = launch<CountBlocks>(Dim3{2, 3, 4}, nullptr, CountBlocks::Params{seen});
  EXPECT_THAT(status.ok(), status.message());
  for (int n : seen) EXPECT(n == 1);
}

TEST(empty_and_oversized_grids) {
  const std::function<void(Smem&)> body = [](Smem&) { EXPECT(false); };
  const Scripted<32>::Params params{&body, 0};
  EXPECT(launch<Scripted<32>>(Dim3{0, 1, 1}, nullptr, params).ok());
  const Status status = launch<Scripted<32>>(Dim3{1, 65536, 1}, nullptr, params);
  EXPECT_CONTAINS(status.message(), "y and z up to 65535");
}

TEST(barriers_hold_back_every_warp) {
  for (const Options& o : schedules()) {
    int before = 0, after = 0;
    Options one = o;
    one.host_threads = 1;
    const std::string report = run_kernel<128>(one, [&](Smem&) {
      for (int round = 1; round <= 5; ++round) {
        ++before;
        tile::sync_block();
        EXPECT(before == round * 128);
        ++after;
        tile::sync_block();
        EXPECT(after == round * 128);
      }
    });
    EXPECT_THAT(report.empty(), report);
  }
}

TEST(barrier_or_broadcasts_a_predicate) {
  const std::string report = run_kernel<64>(checked_options(), [&](Smem&) {
    EXPECT(tile::sync_block_or(tile::thread_index() == 37));
    EXPECT(!tile::sync_block_or(false));
  });
  EXPECT_THAT(report.empty(), report);
}

TEST(named_barriers_hand_over_between_warps) {
  for (const Options& o : schedules()) {
    Options one = o;
    one.host_threads = 1;
    int produced = 0;
    const std::string report = run_kernel<64>(one, [&](Smem&) {
      for (int i = 1; i <= 4; ++i) {
        if (tile::warp_index() == 0) {
          ++produced;
          tile::named_arrive(1, 64);
          tile::named_sync(2, 64);
        } else {
          tile::named_sync(1, 64);
          EXPECT(produced == 32 * i);
          tile::named_arrive(2, 64);
        }
      }
    });
    EXPECT_THAT(report.empty(), report);
  }
}

TEST(shuffles_votes_and_reductions) {
  for (const Options& o : schedules()) {
    const std::string report = run_kernel<64>(o, [&](Smem&) {
      const int lane = tile::lane_index();
      EXPECT(tile::shuffle_xor(static_cast<u32>(lane), 5) == static_cast<u32>(lane ^ 5));
      EXPECT(tile::shuffle(lane + 100, 7) == 107);
      EXPECT(tile::ballot(lane % 3 == 0) == 0x49249249u);
      EXPECT(tile::any_in_warp(lane == 31) && !tile::all_in_warp(lane == 31));
      EXPECT(tile::warp_sum(static_cast<f32>(lane)) == 496.0f);
      EXPECT(tile::warp_max(static_cast<f32>((lane * 7) % 32)) == 31.0f);
      EXPECT(tile::quad_sum(static_cast<f32>(lane)) == static_cast<f32>(4 * (lane / 4 * 4) + 6));
      EXPECT(tile::quad_max(static_cast<f32>(-lane)) == static_cast<f32>(-(lane / 4 * 4)));
      EXPECT(tile::column_sum(static_cast<f32>(lane)) == static_cast<f32>(8 * (lane % 4) + 112));
    });
    EXPECT_THAT(report.empty(), report);
  }
}

// ---- planted bugs ----

TEST(bug_lane_returns_before_a_collective) {
  for (const Options& o : schedules()) {
    const std::string report = run_kernel<64>(o, [](Smem&) {
      if (tile::thread_index() == 35) return;
      tile::shuffle_xor(1.0f, 1);
    });
    EXPECT_CONTAINS(report, "deadlock");
    EXPECT_CONTAINS(report,
                    "warp 1: lanes 0xfffffff7 wait at a shuffle, lanes 0x00000008 have returned");
  }
}

TEST(bug_mixed_collectives_in_one_warp) {
  const std::string report = run_kernel<32>(checked_options(), [](Smem&) {
    if (tile::lane_index() < 16) {
      tile::ballot(true);
    } else {
      tile::shuffle_xor(1u, 1);
    }
  });
  EXPECT_CONTAINS(report, "divergence: lanes 0x0000ffff are at a vote, this lane at a shuffle");
  EXPECT_CONTAINS(report, "block (0, 0, 0), warp 0, lane 16");
}

TEST(bug_warp_skips_a_barrier) {
  const std::string report = run_kernel<96>(checked_options(), [](Smem&) {
    if (tile::warp_index() != 1) tile::sync_block();
  });
  EXPECT_CONTAINS(report, "deadlock");
  EXPECT_CONTAINS(report, "warp 0: waits at barrier 0, where 64 of 96 threads arrived");
}

TEST(bug_barriers_with_different_counts) {
  const std::string report = run_kernel<64>(
      checked_options(), [](Smem&) { tile::named_sync(1, tile::warp_index() == 0 ? 64 : 32); });
  EXPECT_CONTAINS(report, "barrier 1: this warp counts 32 threads, others count 64");
}

TEST(bug_impossible_barrier) {
  EXPECT_CONTAINS(run_kernel<32>(checked_options(), [](Smem&) { tile::named_sync(16, 32); }),
                  "ids are 0 to 15");
  EXPECT_CONTAINS(run_kernel<64>(checked_options(), [](Smem&) { tile::named_sync(1, 33); }),
                  "threads a multiple of 32");
}

// ---- between blocks ----

TEST(the_last_block_to_arrive_sees_all_others) {
  for (const Options& o : schedules()) {
    u32 counter = 0;
    std::vector<int> partial(9, 0);
    std::atomic<int> combined{0};
    const std::string report = run_kernel<64>(
        o,
        [&](Smem&) {
          const u32 b = tile::block_index().x;
          if (tile::thread_index() == 0) tile::global_store(&partial[b], static_cast<int>(b) + 1);
          if (tile::last_block_arrives(&counter, 9) && tile::thread_index() == 0) {
            int sum = 0;
            for (int& x : partial) sum += tile::global_load(&x)[0];
            combined += sum;
          }
        },
        0, 9);
    EXPECT_THAT(report.empty(), report);
    EXPECT(combined == 45);
  }
}

TEST(turns_are_taken_in_order_whatever_the_schedule) {
  for (const Options& o : schedules()) {
    u32 ticket = 0, turn = 0;
    std::vector<u32> order;
    const std::string report = run_kernel<64>(
        o,
        [&](Smem& smem) {
          const u32 mine = tile::take_ticket(&ticket, smem.take<u32>(1));
          // A turn is of a warp: the other one has nothing to hand over.
          if (tile::warp_index() != 0) return;
          tile::wait_turn(&turn, mine);
          if (tile::thread_index() == 0) order.push_back(mine);
          tile::signal_turn(&turn, mine + 1);
        },
        128, 20);
    EXPECT_THAT(report.empty(), report);
    EXPECT(order.size() == 20);
    for (u32 i = 0; i < order.size(); ++i) EXPECT(order[i] == i);
  }
}

TEST(blocks_may_wait_for_blocks_that_start_later_within_the_limit) {
  Options o = checked_options();
  o.max_waiting_blocks = 4;
  for (int threads : {1, 2}) {
    o.host_threads = threads;
    u32 turn = 0;
    const std::string report = run_kernel<32>(
        o,
        [&](Smem&) {
          const u32 mine = 3 - tile::block_index().x;
          tile::wait_turn(&turn, mine);
          tile::signal_turn(&turn, mine + 1);
        },
        0, 4);
    EXPECT_THAT(report.empty(), report);
  }
}

TEST(bug_blocks_wait_by_index_beyond_what_is_resident) {
  Options o = checked_options();
  o.max_waiting_blocks = 4;
  for (int threads : {1, 2}) {
    o.host_threads = threads;
    u32 turn = 0;
    const std::string report = run_kernel<32>(
        o,
        [&](Smem&) {
          const u32 mine = 99 - tile::block_index().x;
          tile::wait_turn(&turn, mine);
          tile::signal_turn(&turn, mine + 1);
        },
        0, 100);
    EXPECT_CONTAINS(report, "deadlock between blocks");
    EXPECT_CONTAINS(report, "waits for a counter to become");
  }
}

// Blocks add to a sum in global memory one after another, each in its own turn; what may be left
// out shows as a race, whatever order the blocks happened to run in.
struct Relay {
  u32 ticket = 0, turn = 0;
  float sum[32] = {};
  enum class Bug { kNone, kNoWait, kNoSignal, kEarlySignal, kPlainSignal } bug;

  std::string run(const Options& options) {
    Session session;
    session.add("counters", &ticket, 8, Access::kWorkspace);
    session.add("sum", sum, sizeof(sum), Access::kWorkspace);
    zero(this, sizeof(ticket) + sizeof(turn) + sizeof(sum));
    return run_kernel<64>(options, [this](Smem& smem) { body(smem); }, 128, 6);
  }

  void body(Smem& smem) {
    const u32 mine = tile::take_ticket(&ticket, smem.take<u32>(1));
    // Warp 1 alone works: a turn is of a warp.
    if (tile::warp_index() == 0) return;
    if (bug != Bug::kNoWait) tile::wait_turn(&turn, mine);
    if (bug == Bug::kEarlySignal) tile::signal_turn(&turn, mine + 1);
    float* to = sum + tile::lane_index();
    tile::global_store(to, tile::global_load(to)[0] + static_cast<float>(mine));
    if (bug == Bug::kPlainSignal && tile::lane_index() == 0) tile::global_store(&turn, mine + 1);
    if (bug == Bug::kNone || bug == Bug::kNoWait) tile::signal_turn(&turn, mine + 1);
  }
};

TEST(a_relay_of_warps_is_free_of_races) {
  for (const Options& o : schedules()) {
    Relay relay{};
    const std::string report = relay.run(o);
    EXPECT_THAT(report.empty(), report);
    for (int lane = 0; lane < 32; ++lane) EXPECT(relay.sum[lane] == 15);
  }
}

TEST(bug_in_a_relay) {
  for (const Options& o : schedules()) {
    for (const auto bug :
         {Relay::Bug::kNoWait, Relay::Bug::kEarlySignal, Relay::Bug::kPlainSignal}) {
      Relay relay{};
      relay.bug = bug;
      EXPECT_CONTAINS(relay.run(o), "race between warps of the grid");
    }
    Relay relay{};
    relay.bug = Relay::Bug::kNoSignal;
    EXPECT_CONTAINS(relay.run(o), "deadlock between blocks");
  }
}

TEST(a_failed_run_leaves_nothing_behind) {
  for (int i = 0; i < 3; ++i) {
    EXPECT(!run_kernel<64>(checked_options(), [](Smem&) {
              if (tile::thread_index() != 5) tile::sync_block();
            }).empty());
    const std::string report = run_kernel<64>(checked_options(), [](Smem&) { tile::sync_block(); });
    EXPECT_THAT(report.empty(), report);
  }
}

}  // namespace
}  // namespace attention::emulator

TEST_MAIN()
