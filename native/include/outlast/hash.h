/* NH, the almost-universal hash of UMAC (RFC 4418, section 5.2), with four Toeplitz iterations.
 *
 * For two different inputs of the same length (a multiple of 32 bytes, at most OL_NH_MAX_BYTES) and a random key, all
 * four values are equal with probability at most 2^-128 (Black, Halevi, Krawczyk, Krovetz, Rogaway, CRYPTO '99: 2^-32
 * per iteration).  The inner loop is a 32x32->64 multiply per 8 bytes, which every vector unit has; sums are modulo
 * 2^64, so the order of additions does not matter and all forms below give the same value.
 */
#ifndef OUTLAST_HASH_H
#define OUTLAST_HASH_H
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define OL_NH_MAX_BYTES 4096u
#define OL_NH_SHIFT 4u /* key words between iterations */
#define OL_NH_KEY_WORDS (OL_NH_MAX_BYTES / 4 + 3 * OL_NH_SHIFT)

struct ol_digest {
    uint64_t v[4];
    bool operator==(const ol_digest &o) const { return std::memcmp(v, o.v, sizeof v) == 0; }
};

static inline void ol_nh_plain(const uint32_t *key, const void *data, uint32_t bytes, ol_digest *out) {
    for (uint32_t t = 0; t < 4; ++t) {
        const uint32_t *k = key + t * OL_NH_SHIFT;
        uint64_t sum = 0;
        for (uint32_t i = 0; i < bytes / 4; i += 2) {
            uint32_t m[2];
            std::memcpy(m, static_cast<const char *>(data) + 4 * i, 8);
            sum += static_cast<uint64_t>(m[0] + k[i]) * static_cast<uint32_t>(m[1] + k[i + 1]);
        }
        out->v[t] = sum;
    }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static inline void ol_nh_avx2(const uint32_t *key, const void *data, uint32_t bytes, ol_digest *out) {
    __m256i sum[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
    for (uint32_t i = 0; i < bytes / 4; i += 8) {
        const __m256i m = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(static_cast<const char *>(data) + 4 * i));
        for (uint32_t t = 0; t < 4; ++t) {
            const __m256i k = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(key + i + t * OL_NH_SHIFT));
            const __m256i x = _mm256_add_epi32(m, k);
            sum[t] = _mm256_add_epi64(sum[t], _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32)));
        }
    }
    for (uint32_t t = 0; t < 4; ++t) {
        alignas(32) uint64_t lane[4];
        _mm256_store_si256(reinterpret_cast<__m256i *>(lane), sum[t]);
        out->v[t] = lane[0] + lane[1] + lane[2] + lane[3];
    }
}
#endif

/* bytes: a multiple of 32; key: OL_NH_KEY_WORDS words */
static inline void ol_nh(const uint32_t *key, const void *data, uint32_t bytes, ol_digest *out) {
#if defined(__x86_64__)
    static const bool avx2 = __builtin_cpu_supports("avx2");
    if (avx2) return ol_nh_avx2(key, data, bytes, out);
#endif
    ol_nh_plain(key, data, bytes, out);
}

/* Key words from a 64-bit seed by SplitMix64 (Steele, Lea, Flood, OOPSLA '14). */
static inline void ol_nh_key(uint64_t seed, uint32_t *key) {
    for (uint32_t i = 0; i < OL_NH_KEY_WORDS; ++i) {
        seed += 0x9e3779b97f4a7c15ull;
        uint64_t z = seed;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        key[i] = static_cast<uint32_t>((z ^ (z >> 31)) >> 16);
    }
}
#endif
