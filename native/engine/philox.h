/* Philox 4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11). */
#ifndef OUTLAST_ENGINE_PHILOX_H
#define OUTLAST_ENGINE_PHILOX_H
#include <array>
#include <cstdint>

namespace outlast::engine {

inline std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t{0xD2511F53u} * counter[0], b = uint64_t{0xCD9E8D57u} * counter[2];
        counter = {uint32_t(b >> 32) ^ counter[1] ^ key[0], uint32_t(b), uint32_t(a >> 32) ^ counter[3] ^ key[1],
                   uint32_t(a)};
        key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
    }
    return counter;
}

/* Uniform in [0, 1) with 53 bits: the random number of position `position` of choice `stream` of a request. */
inline double uniform(uint64_t seed, uint32_t stream, uint32_t position) {
    const auto r = philox4x32({position, 0, stream, 0}, {uint32_t(seed), uint32_t(seed >> 32)});
    return double((uint64_t{r[0]} << 32 | r[1]) >> 11) * 0x1p-53;
}

}  // namespace outlast::engine
#endif
