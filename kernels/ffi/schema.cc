// SPDX-License-Identifier: Apache-2.0
// The text form of the interface, which jax_ops/_schema.py compares with its own.
#include "kernels/ffi/schema.h"

namespace attention::ffi {
namespace {

// The bits in schema.h stand in the order of their values, without gaps: the text numbers them.
constexpr i64 kBits[] = {
#define ATTENTION_BIT(name, bit) bit,
    ATTENTION_FEATURES(ATTENTION_BIT)
#undef ATTENTION_BIT
};
constexpr bool bits_are_in_order() {
  for (unsigned i = 0; i < sizeof(kBits) / sizeof(kBits[0]); ++i) {
    if (kBits[i] != i64{1} << i) return false;
  }
  return true;
}
static_assert(bits_are_in_order(), "enum Feature and ATTENTION_FEATURES differ");

}  // namespace
}  // namespace attention::ffi

#define ATTENTION_TEXT_OF(x) #x
#define ATTENTION_TEXT(x) ATTENTION_TEXT_OF(x)
#define ATTENTION_NAME(name) " " #name
#define ATTENTION_TYPED_NAME(name, cpp_type, type) " " #name ":" type

extern "C" const char* attention_schema() {
  static char text[2048];
  static const bool written = [] {
    const char* const head =
        "abi " ATTENTION_TEXT(ATTENTION_ABI) "\n"
        "operands" ATTENTION_OPERANDS(ATTENTION_NAME) "\n"
        "backward_operands" ATTENTION_BACKWARD_OPERANDS(ATTENTION_NAME) "\n"
        "forward_results" ATTENTION_FORWARD_RESULTS(ATTENTION_NAME) "\n"
        "backward_results" ATTENTION_BACKWARD_RESULTS(ATTENTION_NAME) "\n"
        "attributes" ATTENTION_ATTRIBUTES(ATTENTION_TYPED_NAME) " " ATTENTION_BATCH_DIV ":i64[]\n"
        "features";
    const char* const features[] = {
#define ATTENTION_FEATURE_NAME(name, bit) #name,
        ATTENTION_FEATURES(ATTENTION_FEATURE_NAME)
#undef ATTENTION_FEATURE_NAME
    };
    unsigned n = 0;
    int bit = 0;
    const auto append = [&](const char* s) {
      while (*s != '\0' && n + 1 < sizeof(text)) text[n++] = *s++;
    };
    append(head);
    for (const char* feature : features) {
      const char number[] = {':', static_cast<char>('0' + bit / 10),
                             static_cast<char>('0' + bit % 10), '\0'};
      append(" ");
      append(feature);
      append(bit < 10 ? ":" : number);
      if (bit < 10) append(number + 2);
      ++bit;
    }
    append("\n");
    text[n] = '\0';
    return true;
  }();
  static_cast<void>(written);
  return text;
}
