// SPDX-License-Identifier: Apache-2.0
// The tile layer: everything that a kernel's device code may use. README.md shows how a kernel is
// written.
#pragma once

#include "kernels/cuda/tile/async_copy.h"
#include "kernels/cuda/tile/config.h"
#include "kernels/cuda/tile/grid_sync.h"
#include "kernels/cuda/tile/math.h"
#include "kernels/cuda/tile/memory.h"
#include "kernels/cuda/tile/mma.h"
#include "kernels/cuda/tile/shared_tile.h"
#include "kernels/cuda/tile/thread.h"
#include "kernels/cuda/tile/types16.h"
