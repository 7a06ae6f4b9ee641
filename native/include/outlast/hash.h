/* NH, the almost-universal hash of UMAC (RFC 4418, section 5.2), with four Toeplitz iterations.
 *
 * For two different inputs of the same length (a multiple of 32 bytes, at most OL_NH_MAX_BYTES) and a random key, all
 * four values are equal with probability at most 2^-128 (Black, Halevi, Krawczyk, Krovetz, Rogaway, CRYPTO '99: 2^-32
 * per iteration).  The inner loop is a 32x32->64 multiply per 8 bytes, which every vector unit has.
 */
#ifndef OUTLAST_HASH_H
#define OUTLAST_HASH_H
#include <cstdint>
#include <cstring>

#define OL_NH_MAX_BYTES 4096u
#define OL_NH_SHIFT 4u /* key words between iterations */
#define OL_NH_KEY_WORDS (OL_NH_MAX_BYTES / 4 + 3 * OL_NH_SHIFT)

struct ol_digest {
    uint64_t v[4];
    bool operator==(const ol_digest &o) const { return std::memcmp(v, o.v, sizeof v) == 0; }
};

/* bytes: a multiple of 32; key: OL_NH_KEY_WORDS words */
static inline __attribute__((always_inline)) void ol_nh(const uint32_t *key, const void *data, uint32_t bytes, ol_digest *out) {
    const auto *m = static_cast<const uint32_t *>(data);
    uint64_t s[4] = {0, 0, 0, 0};
    const uint32_t words = bytes / 4;
    for (uint32_t t = 0; t < 4; ++t) {
        const uint32_t *k = key + t * OL_NH_SHIFT;
        uint64_t sum = 0;
        for (uint32_t i = 0; i < words; i += 2)
            sum += static_cast<uint64_t>(static_cast<uint32_t>(m[i] + k[i])) * static_cast<uint32_t>(m[i + 1] + k[i + 1]);
        s[t] = sum;
    }
    for (uint32_t t = 0; t < 4; ++t) out->v[t] = s[t];
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
