// 16 float lanes as two AVX2 registers. Same interface as simd_avx512.h; included by one translation unit only.
#include <immintrin.h>

#include <cstdint>

namespace {

struct F16 {
    __m256 a, b;                            // lanes 0-7, 8-15
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
// sum_lanes of each of 16 vectors, by the same additions.
OL_INLINE __m256 sum_eight(const float (*rows)[16]) {
    constexpr int kPlace[8] = {0, 2, 1, 3, 4, 6, 5, 7};                                  // where folding wants row i
    __m256 v[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) v[kPlace[i]] = _mm256_add_ps(_mm256_load_ps(rows[i]), _mm256_load_ps(rows[i] + 8));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
        v[i] = _mm256_add_ps(_mm256_permute2f128_ps(v[i], v[i + 4], 0x20), _mm256_permute2f128_ps(v[i], v[i + 4], 0x31));
    for (int i = 0; i < 2; ++i)
        v[i] = _mm256_add_ps(_mm256_shuffle_ps(v[i], v[i + 2], 0x44), _mm256_shuffle_ps(v[i], v[i + 2], 0xee));
    return _mm256_add_ps(_mm256_shuffle_ps(v[0], v[1], 0x88), _mm256_shuffle_ps(v[0], v[1], 0xdd));
}
OL_INLINE F16 sum_each(const float (*rows)[16]) { return {sum_eight(rows), sum_eight(rows + 8)}; }
OL_INLINE float max_lanes(F16 x) {
    const __m256 a = _mm256_max_ps(x.a, x.b);
    const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}
OL_INLINE float lane0(F16 x) { return _mm256_cvtss_f32(x.a); }

// ---- rows of a group, as many as a register has lanes ---------------------------------------------------------

using Lanes = __m256;                       // float per row
using Ints = __m256i;                       // int32 per row, or four bytes of neighbouring columns
constexpr int kLanes = 8;

OL_INLINE Lanes lanes_set1(float x) { return _mm256_set1_ps(x); }
OL_INLINE Lanes lanes_load(const float *p) { return _mm256_loadu_ps(p); }
OL_INLINE void lanes_store(float *p, Lanes x) { _mm256_storeu_ps(p, x); }
OL_INLINE Lanes add(Lanes x, Lanes y) { return _mm256_add_ps(x, y); }
OL_INLINE Lanes mul(Lanes x, Lanes y) { return _mm256_mul_ps(x, y); }
OL_INLINE Lanes fma(Lanes x, Lanes y, Lanes z) { return _mm256_fmadd_ps(x, y, z); }
OL_INLINE Lanes lanes_half(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))); }
OL_INLINE Lanes lanes_bf16(const uint8_t *p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
OL_INLINE Lanes lanes_u8(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
}
OL_INLINE Lanes lanes_s8(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
}

OL_INLINE Ints ints_set1(int32_t x) { return _mm256_set1_epi32(x); }
OL_INLINE Ints load_quads(const uint8_t *p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }
OL_INLINE Ints low_nibbles(Ints w) { return _mm256_and_si256(w, _mm256_set1_epi8(15)); }
OL_INLINE Ints high_nibbles(Ints w) { return _mm256_and_si256(_mm256_srli_epi16(w, 4), _mm256_set1_epi8(15)); }
// Bits 2 I and 2 I + 1 of each byte, as bits 4 and 5.
template <int I>
OL_INLINE Ints crumbs_high(Ints w) {
    const Ints moved = I == 0 ? _mm256_slli_epi16(w, 4) : I == 1 ? _mm256_slli_epi16(w, 2) : I == 2 ? w : _mm256_srli_epi16(w, 2);
    return _mm256_and_si256(moved, _mm256_set1_epi8(0x30));
}
OL_INLINE Ints either(Ints x, Ints y) { return _mm256_or_si256(x, y); }
template <int I>
OL_INLINE Ints byte_of(Ints w) {
    return _mm256_and_si256(_mm256_srli_epi32(w, 8 * I), _mm256_set1_epi32(255));
}
OL_INLINE Ints add(Ints x, Ints y) { return _mm256_add_epi32(x, y); }
template <int N>
OL_INLINE Ints shift_left(Ints x) { return _mm256_slli_epi32(x, N); }
OL_INLINE Lanes to_float(Ints x) { return _mm256_cvtepi32_ps(x); }

// Sums of products of unsigned weights and signed activations. Dot: weights up to 15, eight quads; products of pairs
// stay in 16 bits (8 * 2 * 15 * 128 = 30720). Dot8: weights up to 255, as two nibbles.
struct Dot {
    __m256i pairs;
};
OL_INLINE Dot dot_zero(Dot *) { return {_mm256_setzero_si256()}; }
OL_INLINE Dot dot_add(Dot d, Ints w, int32_t quad) {
    return {_mm256_add_epi16(d.pairs, _mm256_maddubs_epi16(w, _mm256_set1_epi32(quad)))};
}
OL_INLINE Ints dot_sum(Dot d) { return _mm256_madd_epi16(d.pairs, _mm256_set1_epi16(1)); }
struct Dot8 {
    Dot low, high;
};
OL_INLINE Dot8 dot_zero(Dot8 *) { return {dot_zero(static_cast<Dot *>(nullptr)), dot_zero(static_cast<Dot *>(nullptr))}; }
OL_INLINE Dot8 dot_add(Dot8 d, Ints w, int32_t quad) {
    return {dot_add(d.low, low_nibbles(w), quad), dot_add(d.high, high_nibbles(w), quad)};
}
OL_INLINE Ints dot_sum(Dot8 d) { return add(dot_sum(d.low), shift_left<4>(dot_sum(d.high))); }

// 16 registers: tokens per tile, and units of kLanes rows in flight (by tokens of the tile).
constexpr int kTile = 4;
constexpr int flight(int tokens) { return tokens <= 2 ? 2 : 1; }

}  // namespace
