// SPDX-License-Identifier: Apache-2.0
// Scheduling of a block's fibers and the rendezvous behind every collective.
#include "kernels/emulator/block.h"

#include "kernels/emulator/warp_ops.h"

namespace attention::emulator {

thread_local ThreadState* current_thread __attribute__((tls_model("initial-exec"))) = nullptr;

namespace {

constexpr u32 kFullMask = 0xffffffffu;

// Ends the emulated thread that did something wrong; unwinds its stack up to thread_main.
struct Failure {};

}  // namespace

Block::Block(const Program& program, const Options& options, u32 launch, GridOrder* order)
    : program_(program),
      options_(options),
      launch_(launch),
      order_(order),
      warp_count_(program.threads / kWarp),
      warps_(static_cast<std::size_t>(warp_count_)),
      other_blocks_(static_cast<std::size_t>(warp_count_)),
      shared_(program.smem_bytes, warp_count_, options.checked) {
  for (int t = 0; t < program.threads; ++t) {
    auto thread = std::make_unique<Thread>();
    thread->state.thread = t;
    thread->state.checked = options.checked;
    thread->state.owner = this;
    for (int i = 0; i < 3; ++i) thread->state.grid[i] = program.grid[i];
    thread->lane = t % kWarp;
    thread->warp = t / kWarp;
    thread->fiber.allocate(t);
    threads_.push_back(std::move(thread));
  }
}

void Block::start(u64 index) {
  index_ = index;
  coordinates_[0] = static_cast<u32>(index % program_.grid[0]);
  coordinates_[1] = static_cast<u32>(index / program_.grid[0] % program_.grid[1]);
  coordinates_[2] = static_cast<u32>(index / program_.grid[0] / program_.grid[1]);
  report_.clear();
  failed_ = false;
  yields_ = false;
  for (OtherBlocks& known : other_blocks_) known = OtherBlocks();
  live_ = program_.threads;
  // splitmix64 of seed and index: every block of a random schedule has an order of its own, on any
  // host thread.
  random_state_ = (options_.seed + 1) * 0x9e3779b97f4a7c15u + index * 0xbf58476d1ce4e5b9u;
  shared_.reset();
  for (Barrier& b : barriers_) b = Barrier{};
  for (Warp& w : warps_) {
    w = Warp{};
    w.runnable = kFullMask;
  }
  ready_warps_ = warp_count_ == 32 ? kFullMask : (1u << warp_count_) - 1;
  for (auto& t : threads_) {
    for (int i = 0; i < 3; ++i) t->state.block[i] = coordinates_[i];
    t->exited = false;
    t->awaited = nullptr;
    t->copies.clear();
    t->group_ends.clear();
    t->fiber.prepare(&Block::thread_main, t.get());
  }
}

u32 Block::random() {
  u64 z = (random_state_ += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return static_cast<u32>((z ^ (z >> 31)) >> 32);
}

// ---- scheduling ----

namespace {

int lowest(u32 mask) { return __builtin_ctz(mask); }
int highest(u32 mask) { return 31 - __builtin_clz(mask); }

int nth_set(u32 mask, u32 n) {
  for (; n > 0; --n) mask &= mask - 1;
  return lowest(mask);
}

}  // namespace

bool Block::pick(int* warp, int* lane) {
  if (ready_warps_ == 0) return false;
  int w = 0;
  switch (options_.schedule) {
    case Schedule::kForward:
      w = lowest(ready_warps_);
      break;
    case Schedule::kReverse:
      w = highest(ready_warps_);
      break;
    case Schedule::kRandom:
      w = nth_set(ready_warps_, random() % static_cast<u32>(__builtin_popcount(ready_warps_)));
      break;
  }
  const u32 lanes = warps_[static_cast<std::size_t>(w)].runnable;
  switch (options_.schedule) {
    case Schedule::kForward:
      *lane = lowest(lanes);
      break;
    case Schedule::kReverse:
      *lane = highest(lanes);
      break;
    case Schedule::kRandom:
      *lane = nth_set(lanes, random() % static_cast<u32>(__builtin_popcount(lanes)));
      break;
  }
  *warp = w;
  return true;
}

void Block::switch_to(Thread& next) {
  Fiber& from = current_ == nullptr ? host_ : current_->fiber;
  current_ = &next;
  current_thread = &next.state;
  Fiber::switch_to(from, next.fiber);
}

// The current lane cannot go on: run another one, or return to the host when there is none.
void Block::block_current() {
  Thread* me = current_;
  Warp& warp = warps_[static_cast<std::size_t>(me->warp)];
  warp.runnable &= ~(1u << me->lane);
  if (warp.runnable == 0) ready_warps_ &= ~(1u << me->warp);
  int w = 0, l = 0;
  if (pick(&w, &l)) {
    Thread& next = *threads_[static_cast<std::size_t>(w * kWarp + l)];
    current_ = &next;
    current_thread = &next.state;
    Fiber::switch_to(me->fiber, next.fiber);
  } else {
    Fiber::switch_to(me->fiber, host_);
  }
}

Outcome Block::run() {
  moved_ = false;
  for (;;) {
    int w = 0, l = 0;
    if (!pick(&w, &l)) {
      if (yields_) {
        yields_ = false;
        return Outcome::kWaiting;
      }
      // Only waiting for other blocks can end by itself: look again.
      bool any = false;
      for (std::size_t i = 0; i < warps_.size(); ++i) {
        for (u32 mask = warps_[i].spinning; mask != 0; mask &= mask - 1) {
          Thread& t = *threads_[i * kWarp + static_cast<std::size_t>(lowest(mask))];
          if (t.awaited != nullptr &&
              __atomic_load_n(t.awaited, __ATOMIC_ACQUIRE) != t.awaited_value) {
            continue;
          }
          t.awaited = nullptr;
          warps_[i].spinning &= ~(1u << t.lane);
          warps_[i].runnable |= 1u << t.lane;
          ready_warps_ |= 1u << i;
          any = true;
        }
      }
      if (any) continue;
      for (const Warp& warp : warps_) {
        if (warp.spinning != 0) return Outcome::kWaiting;
      }
      current_ = nullptr;
      report_ = describe_deadlock();
      return Outcome::kFailed;
    }
    current_ = nullptr;
    moved_ = true;
    switch_to(*threads_[static_cast<std::size_t>(w * kWarp + l)]);
    current_thread = nullptr;
    if (failed_) return Outcome::kFailed;
    if (live_ == 0) {
      current_ = nullptr;
      for (Warp& warp : warps_) count_conflicts(warp);
      if (std::string damage = shared_.damage(); !damage.empty()) {
        report_ = where() + ": " + damage;
        return Outcome::kFailed;
      }
      ++counters_.blocks;
      return Outcome::kFinished;
    }
  }
}

void Block::thread_main(void* argument) {
  Thread& thread = *static_cast<Thread*>(argument);
  Block& block = *thread.state.owner;
  try {
    block.program_.run(block.program_.params);
    if (!thread.copies.empty()) {
      block.fail("returns with asynchronous copies in flight: async_wait<0> is missing");
    }
  } catch (const Failure&) {
    block.failed_ = true;
  }
  // Outside the handler: a fiber switch within it would confuse the run-time's list of exceptions.
  if (block.failed_) Fiber::switch_to(thread.fiber, block.host_, true);
  block.finish_thread();
}

void Block::finish_thread() {
  Thread& me = *current_;
  me.exited = true;
  Warp& warp = warps_[static_cast<std::size_t>(me.warp)];
  warp.exited |= 1u << me.lane;
  --live_;
  warp.runnable &= ~(1u << me.lane);
  if (warp.runnable == 0) ready_warps_ &= ~(1u << me.warp);
  int w = 0, l = 0;
  if (pick(&w, &l)) {
    Thread& next = *threads_[static_cast<std::size_t>(w * kWarp + l)];
    current_ = &next;
    current_thread = &next.state;
    Fiber::switch_to(me.fiber, next.fiber, true);
  } else {
    Fiber::switch_to(me.fiber, host_, true);
  }
  __builtin_unreachable();
}

void Block::fail(const std::string& what) {
  report_ = where() + ": " + what;
  throw Failure();
}

// ---- collectives ----

void Block::collective(Collective kind, u32 detail, void* operands) {
  Thread& me = *current_;
  Warp& warp = warps_[static_cast<std::size_t>(me.warp)];
  const u32 bit = 1u << me.lane;
  if (warp.arrived == 0) {
    warp.kind = kind;
    warp.detail = detail;
  } else if (warp.kind != kind || warp.detail != detail) {
    std::string what = "divergence: lanes " + hex(warp.arrived) + " are at " + name_of(warp.kind) +
                       ", this lane at ";
    what += warp.kind == kind
                ? std::string("another ") + name_of(kind) + " (other operand sizes or barrier)"
                : std::string(name_of(kind));
    fail(what);
  }
  warp.operands[me.lane] = operands;
  warp.arrived |= bit;
  if (warp.arrived != kFullMask) {
    block_current();
    return;
  }
  warp.arrived = 0;
  execute(warp);
  if (warp.waits_at >= 0) {
    block_current();
    return;
  }
  warp.runnable = kFullMask;
  // In a random schedule the last lane to arrive does not always go on first.
  if (options_.schedule == Schedule::kRandom) {
    int w = 0, l = 0;
    pick(&w, &l);
    Thread& next = *threads_[static_cast<std::size_t>(w * kWarp + l)];
    if (&next != &me) switch_to(next);
  }
}

// All lanes are here: does the work of the collective for all of them.
void Block::execute(Warp& warp) {
  const int index = current_->warp;
  if (options_.checked) count_conflicts(warp);
  switch (warp.kind) {
    case Collective::kNone:
      break;
    case Collective::kMma: {
      const auto input = static_cast<MmaInput>(warp.detail & 0xffu);
      const int count = static_cast<int>(warp.detail >> 8);
      multiply(input, count, warp.operands);
      counters_.mma += static_cast<u64>(count);
      break;
    }
    case Collective::kLoadMatrices:
      if (options_.checked) {
        for (int lane = 0; lane < kWarp; ++lane) {
          const void* row = static_cast<MatrixOperands*>(warp.operands[lane])->row;
          std::string wrong = shared_.read(row, 16, index, kAllLanes);
          if (!wrong.empty())
            fail("ldmatrix, row address of lane " + std::to_string(lane) + ": " + wrong);
        }
        counters_.ldmatrix_conflicts += static_cast<u64>(matrix_conflicts(warp.operands));
      }
      load_matrices(warp.detail != 0, warp.operands);
      ++counters_.ldmatrix;
      break;
    case Collective::kShuffle:
      exchange(warp.operands);
      break;
    case Collective::kBallot:
      vote(warp.operands);
      break;
    case Collective::kSyncWarp:
      shared_.advance(index);
      break;
    case Collective::kBarrier:
    case Collective::kArrive: {
      bool any = false;
      for (void* operands : warp.operands)
        any = any || static_cast<VoteOperands*>(operands)->predicate;
      arrive_at_barrier(index, static_cast<int>(warp.detail & 0xffu),
                        static_cast<int>(warp.detail >> 8), any, warp.kind == Collective::kBarrier);
      break;
    }
  }
}

void Block::log_access(const void* site, const void* p, int bytes) {
  warps_[static_cast<std::size_t>(current_->warp)].banks.add(current_->lane, site, p, bytes);
}

void Block::count_conflicts(Warp& warp) {
  const BankLog::Count count = warp.banks.flush();
  counters_.shared_accesses += count.accesses;
  counters_.shared_conflicts += count.conflicts;
}

void Block::arrive_at_barrier(int warp_index, int id, int threads, bool predicate, bool waits) {
  Warp& warp = warps_[static_cast<std::size_t>(warp_index)];
  Barrier& barrier = barriers_[id];
  const int expected = threads == 0 ? program_.threads : threads;
  if (barrier.arrived > 0 && barrier.expected != expected) {
    fail("barrier " + std::to_string(id) + ": this warp counts " + std::to_string(expected) +
         " threads, others count " + std::to_string(barrier.expected));
  }
  barrier.expected = expected;
  barrier.arrived += kWarp;
  barrier.any = barrier.any || predicate;
  barrier.clock.join(shared_.clock(warp_index), warp_count_);
  barrier.other_blocks.join(other_blocks_[static_cast<std::size_t>(warp_index)]);
  if (!waits) shared_.advance(warp_index);
  if (waits) {
    barrier.warps |= 1u << warp_index;
    warp.waits_at = id;
  }
  if (barrier.arrived > expected) {
    fail("barrier " + std::to_string(id) + ": more than " + std::to_string(expected) +
         " threads arrived");
  }
  if (barrier.arrived == expected) release_barrier(barrier);
}

void Block::release_barrier(Barrier& barrier) {
  ++counters_.barriers;
  for (u32 mask = barrier.warps; mask != 0; mask &= mask - 1) {
    const int w = lowest(mask);
    Warp& warp = warps_[static_cast<std::size_t>(w)];
    shared_.clock(w).join(barrier.clock, warp_count_);
    other_blocks_[static_cast<std::size_t>(w)].join(barrier.other_blocks);
    shared_.advance(w);
    warp.waits_at = -1;
    warp.runnable = kFullMask;
    ready_warps_ |= 1u << w;
    for (void* operands : warp.operands)
      static_cast<VoteOperands*>(operands)->result = barrier.any ? 1 : 0;
  }
  barrier = Barrier{};
}

bool Block::barrier(int id, int threads, bool predicate) {
  if (id < 0 || id >= kMaxBarriers || threads % kWarp != 0) {
    fail("barrier " + std::to_string(id) + " for " + std::to_string(threads) +
         " threads: ids are 0 to 15, threads a multiple of 32");
  }
  VoteOperands operands{predicate, 0};
  collective(Collective::kBarrier, static_cast<u32>(id) | static_cast<u32>(threads) << 8,
             &operands);
  return operands.result != 0;
}

void Block::arrive(int id, int threads) {
  if (id < 0 || id >= kMaxBarriers || threads % kWarp != 0) {
    fail("named_arrive at barrier " + std::to_string(id) + " for " + std::to_string(threads) +
         " threads: ids are 0 to 15, threads a multiple of 32");
  }
  VoteOperands operands{false, 0};
  collective(Collective::kArrive, static_cast<u32>(id) | static_cast<u32>(threads) << 8, &operands);
}

// ---- between blocks ----

void Block::wait_until_equal(const u32* p, u32 value) {
  if (__atomic_load_n(p, __ATOMIC_ACQUIRE) != value) {
    Thread& me = *current_;
    me.awaited = p;
    me.awaited_value = value;
    warps_[static_cast<std::size_t>(me.warp)].spinning |= 1u << me.lane;
    block_current();
  }
  acquire_order(p);
}

void Block::store_release(u32* p, u32 value) {
  if (options_.checked) order_->release(p, released_order());
  __atomic_store_n(p, value, __ATOMIC_RELEASE);
  if (options_.schedule == Schedule::kForward) return;
  // Whoever waits for it goes on before this thread does: blocks run interleaved.
  yields_ = true;
  warps_[static_cast<std::size_t>(current_->warp)].spinning |= 1u << current_->lane;
  block_current();
}

u32 Block::atomic_add(u32* p, u32 value) {
  if (options_.checked) {
    order_->exchange(p, released_order(), &other_blocks_[static_cast<std::size_t>(current_->warp)]);
  }
  return __atomic_fetch_add(p, value, __ATOMIC_ACQ_REL);
}

void Block::acquire_order(const u32* p) {
  if (!options_.checked) return;
  order_->acquire(p, &other_blocks_[static_cast<std::size_t>(current_->warp)]);
}

// What the current thread hands on: all that its warp knows, and of its own warp what came before
// the last barrier or sync_warp, which is what all lanes agree on.
OtherBlocks Block::released_order() {
  const int warp = current_->warp;
  OtherBlocks known = other_blocks_[static_cast<std::size_t>(warp)];
  VectorClock clock = shared_.clock(warp);
  if (clock.at[warp] > 0) --clock.at[warp];
  known.join(index_, clock);
  return known;
}

bool Block::comes_after(u64 block, int warp, u32 clock) const {
  const int me = current_->warp;
  if (block != index_)
    return other_blocks_[static_cast<std::size_t>(me)].covers(block, warp, clock);
  return warp == me || clock <= shared_.clock(me).at[warp];
}

// ---- asynchronous copies ----

void Block::issue_copy(const PendingCopy& copy) {
  Thread& me = *current_;
  if (options_.checked) {
    std::string wrong = shared_.begin_copy(copy.to, copy.bytes, me.warp, me.lane);
    if (!wrong.empty()) fail(wrong);
  }
  // Nothing can be read from the destination until the wait; NaN shows whoever does.
  std::memset(copy.to, 0xff, static_cast<std::size_t>(copy.bytes));
  me.copies.push_back(copy);
  ++counters_.async_copies;
}

void Block::commit_copies() { current_->group_ends.push_back(current_->copies.size()); }

// Copies happen as late as they may: a wait that is missing or that allows one group too many
// leaves NaN behind.
void Block::wait_copies(int pending) {
  Thread& me = *current_;
  const std::size_t groups = me.group_ends.size();
  if (groups <= static_cast<std::size_t>(pending)) return;
  const std::size_t done_groups = groups - static_cast<std::size_t>(pending);
  const std::size_t done = me.group_ends[done_groups - 1];
  for (std::size_t i = 0; i < done; ++i) {
    const PendingCopy& c = me.copies[i];
    if (c.valid_bytes > 0) {
      if (options_.checked) check_global_read(c.from, c.valid_bytes, false);
      std::memcpy(c.to, c.from, static_cast<std::size_t>(c.valid_bytes));
    }
    std::memset(static_cast<char*>(c.to) + c.valid_bytes, 0,
                static_cast<std::size_t>(c.bytes - c.valid_bytes));
    if (options_.checked) shared_.end_copy(c.to, c.bytes, me.warp, me.lane);
  }
  me.copies.erase(me.copies.begin(), me.copies.begin() + static_cast<std::ptrdiff_t>(done));
  me.group_ends.erase(me.group_ends.begin(),
                      me.group_ends.begin() + static_cast<std::ptrdiff_t>(done_groups));
  for (std::size_t& end : me.group_ends) end -= done;
}

}  // namespace attention::emulator
