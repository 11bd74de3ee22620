// SPDX-License-Identifier: Apache-2.0
// As much of XLA's side of the FFI as the handlers need: errors, and a thread pool without threads.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"

// Opaque in XLA's interface; whoever stands in for XLA says what is in it.
struct XLA_FFI_Error {
  std::string message;
};

// The context of a call: its thread pool.
struct XLA_FFI_ExecutionContext {
  int64_t threads = 1;
  // Whether a task runs where it is scheduled, or after the handler has returned, as on a busy
  // pool.
  bool late = false;
  std::vector<std::function<void()>> waiting;
};

namespace attention::testing {

inline const XLA_FFI_Api* fake_xla() {
  static const XLA_FFI_Api api = [] {
    XLA_FFI_Api a = {};
    a.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    a.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
    a.api_version.major_version = XLA_FFI_API_MAJOR;
    a.api_version.minor_version = XLA_FFI_API_MINOR;
    a.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
      return new XLA_FFI_Error{args->message};
    };
    a.XLA_FFI_Error_GetMessage = [](XLA_FFI_Error_GetMessage_Args* args) {
      args->message = args->error->message.c_str();
    };
    a.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) { delete args->error; };
    a.XLA_FFI_ThreadPool_NumThreads =
        [](XLA_FFI_ThreadPool_NumThreads_Args* args) -> XLA_FFI_Error* {
      *args->num_threads = args->ctx->threads;
      return nullptr;
    };
    a.XLA_FFI_ThreadPool_Schedule = [](XLA_FFI_ThreadPool_Schedule_Args* args) -> XLA_FFI_Error* {
      if (args->ctx->late) {
        args->ctx->waiting.push_back([task = args->task, data = args->data] { task(data); });
      } else {
        args->task(args->data);
      }
      return nullptr;
    };
    return a;
  }();
  return &api;
}

}  // namespace attention::testing
