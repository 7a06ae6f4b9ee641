// 16 float lanes in portable vector code (GCC and Clang lower it to what the target has). No fused multiply-add, so
// its bits differ from the AVX builds'. Same interface as simd_avx512.h; included by one translation unit only.
#include <cstdint>
#include <cstring>

#include "half.h"

namespace {

typedef float F16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));

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
OL_INLINE F16 sum_each(const float (*rows)[16]) {
    F16 out;
    for (int i = 0; i < 16; ++i) out[i] = sum_lanes(load(rows[i]));
    return out;
}
OL_INLINE float max_lanes(F16 x) {
    float best = x[0];
    for (int i = 1; i < 16; ++i) best = x[i] > best ? x[i] : best;
    return best;
}
OL_INLINE float lane0(F16 x) { return x[0]; }

// ---- rows of a group, as many as a register has lanes ---------------------------------------------------------

using Lanes = F16;                          // float per row
using Ints = U16;                           // int32 per row, or four bytes of neighbouring columns
constexpr int kLanes = 16;

OL_INLINE Lanes lanes_set1(float x) { return set1(x); }
OL_INLINE Lanes lanes_load(const float *p) { return load(p); }
OL_INLINE void lanes_store(float *p, Lanes x) { store(p, x); }
OL_INLINE Lanes lanes_half(const uint8_t *p) { return load_half(p); }
OL_INLINE Lanes lanes_bf16(const uint8_t *p) {
    typedef uint16_t S16 __attribute__((vector_size(32)));
    S16 s;
    std::memcpy(&s, p, sizeof s);
    const U16 bits = __builtin_convertvector(s, U16) << 16;
    F16 out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}
OL_INLINE Lanes lanes_u8(const uint8_t *p) {
    typedef uint8_t B16 __attribute__((vector_size(16)));
    B16 b;
    std::memcpy(&b, p, 16);
    return __builtin_convertvector(b, F16);
}
OL_INLINE Lanes lanes_s8(const uint8_t *p) {
    typedef int8_t B16 __attribute__((vector_size(16)));
    B16 b;
    std::memcpy(&b, p, 16);
    return __builtin_convertvector(b, F16);
}

OL_INLINE Ints ints_set1(int32_t x) { return Ints{} + uint32_t(x); }
OL_INLINE Ints load_quads(const uint8_t *p) {
    Ints w;
    std::memcpy(&w, p, sizeof w);
    return w;
}
OL_INLINE Ints low_nibbles(Ints w) { return w & 0x0f0f0f0fu; }
OL_INLINE Ints high_nibbles(Ints w) { return (w >> 4) & 0x0f0f0f0fu; }
// Bits 2 I and 2 I + 1 of each byte, as bits 4 and 5.
template <int I>
OL_INLINE Ints crumbs_high(Ints w) { return ((w >> 2 * I) & 0x03030303u) << 4; }
OL_INLINE Ints either(Ints x, Ints y) { return x | y; }
template <int I>
OL_INLINE Ints byte_of(Ints w) { return (w >> 8 * I) & 255u; }
OL_INLINE Ints add(Ints x, Ints y) { return x + y; }
template <int N>
OL_INLINE Ints shift_left(Ints x) { return x << N; }
OL_INLINE Lanes to_float(Ints x) { return __builtin_convertvector(I16(x), F16); }

// Sums of products of unsigned weights and signed activations.
struct Dot {
    Ints sum;
};
using Dot8 = Dot;
OL_INLINE Dot dot_zero(Dot *) { return {Ints{}}; }
OL_INLINE Dot dot_add(Dot d, Ints w, int32_t quad) {
    for (int i = 0; i < 4; ++i) d.sum += ((w >> 8 * i) & 255u) * uint32_t(int32_t(int8_t(uint32_t(quad) >> 8 * i)));
    return d;
}
OL_INLINE Ints dot_sum(Dot d) { return d.sum; }

constexpr int kTile = 2;
constexpr int flight(int) { return 1; }

}  // namespace
