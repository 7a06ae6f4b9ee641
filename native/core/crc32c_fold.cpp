#include "crc32c_fold.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace outlast {

#if defined(__x86_64__)

namespace {

// Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Intel, 2009), in the
// reflected representation: in a 32-bit word bit i stands for x^(31-i), in a 64-bit lane for x^(63-i).

constexpr uint32_t poly = 0x82f63b78u;
constexpr uint32_t one = 0x80000000u;

constexpr uint32_t times_x(uint32_t a) { return (a & 1) ? (a >> 1) ^ poly : a >> 1; }

constexpr uint32_t power_of_x(uint32_t n) {
    uint32_t a = one;
    while (n-- > 0) a = times_x(a);
    return a;
}

// Two lanes (low = earlier bytes, degrees 64 and up) move `bits` ahead.  A carry-less product of two reflected 64-bit
// lanes has one factor x too many to be a reflected 128-bit value, and a 32-bit constant in a lane counts x^32 more:
// hence degrees 64 + bits - 33 and bits - 33.
struct Constants {
    uint64_t low, high;
};
constexpr Constants constants(uint32_t bits) { return {power_of_x(bits + 31), power_of_x(bits - 33)}; }

constexpr Constants by_2048 = constants(2048), by_1536 = constants(1536), by_1024 = constants(1024), by_512 = constants(512),
                    by_384 = constants(384), by_256 = constants(256), by_128 = constants(128);

#define OUTLAST_FOLD_TARGET __attribute__((target("sse4.2,pclmul,avx512f,avx512vl,vpclmulqdq")))

OUTLAST_FOLD_TARGET inline __m512i wide(Constants k) {
    const auto low = static_cast<int64_t>(k.low), high = static_cast<int64_t>(k.high);
    return _mm512_set_epi64(high, low, high, low, high, low, high, low);
}

OUTLAST_FOLD_TARGET inline __m512i ahead(__m512i x, __m512i k, __m512i onto) {
    // 0x96: exclusive or of all three
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, k, 0x00), _mm512_clmulepi64_epi128(x, k, 0x11), onto, 0x96);
}

OUTLAST_FOLD_TARGET inline __m128i ahead(__m128i x, Constants c, __m128i onto) {
    const __m128i k = _mm_set_epi64x(static_cast<int64_t>(c.high), static_cast<int64_t>(c.low));
    return _mm_ternarylogic_epi64(_mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11), onto, 0x96);
}

enum class To { nowhere, cache, memory };

template <To to> OUTLAST_FOLD_TARGET inline __m512i take(const uint8_t* from, uint8_t* out) {
    const __m512i x = _mm512_loadu_si512(from);
    if constexpr (to == To::cache) _mm512_storeu_si512(out, x);
    if constexpr (to == To::memory) _mm512_stream_si512(reinterpret_cast<__m512i*>(out), x);
    return x;
}

// Four registers, because a multiplication takes four or more cycles.
template <To to> OUTLAST_FOLD_TARGET uint32_t fold(uint32_t crc, const uint8_t* from, uint8_t* out, size_t n) {
    __m512i a = take<to>(from, out), b = take<to>(from + 64, out + 64);
    __m512i c = take<to>(from + 128, out + 128), d = take<to>(from + 192, out + 192);
    a = _mm512_xor_si512(a, _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
    const __m512i k = wide(by_2048);
    for (size_t i = crc32c_fold_block; i < n; i += crc32c_fold_block) {
        a = ahead(a, k, take<to>(from + i, out + i));
        b = ahead(b, k, take<to>(from + i + 64, out + i + 64));
        c = ahead(c, k, take<to>(from + i + 128, out + i + 128));
        d = ahead(d, k, take<to>(from + i + 192, out + i + 192));
    }
    if constexpr (to == To::memory) _mm_sfence();  // the commit that follows is an ordinary store
    d = ahead(a, wide(by_1536), d);
    d = ahead(b, wide(by_1024), d);
    d = ahead(c, wide(by_512), d);
    alignas(64) __m128i lane[4];
    _mm512_store_si512(lane, d);
    __m128i x = ahead(lane[0], by_384, lane[3]);
    x = ahead(lane[1], by_256, x);
    x = ahead(lane[2], by_128, x);
    const uint64_t r = _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(x)));
    return static_cast<uint32_t>(_mm_crc32_u64(r, static_cast<uint64_t>(_mm_extract_epi64(x, 1))));
}

}  // namespace

bool crc32c_fold_usable() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("vpclmulqdq") &&
           __builtin_cpu_supports("sse4.2");
}

uint32_t crc32c_fold(uint32_t crc, const void* from, size_t n) {
    return fold<To::nowhere>(crc, static_cast<const uint8_t*>(from), nullptr, n);
}

uint32_t crc32c_fold_copy(uint32_t crc, void* to, const void* from, size_t n, bool past_caches) {
    auto* f = static_cast<const uint8_t*>(from);
    auto* t = static_cast<uint8_t*>(to);
    return past_caches ? fold<To::memory>(crc, f, t, n) : fold<To::cache>(crc, f, t, n);
}

#else

bool crc32c_fold_usable() { return false; }
uint32_t crc32c_fold(uint32_t crc, const void*, size_t) { return crc; }
uint32_t crc32c_fold_copy(uint32_t crc, void*, const void*, size_t, bool) { return crc; }

#endif

}  // namespace outlast
