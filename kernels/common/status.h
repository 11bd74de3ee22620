// SPDX-License-Identifier: Apache-2.0
// The result of a launcher: success, or one sentence that says what was wrong. A fixed buffer, so
// that reporting a failure cannot itself fail.
#pragma once

#include <cstdarg>
#include <cstdio>

namespace attention {

class Status {
 public:
  Status() = default;

  // printf-style; a message that does not fit is cut.
  __attribute__((format(printf, 1, 2))) static Status error(const char* format, ...) {
    Status status;
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(status.message_, sizeof(status.message_), format, arguments);
    va_end(arguments);
    return status;
  }

  bool ok() const { return message_[0] == '\0'; }
  const char* message() const { return message_; }  // empty when ok()

 private:
  char message_[256] = {};
};

}  // namespace attention
