// Memory of results: blocks that are handed to the framework as tensors and come back when their storage is freed.
//
// The framework's own allocator is reached through two objects per tensor (one is made only to be converted), which
// costs more than a small plan takes to run. Blocks of up to `largest_kept` bytes are kept for the next call.
#pragma once
#include "dlpack.hpp"

#include <cstdint>
#include <vector>

namespace outlast {

// A tensor description with uninitialised memory behind it, 64-byte aligned. Whoever gets it calls its deleter once, on
// any thread. Throws std::bad_alloc.
dlpack::Managed* new_output(uint16_t dtype, const std::vector<int64_t>& shape, const std::vector<int64_t>& strides);

// Bytes that wait for the next call, of all sizes.
uint64_t kept_output_bytes();

}  // namespace outlast
