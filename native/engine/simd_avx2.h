// 16 float lanes as two AVX2 registers. Same interface as simd_avx512.h; included by one translation unit only.
#include <immintrin.h>

#include <cstdint>

namespace {

struct F16 {
    __m256 a, b;                            // lanes 0-7, 8-15
};
struct Words {
    __m256i a, b;
};

#define OL_INLINE [[gnu::always_inline]] static inline

OL_INLINE F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
OL_INLINE F16 set1(float x) {
    const __m256 v = _mm256_set1_ps(x);
    return {v, v};
}
OL_INLINE F16 load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
OL_INLINE void store(float *p, F16 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
OL_INLINE F16 add(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
OL_INLINE F16 sub(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
OL_INLINE F16 mul(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
OL_INLINE F16 div(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
OL_INLINE F16 fma(F16 x, F16 y, F16 z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
OL_INLINE F16 max(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
OL_INLINE F16 min(F16 x, F16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }

OL_INLINE F16 load_half(const uint8_t *p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p + 16)))};
}
OL_INLINE F16 load_int8(const uint8_t *p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p + 8))))};
}
OL_INLINE Words load_words(const uint8_t *p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p + 32))};
}
// Nibble I of each word times 16^I (nibble 7: times 1); see kNibbleScale.
template <int I>
OL_INLINE F16 nibble(Words w) {
    if constexpr (I == 7) {
        return {_mm256_cvtepi32_ps(_mm256_srli_epi32(w.a, 28)), _mm256_cvtepi32_ps(_mm256_srli_epi32(w.b, 28))};
    } else {
        const __m256i mask = _mm256_set1_epi32(15 << 4 * I);
        return {_mm256_cvtepi32_ps(_mm256_and_si256(w.a, mask)), _mm256_cvtepi32_ps(_mm256_and_si256(w.b, mask))};
    }
}
OL_INLINE void fetch(const void *p) { _mm_prefetch(static_cast<const char *>(p), _MM_HINT_T0); }

OL_INLINE __m256 power_of_two8(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
OL_INLINE F16 power_of_two(F16 n) { return {power_of_two8(n.a), power_of_two8(n.b)}; }
OL_INLINE F16 zero_below(F16 x, F16 limit, F16 y) {
    return {_mm256_and_ps(_mm256_cmp_ps(x.a, limit.a, _CMP_NLT_UQ), y.a),
            _mm256_and_ps(_mm256_cmp_ps(x.b, limit.b, _CMP_NLT_UQ), y.b)};
}

OL_INLINE float sum_lanes(F16 x) {
    const __m256 a = _mm256_add_ps(x.a, x.b);
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
OL_INLINE float max_lanes(F16 x) {
    const __m256 a = _mm256_max_ps(x.a, x.b);
    const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}
OL_INLINE float lane0(F16 x) { return _mm256_cvtss_f32(x.a); }

// 16 registers: four tokens of one group, or one token of two groups.
constexpr int kTile = 4;
constexpr int flight(int tokens) { return tokens == 1 ? 2 : 1; }

}  // namespace
