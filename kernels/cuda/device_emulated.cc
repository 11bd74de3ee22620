// SPDX-License-Identifier: Apache-2.0
// The device that launchers see in the emulated library: the smallest shared memory of all
// supported GPUs, so that what passes here fits everywhere.
#include "kernels/common/planner.h"
#include "kernels/cuda/attention.h"

namespace attention::cuda {

Status current_device(Device* device) {
  device->shared_memory = shared_memory_limit(86);
  return Status();
}

}  // namespace attention::cuda
