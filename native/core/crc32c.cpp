#include "crc32c.hpp"

#include "crc32c_fold.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace outlast {

namespace {

constexpr uint32_t poly = 0x82f63b78u;

struct Tables {
    std::array<std::array<uint32_t, 256>, 8> t{};
    constexpr Tables() {
        for (uint32_t i = 0; i < 256; ++i) {
            uint32_t c = i;
            for (int k = 0; k < 8; ++k) c = (c & 1) ? (c >> 1) ^ poly : c >> 1;
            t[0][i] = c;
        }
        for (uint32_t i = 0; i < 256; ++i)
            for (size_t k = 1; k < 8; ++k) t[k][i] = (t[k - 1][i] >> 8) ^ t[0][t[k - 1][i] & 255];
    }
};
constexpr Tables tables;

uint32_t raw_table(uint32_t c, const uint8_t* p, size_t n) {
    while (n >= 8) {
        uint64_t w;
        std::memcpy(&w, p, 8);
        w ^= c;
        c = 0;
        for (int k = 0; k < 8; ++k) c ^= tables.t[static_cast<size_t>(7 - k)][(w >> (8 * k)) & 255];
        p += 8;
        n -= 8;
    }
    while (n-- > 0) c = (c >> 8) ^ tables.t[0][(c ^ *p++) & 255];
    return c;
}

#if defined(__x86_64__)

// x^(8n) mod P in the reflected representation: multiplying by it moves a CRC past n bytes of zeros.
uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
        if (a & bit) product ^= b;
        b = (b & 1) ? (b >> 1) ^ poly : b >> 1;
    }
    return product;
}

uint32_t zeros_operator(size_t bytes) {
    uint32_t power = 0x80000000u >> 8, result = 0x80000000u;  // x^8 and 1
    for (; bytes != 0; bytes >>= 1) {
        if (bytes & 1) result = multiply(power, result);
        power = multiply(power, power);
    }
    return result;
}

// Three independent streams hide the latency (3 cycles) of the crc32 instruction.  The stream length is a constant,
// so moving a CRC past a stream is four table look-ups.
constexpr size_t stream = 1360;  // a multiple of 8; 3 streams = 4,080 bytes, about one page of a log record

struct Shift {
    std::array<std::array<uint32_t, 256>, 4> t{};
    Shift() {
        const uint32_t op = zeros_operator(stream);
        for (uint32_t i = 0; i < 256; ++i)
            for (uint32_t k = 0; k < 4; ++k) t[k][i] = multiply(op, i << (8 * k));
    }
    uint32_t operator()(uint32_t c) const { return t[0][c & 255] ^ t[1][(c >> 8) & 255] ^ t[2][(c >> 16) & 255] ^ t[3][c >> 24]; }
};
const Shift shift;

__attribute__((target("sse4.2"))) uint32_t raw_sse42(uint32_t crc, const uint8_t* p, size_t n) {
    uint64_t c = crc;
    while (n >= 3 * stream) {
        uint64_t a = c, b = 0, d = 0;
        for (size_t i = 0; i < stream; i += 8) {
            uint64_t x, y, z;
            std::memcpy(&x, p + i, 8);
            std::memcpy(&y, p + stream + i, 8);
            std::memcpy(&z, p + 2 * stream + i, 8);
            a = _mm_crc32_u64(a, x);
            b = _mm_crc32_u64(b, y);
            d = _mm_crc32_u64(d, z);
        }
        c = shift(shift(static_cast<uint32_t>(a)) ^ static_cast<uint32_t>(b)) ^ static_cast<uint32_t>(d);
        p += 3 * stream;
        n -= 3 * stream;
    }
    while (n >= 8) {
        uint64_t w;
        std::memcpy(&w, p, 8);
        c = _mm_crc32_u64(c, w);
        p += 8;
        n -= 8;
    }
    uint32_t r = static_cast<uint32_t>(c);
    while (n-- > 0) r = _mm_crc32_u8(r, *p++);
    return r;
}

const bool have_sse42 = __builtin_cpu_supports("sse4.2");

#endif

const bool have_fold = crc32c_fold_usable();
// Below this the crc32 instruction is done before the registers of a fold are reduced to one.
constexpr size_t fold_from = 2 * crc32c_fold_block;
// A record this large would push out of the caches what the engine computes with, and nobody reads it before a takeover.
constexpr size_t past_caches_from = 256 << 10;

uint32_t raw(uint32_t c, const uint8_t* p, size_t n) {
    if (have_fold && n >= fold_from) {
        const size_t k = n - n % crc32c_fold_block;
        c = crc32c_fold(c, p, k);
        p += k;
        n -= k;
    }
#if defined(__x86_64__)
    if (have_sse42) return raw_sse42(c, p, n);
#endif
    return raw_table(c, p, n);
}

}  // namespace

uint32_t crc32c(uint32_t crc, const void* data, size_t n) { return ~raw(~crc, static_cast<const uint8_t*>(data), n); }

uint32_t crc32c_table(uint32_t crc, const void* data, size_t n) {
    return ~raw_table(~crc, static_cast<const uint8_t*>(data), n);
}

uint32_t crc32c_copy(uint32_t crc, void* to, const void* from, size_t n) {
    // Pieces small enough that the bytes just written are still in the first-level cache when they are hashed.
    constexpr size_t piece = 4 * 4080;
    auto* t = static_cast<uint8_t*>(to);
    auto* f = static_cast<const uint8_t*>(from);
    uint32_t c = ~crc;
    if (have_fold && n >= fold_from) {
        const size_t k = n - n % crc32c_fold_block;
        c = crc32c_fold_copy(c, t, f, k, n >= past_caches_from && reinterpret_cast<uintptr_t>(t) % 64 == 0);
        t += k;
        f += k;
        n -= k;
    }
    while (n > 0) {
        const size_t k = std::min(n, piece);
        std::memcpy(t, f, k);
        c = raw(c, t, k);
        t += k;
        f += k;
        n -= k;
    }
    return ~c;
}

const char* crc32c_kind() {
    if (have_fold) return "avx512-vpclmulqdq";
#if defined(__x86_64__)
    if (have_sse42) return "sse4.2";
#endif
    return "table";
}

}  // namespace outlast
