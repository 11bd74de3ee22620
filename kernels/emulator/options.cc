// SPDX-License-Identifier: Apache-2.0
// Options from the environment or from a test.
#include "kernels/emulator/options.h"

#include <cstdlib>
#include <mutex>
#include <sstream>

namespace attention::emulator {
namespace {

struct State {
  std::mutex mutex;
  Options options;
  std::string wrong;

  State() {
    if (const char* text = std::getenv("ATTENTION_EMULATOR")) wrong = parse_options(text, &options);
  }
};

State& state() {
  static State s;
  return s;
}

bool parse_number(const std::string& text, std::uint64_t low, std::uint64_t high,
                  std::uint64_t* value) {
  if (text.empty() || text.size() > 19 || text.find_first_not_of("0123456789") != std::string::npos)
    return false;
  *value = std::strtoull(text.c_str(), nullptr, 10);
  return low <= *value && *value <= high;
}

}  // namespace

std::string parse_options(const std::string& text, Options* options) {
  std::stringstream stream(text);
  std::string entry;
  while (std::getline(stream, entry, ',')) {
    const std::size_t equals = entry.find('=');
    const std::string name = entry.substr(0, equals);
    const std::string value =
        equals == std::string::npos ? std::string() : entry.substr(equals + 1);
    std::uint64_t number = 0;
    if (entry == "checked") {
      options->checked = true;
    } else if (entry == "reverse_blocks") {
      options->reverse_blocks = true;
    } else if (entry == "schedule=forward") {
      options->schedule = Schedule::kForward;
    } else if (entry == "schedule=reverse") {
      options->schedule = Schedule::kReverse;
    } else if (entry == "schedule=random") {
      options->schedule = Schedule::kRandom;
    } else if (name == "seed" && parse_number(value, 0, ~std::uint64_t{0}, &number)) {
      options->seed = number;
    } else if (name == "host_threads" && parse_number(value, 1, 256, &number)) {
      options->host_threads = static_cast<int>(number);
    } else if (name == "max_waiting_blocks" && parse_number(value, 1, 4096, &number)) {
      options->max_waiting_blocks = static_cast<int>(number);
    } else {
      return "ATTENTION_EMULATOR: '" + entry +
             "' is not one of checked, reverse_blocks, schedule=forward|reverse|random, seed=N, "
             "host_threads=1..256, "
             "max_waiting_blocks=1..4096";
    }
  }
  return {};
}

std::string current_options(Options* options) {
  std::lock_guard<std::mutex> lock(state().mutex);
  *options = state().options;
  return state().wrong;
}

void set_options(const Options& options) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().options = options;
  state().wrong.clear();
}

Options get_options() {
  std::lock_guard<std::mutex> lock(state().mutex);
  return state().options;
}

}  // namespace attention::emulator
