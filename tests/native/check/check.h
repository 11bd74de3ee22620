// SPDX-License-Identifier: Apache-2.0
// A small test runner for C++: TEST(name) { EXPECT(condition); ... } and one main() for all tests
// of a program.
//
// A failed EXPECT is reported and the test goes on. A program without tests fails, and so does a
// test without a check.
#pragma once

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace attention::check {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Tally {
  int checks = 0;
  int failures = 0;
};

inline Tally& tally() {
  static Tally t;
  return t;
}

inline void record(bool ok, const char* file, int line, const std::string& what) {
  ++tally().checks;
  if (ok) return;
  ++tally().failures;
  // One broken loop must not bury the first message under a million others.
  if (tally().failures <= 20) std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

struct Registration {
  Registration(const char* name, void (*run)()) { tests().push_back(Test{name, run}); }
};

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline int run_all(int argc, char** argv) {
  const char* only = argc > 1 ? argv[1] : nullptr;
  int ran = 0;
  int failed = 0;
  for (const Test& test : tests()) {
    if (only != nullptr && std::strcmp(only, test.name) != 0) continue;
    tally() = Tally{};
    test.run();
    if (tally().checks == 0) {
      ++tally().failures;
      std::fprintf(stderr, "%s: checked nothing\n", test.name);
    }
    std::printf("%s %s (%d checks)\n", tally().failures == 0 ? "ok    " : "FAILED", test.name,
                tally().checks);
    failed += tally().failures != 0;
    ++ran;
  }
  if (ran == 0) std::fprintf(stderr, "no test%s%s\n", only ? " named " : "", only ? only : "");
  return ran == 0 || failed != 0;
}

}  // namespace attention::check

#define TEST(name)                                                                   \
  static void test_##name();                                                         \
  static const ::attention::check::Registration register_##name(#name, test_##name); \
  static void test_##name()

#define EXPECT(...)                                                              \
  ::attention::check::record(static_cast<bool>(__VA_ARGS__), __FILE__, __LINE__, \
                             "not true: " #__VA_ARGS__)

// The condition, and what to say when it does not hold.
#define EXPECT_THAT(condition, message) \
  ::attention::check::record(static_cast<bool>(condition), __FILE__, __LINE__, (message))

#define EXPECT_CONTAINS(text, part)                                                            \
  ::attention::check::record(::attention::check::contains((text), (part)), __FILE__, __LINE__, \
                             "'" + std::string(text) + "' does not contain '" + (part) + "'")

#define TEST_MAIN() \
  int main(int argc, char** argv) { return ::attention::check::run_all(argc, argv); }
