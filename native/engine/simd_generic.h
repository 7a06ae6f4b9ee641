// 16 float lanes in portable vector code (GCC and Clang lower it to what the target has). No fused multiply-add, so
// its bits differ from the AVX builds'. Same interface as simd_avx512.h; included by one translation unit only.
#include <cstdint>
#include <cstring>

#include "half.h"

namespace {

typedef float F16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

#define OL_INLINE [[gnu::always_inline]] static inline

OL_INLINE F16 zero() { return F16{}; }
OL_INLINE F16 set1(float x) { return F16{} + x; }
OL_INLINE F16 load(const float *p) {
    F16 x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
OL_INLINE void store(float *p, F16 x) { std::memcpy(p, &x, sizeof x); }
OL_INLINE F16 add(F16 a, F16 b) { return a + b; }
OL_INLINE F16 sub(F16 a, F16 b) { return a - b; }
OL_INLINE F16 mul(F16 a, F16 b) { return a * b; }
OL_INLINE F16 div(F16 a, F16 b) { return a / b; }
OL_INLINE F16 fma(F16 a, F16 b, F16 c) { return a * b + c; }              // two roundings: contraction is off
OL_INLINE F16 max(F16 a, F16 b) { return a > b ? a : b; }                 // b where either is NaN
OL_INLINE F16 min(F16 a, F16 b) { return a < b ? a : b; }

OL_INLINE F16 load_half(const uint8_t *p) {
    F16 x;
    for (int i = 0; i < 16; ++i) {
        uint16_t h;
        std::memcpy(&h, p + 2 * i, 2);
        x[i] = half_to_float(h);
    }
    return x;
}
OL_INLINE F16 load_int8(const uint8_t *p) {
    typedef int8_t B16 __attribute__((vector_size(16)));
    B16 b;
    std::memcpy(&b, p, 16);
    return __builtin_convertvector(b, F16);
}
OL_INLINE Words load_words(const uint8_t *p) {
    Words w;
    std::memcpy(&w, p, sizeof w);
    return w;
}
// Nibble I of each word times 16^I (nibble 7: times 1); see kNibbleScale.
template <int I>
OL_INLINE F16 nibble(Words w) {
    if constexpr (I == 7) return __builtin_convertvector(I16(w >> 28), F16);
    else return __builtin_convertvector(I16(w & (15u << 4 * I)), F16);
}
OL_INLINE void fetch(const void *p) { __builtin_prefetch(p); }

OL_INLINE F16 power_of_two(F16 n) {
    const I16 bits = (__builtin_convertvector(n, I16) + 127) << 23;
    F16 out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}
OL_INLINE F16 zero_below(F16 x, F16 limit, F16 y) { return x < limit ? F16{} : y; }

OL_INLINE float sum_lanes(F16 x) {
    float s[16];
    store(s, x);
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) s[i] += s[i + half];
    return s[0];
}
OL_INLINE float max_lanes(F16 x) {
    float best = x[0];
    for (int i = 1; i < 16; ++i) best = x[i] > best ? x[i] : best;
    return best;
}
OL_INLINE float lane0(F16 x) { return x[0]; }

constexpr int kTile = 2;
constexpr int flight(int) { return 1; }

}  // namespace
