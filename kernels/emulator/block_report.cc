// SPDX-License-Identifier: Apache-2.0
// What a block says about itself when something is wrong.
#include <cstdio>

#include "kernels/emulator/block.h"

namespace attention::emulator {

const char* name_of(Collective c) {
  switch (c) {
    case Collective::kNone:
      return "nothing";
    case Collective::kMma:
      return "mma";
    case Collective::kLoadMatrices:
      return "ldmatrix";
    case Collective::kShuffle:
      return "a shuffle";
    case Collective::kBallot:
      return "a vote";
    case Collective::kSyncWarp:
      return "sync_warp";
    case Collective::kBarrier:
      return "a barrier";
    case Collective::kArrive:
      return "named_arrive";
  }
  return "?";
}

std::string hex(u32 mask) {
  char text[16];
  std::snprintf(text, sizeof(text), "0x%08x", mask);
  return text;
}

std::string Block::where() const {
  std::string text = "block (" + std::to_string(coordinates_[0]) + ", " +
                     std::to_string(coordinates_[1]) + ", " + std::to_string(coordinates_[2]) + ")";
  if (current_ != nullptr) {
    text += ", warp " + std::to_string(current_->warp) + ", lane " + std::to_string(current_->lane);
  }
  return text;
}

std::string Block::describe_deadlock() const {
  std::string text = where() + ": deadlock";
  for (std::size_t i = 0; i < warps_.size(); ++i) {
    const Warp& w = warps_[i];
    if (w.exited == ~0u) continue;
    text += "; warp " + std::to_string(i) + ": ";
    if (w.waits_at >= 0) {
      const Barrier& b = barriers_[w.waits_at];
      text += "waits at barrier " + std::to_string(w.waits_at) + ", where " +
              std::to_string(b.arrived) + " of " + std::to_string(b.expected) + " threads arrived";
    } else {
      text += "lanes " + hex(w.arrived) + " wait at " + name_of(w.kind);
      if (w.exited != 0) text += ", lanes " + hex(w.exited) + " have returned";
    }
  }
  return text;
}

std::string Block::describe_waiting() const {
  std::string text = "block (" + std::to_string(coordinates_[0]) + ", " +
                     std::to_string(coordinates_[1]) + ", " + std::to_string(coordinates_[2]) + ")";
  for (const auto& t : threads_) {
    if (t->awaited == nullptr) continue;
    return text + " waits for a counter to become " + std::to_string(t->awaited_value) +
           ", it is " + std::to_string(__atomic_load_n(t->awaited, __ATOMIC_ACQUIRE));
  }
  return text;
}

}  // namespace attention::emulator
