// 16 float lanes on AVX-512, with OL_VNNI for integer dot products. Same interface as simd_avx2.h and simd_generic.h; included by one translation unit only.
#include <immintrin.h>

#include <cstdint>

namespace {

using F16 = __m512;

#define OL_INLINE [[gnu::always_inline]] static inline

OL_INLINE F16 zero() { return _mm512_setzero_ps(); }
OL_INLINE F16 set1(float x) { return _mm512_set1_ps(x); }
OL_INLINE F16 load(const float *p) { return _mm512_loadu_ps(p); }
OL_INLINE void store(float *p, F16 x) { _mm512_storeu_ps(p, x); }
OL_INLINE F16 add(F16 a, F16 b) { return _mm512_add_ps(a, b); }
OL_INLINE F16 sub(F16 a, F16 b) { return _mm512_sub_ps(a, b); }
OL_INLINE F16 mul(F16 a, F16 b) { return _mm512_mul_ps(a, b); }
OL_INLINE F16 div(F16 a, F16 b) { return _mm512_div_ps(a, b); }
OL_INLINE F16 fma(F16 a, F16 b, F16 c) { return _mm512_fmadd_ps(a, b, c); }
OL_INLINE F16 max(F16 a, F16 b) { return _mm512_max_ps(a, b); }          // b where either is NaN
OL_INLINE F16 min(F16 a, F16 b) { return _mm512_min_ps(a, b); }

OL_INLINE F16 load_half(const uint8_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}
OL_INLINE void fetch(const void *p) { _mm_prefetch(static_cast<const char *>(p), _MM_HINT_T0); }

// 2^n for integral n in [-126, 127]
OL_INLINE F16 power_of_two(F16 n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
// y, but 0 where x < limit
OL_INLINE F16 zero_below(F16 x, F16 limit, F16 y) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), y);
}

OL_INLINE __m256 upper(F16 x) { return _mm512_extractf32x8_ps(x, 1); }
OL_INLINE __m256 lower(F16 x) { return _mm512_castps512_ps256(x); }
OL_INLINE float fold8(__m256 a) {
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
OL_INLINE float sum_lanes(F16 x) { return fold8(_mm256_add_ps(lower(x), upper(x))); }
// sum_lanes of each of 16 vectors, by the same additions.
OL_INLINE F16 sum_each(const float (*rows)[16]) {
    constexpr int kPlace[16] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};   // where folding wants row i
    F16 v[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) v[kPlace[i]] = _mm512_load_ps(rows[i]);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
        v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[i], v[i + 8], 0x44), _mm512_shuffle_f32x4(v[i], v[i + 8], 0xee));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
        v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[i], v[i + 4], 0x88), _mm512_shuffle_f32x4(v[i], v[i + 4], 0xdd));
    for (int i = 0; i < 2; ++i)
        v[i] = _mm512_add_ps(_mm512_shuffle_ps(v[i], v[i + 2], 0x44), _mm512_shuffle_ps(v[i], v[i + 2], 0xee));
    return _mm512_add_ps(_mm512_shuffle_ps(v[0], v[1], 0x88), _mm512_shuffle_ps(v[0], v[1], 0xdd));
}
OL_INLINE float max_lanes(F16 x) { return _mm512_reduce_max_ps(x); }
OL_INLINE float lane0(F16 x) { return _mm512_cvtss_f32(x); }

// ---- rows of a group, as many as a register has lanes ---------------------------------------------------------

using Lanes = __m512;                       // float per row
using Ints = __m512i;                       // int32 per row, or four bytes of neighbouring columns
constexpr int kLanes = 16;

OL_INLINE Lanes lanes_set1(float x) { return _mm512_set1_ps(x); }
OL_INLINE Lanes lanes_load(const float *p) { return _mm512_loadu_ps(p); }
OL_INLINE void lanes_store(float *p, Lanes x) { _mm512_storeu_ps(p, x); }
OL_INLINE Lanes lanes_half(const uint8_t *p) { return load_half(p); }
OL_INLINE Lanes lanes_bf16(const uint8_t *p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
OL_INLINE Lanes lanes_u8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
}
OL_INLINE Lanes lanes_s8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
}

OL_INLINE Ints ints_set1(int32_t x) { return _mm512_set1_epi32(x); }
OL_INLINE Ints load_quads(const uint8_t *p) { return _mm512_loadu_si512(p); }
OL_INLINE Ints low_nibbles(Ints w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
OL_INLINE Ints high_nibbles(Ints w) { return _mm512_and_si512(_mm512_srli_epi16(w, 4), _mm512_set1_epi8(15)); }
// Bits 2 I and 2 I + 1 of each byte, as bits 4 and 5.
template <int I>
OL_INLINE Ints crumbs_high(Ints w) {
    const Ints moved = I == 0 ? _mm512_slli_epi16(w, 4) : I == 1 ? _mm512_slli_epi16(w, 2) : I == 2 ? w : _mm512_srli_epi16(w, 2);
    return _mm512_and_si512(moved, _mm512_set1_epi8(0x30));
}
OL_INLINE Ints either(Ints x, Ints y) { return _mm512_or_si512(x, y); }
template <int I>
OL_INLINE Ints byte_of(Ints w) {
    return _mm512_and_si512(_mm512_srli_epi32(w, 8 * I), _mm512_set1_epi32(255));
}
OL_INLINE Ints add(Ints x, Ints y) { return _mm512_add_epi32(x, y); }
template <int N>
OL_INLINE Ints shift_left(Ints x) { return _mm512_slli_epi32(x, N); }
OL_INLINE Lanes to_float(Ints x) { return _mm512_cvtepi32_ps(x); }

// Sums of products of unsigned weights and signed activations. Dot: weights up to 15, eight quads. Dot8: up to 255.
#ifdef OL_VNNI
struct Dot {
    Ints sum;
};
using Dot8 = Dot;
OL_INLINE Dot dot_zero(Dot *) { return {_mm512_setzero_si512()}; }
OL_INLINE Dot dot_add(Dot d, Ints w, int32_t quad) { return {_mm512_dpbusd_epi32(d.sum, w, _mm512_set1_epi32(quad))}; }
OL_INLINE Ints dot_sum(Dot d) { return d.sum; }
#else
struct Dot {
    Ints pairs;                             // 16-bit sums: 8 * 2 * 15 * 128 = 30720
};
OL_INLINE Dot dot_zero(Dot *) { return {_mm512_setzero_si512()}; }
OL_INLINE Dot dot_add(Dot d, Ints w, int32_t quad) {
    return {_mm512_add_epi16(d.pairs, _mm512_maddubs_epi16(w, _mm512_set1_epi32(quad)))};
}
OL_INLINE Ints dot_sum(Dot d) { return _mm512_madd_epi16(d.pairs, _mm512_set1_epi16(1)); }
struct Dot8 {
    Dot low, high;
};
OL_INLINE Dot8 dot_zero(Dot8 *) { return {dot_zero(static_cast<Dot *>(nullptr)), dot_zero(static_cast<Dot *>(nullptr))}; }
OL_INLINE Dot8 dot_add(Dot8 d, Ints w, int32_t quad) {
    return {dot_add(d.low, low_nibbles(w), quad), dot_add(d.high, high_nibbles(w), quad)};
}
OL_INLINE Ints dot_sum(Dot8 d) { return add(dot_sum(d.low), shift_left<4>(dot_sum(d.high))); }
#endif

// Tokens per tile, and units of kLanes rows in flight (by tokens of the tile), so that the sums fit 32 registers.
constexpr int kTile = 8;
constexpr int flight(int tokens) { return tokens <= 2 ? 4 : tokens == 4 ? 2 : 1; }

}  // namespace
