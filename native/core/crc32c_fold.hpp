// CRC32C by carry-less multiplication on AVX-512 registers, with or without copying the bytes on the way.
#pragma once
#include <cstddef>
#include <cstdint>

namespace outlast {

constexpr size_t crc32c_fold_block = 256;  // bytes that one round takes

// Whether this processor can: AVX-512F/VL, VPCLMULQDQ, SSE4.2.
bool crc32c_fold_usable();

// The CRC register (not inverted) after n bytes from `from`; n is a positive multiple of crc32c_fold_block.
uint32_t crc32c_fold(uint32_t crc, const void* from, size_t n);

// The same, and copies them to `to`; every byte is read once, and the register that is stored is the one that is hashed.
// `past_caches`: with non-temporal stores, fenced before it returns; `to` must then be 64-byte aligned.
uint32_t crc32c_fold_copy(uint32_t crc, void* to, const void* from, size_t n, bool past_caches);

}  // namespace outlast
