// 16 float lanes on AVX-512. Same interface as simd_avx2.h and simd_generic.h; included by one translation unit only.
#include <immintrin.h>

#include <cstdint>

namespace {

using F16 = __m512;
using Words = __m512i;                      // 16 x uint32

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
OL_INLINE F16 load_int8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
}
OL_INLINE Words load_words(const uint8_t *p) { return _mm512_loadu_si512(p); }
// Nibble I of each word times 16^I (nibble 7: times 1); see kNibbleScale.
template <int I>
OL_INLINE F16 nibble(Words w) {
    if constexpr (I == 7) return _mm512_cvtepi32_ps(_mm512_srli_epi32(w, 28));
    else return _mm512_cvtepi32_ps(_mm512_and_si512(w, _mm512_set1_epi32(15 << 4 * I)));
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
OL_INLINE float max_lanes(F16 x) { return _mm512_reduce_max_ps(x); }
OL_INLINE float lane0(F16 x) { return _mm512_cvtss_f32(x); }

// Tokens per tile and row groups in flight (by tokens of the tile), so that the accumulators fit 32 registers.
constexpr int kTile = 8;
constexpr int flight(int tokens) { return tokens <= 2 ? 4 : 2; }

}  // namespace
