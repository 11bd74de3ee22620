// SPDX-License-Identifier: Apache-2.0
// C interface of the two conformance libraries: one has the primitives compiled for the GPU, the
// other for the emulator. They are loaded side by side by conformance.py.
#pragma once

extern "C" {

// Number of primitives; they are called by number, 0 <= i < count.
int attention_conformance_count();
const char* attention_conformance_name(int i);
// shape[0..3] = threads of a block, blocks, words in and words out of a thread.
void attention_conformance_shape(int i, int* shape);
// Runs primitive i on host arrays of blocks * words * threads words. Returns 0, or 1 with a message
// of at most `size` bytes.
int attention_conformance_run(int i, const unsigned* in, unsigned* out, char* message, int size);
}
