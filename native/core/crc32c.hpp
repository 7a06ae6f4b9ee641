// CRC32C (Castagnoli), RFC 3720 appendix B.4: reflected polynomial 0x82f63b78, initial value and final xor all ones.
#pragma once
#include <cstddef>
#include <cstdint>

namespace outlast {

// crc = crc32c(0, data, n) starts one; crc32c(crc, more, n) goes on with it.
uint32_t crc32c(uint32_t crc, const void* data, size_t n);

// Copies n bytes and returns crc32c(crc, from, n); the bytes hashed are those that were written to `to`.
uint32_t crc32c_copy(uint32_t crc, void* to, const void* from, size_t n);

// "avx512-vpclmulqdq", "sse4.2" or "table"
const char* crc32c_kind();

// The table form, for the differential test.
uint32_t crc32c_table(uint32_t crc, const void* data, size_t n);

}  // namespace outlast
