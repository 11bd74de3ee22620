// SPDX-License-Identifier: Apache-2.0
// The primitives on the emulator, in checked mode.
#include <vector>

#include "kernels/common/status.h"
#include "kernels/common/types.h"
#include "kernels/emulator/emulator.h"

namespace attention::conformance {

// Host memory. Sixteen-byte aligned, as device memory is.
class DeviceWords {
 public:
  explicit DeviceWords(int count) : words_(static_cast<std::size_t>(count) / 4 + 1), count_(count) {
    emulator::Options options = emulator::get_options();
    options.checked = true;
    emulator::set_options(options);
  }
  u32* data() { return reinterpret_cast<u32*>(words_.data()); }
  Status upload(const u32* from) {
    for (int i = 0; i < count_; ++i) data()[i] = from[i];
    return Status();
  }
  Status download(u32* to) {
    for (int i = 0; i < count_; ++i) to[i] = data()[i];
    return Status();
  }

 private:
  struct alignas(16) Four {
    u32 word[4];
  };
  std::vector<Four> words_;
  int count_;
};

}  // namespace attention::conformance

#include "tests/native/tile/conformance_library.h"
