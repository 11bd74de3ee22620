// SPDX-License-Identifier: Apache-2.0
// Element types and shapes: their sizes, and how messages write them.
#pragma once

#include <cstdio>

#include "kernels/ffi/call.h"

namespace attention::ffi {

inline constexpr i64 kAny = -1;  // in a wanted shape: whatever is there

inline const char* name_of(Element element) {
  switch (element) {
    case Element::kFloat32:
      return "f32";
    case Element::kBFloat16:
      return "bf16";
    case Element::kFloat16:
      return "f16";
    case Element::kBool:
      return "pred";
    case Element::kInt32:
      return "s32";
    case Element::kUInt32:
      return "u32";
    case Element::kUInt8:
      return "u8";
    case Element::kOther:
      break;
  }
  return "another type";
}

// A shape as text, for messages.
struct ShapeText {
  char text[96] = {};
  ShapeText(const i64* dims, int rank) {
    int n = std::snprintf(text, sizeof(text), "[");
    for (int i = 0; i < rank && n < static_cast<int>(sizeof(text)); ++i) {
      const char* const separator = i ? ", " : "";
      n += dims[i] == kAny
               ? std::snprintf(text + n, sizeof(text) - n, "%sany", separator)
               : std::snprintf(text + n, sizeof(text) - n, "%s%lld", separator, dims[i]);
    }
    if (n < static_cast<int>(sizeof(text))) std::snprintf(text + n, sizeof(text) - n, "]");
  }
};

// Bytes; 1 for a type that is no operand's.
inline i64 size_of(Element element) {
  switch (element) {
    case Element::kFloat32:
    case Element::kInt32:
    case Element::kUInt32:
      return 4;
    case Element::kBFloat16:
    case Element::kFloat16:
      return 2;
    case Element::kBool:
    case Element::kUInt8:
    case Element::kOther:
      break;
  }
  return 1;
}

}  // namespace attention::ffi
