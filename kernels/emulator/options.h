// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "kernels/emulator/emulator.h"

namespace attention::emulator {

// The options of a run that starts now. Returns an empty string, or what is wrong with
// ATTENTION_EMULATOR.
std::string current_options(Options* options);

// Parses the text of ATTENTION_EMULATOR into *options; returns an empty string or what is wrong.
std::string parse_options(const std::string& text, Options* options);

}  // namespace attention::emulator
