// SPDX-License-Identifier: Apache-2.0
// Runs a fuzz target without libFuzzer: over the files that are named, then over inputs made from a
// fixed seed: new ones, and mutations of the files. The same inputs in every run, in a fixed
// number.
//
//   --inputs=N   how many inputs to make
//   --seed=N     from which seed
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Input = std::vector<uint8_t>;

// Which input is running, for the handler of a crash.
Input current;

// Prints the input that is running: xxd -r -p makes a file of it again.
void print_current() {
  std::fprintf(stderr, "input (hex): ");
  for (uint8_t byte : current) std::fprintf(stderr, "%02x", byte);
  std::fprintf(stderr, "\n");
}

void run(const Input& input) {
  current = input;
  LLVMFuzzerTestOneInput(current.data(), current.size());
}

Input mutate(Input input, std::mt19937_64* random) {
  const auto below = [&](size_t n) { return static_cast<size_t>((*random)() % n); };
  for (size_t n = 1 + below(4); n > 0; --n) {
    const uint8_t byte = static_cast<uint8_t>(below(256));
    const size_t at = below(input.size() + 1);
    if (at == input.size() || below(3) == 0) {
      input.insert(input.begin() + static_cast<std::ptrdiff_t>(at), byte);
    } else if (below(4) == 0) {
      input.erase(input.begin() + static_cast<std::ptrdiff_t>(at));
    } else {
      input[at] = byte;
    }
  }
  return input;
}

}  // namespace

// Called by the sanitizers, where they are linked.
extern "C" void __asan_on_error() { print_current(); }
extern "C" const char* __ubsan_default_options() { return "print_stacktrace=1:abort_on_error=1"; }

int main(int argc, char** argv) {
  std::signal(SIGABRT, [](int) { print_current(); });
  std::signal(SIGFPE, [](int) {
    print_current();
    std::_Exit(1);
  });
  size_t inputs = 0;
  uint64_t seed = 1;
  std::vector<Input> corpus;
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "--inputs=", 9) == 0) {
      inputs = std::strtoull(argv[i] + 9, nullptr, 10);
    } else if (std::strncmp(argv[i], "--seed=", 7) == 0) {
      seed = std::strtoull(argv[i] + 7, nullptr, 10);
    } else {
      std::ifstream file(argv[i], std::ios::binary);
      if (!file) {
        std::fprintf(stderr, "%s: cannot be read\n", argv[i]);
        return 1;
      }
      corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
  }
  if (corpus.empty() && inputs == 0) {
    std::fprintf(stderr, "nothing to run: name files, or give --inputs=N\n");
    return 1;
  }
  for (const Input& input : corpus) run(input);
  std::mt19937_64 random(seed);
  for (size_t n = 0; n < inputs; ++n) {
    if (n % 2 == 0 && !corpus.empty()) {
      run(mutate(corpus[random() % corpus.size()], &random));
    } else {
      Input fresh(random() % 40);
      for (uint8_t& byte : fresh) byte = static_cast<uint8_t>(random());
      run(fresh);
    }
  }
  std::printf("%zu files and %zu made inputs\n", corpus.size(), inputs);
  return 0;
}
