// IEEE half precision without hardware help. Static, so that each translation unit keeps its own copy (see kernels_*.cpp).
#ifndef OUTLAST_ENGINE_HALF_H
#define OUTLAST_ENGINE_HALF_H
#include <cstdint>
#include <cstring>

static inline float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000u) << 16;
    const uint32_t exponent = (h >> 10) & 31, mantissa = h & 1023;
    uint32_t bits;
    if (exponent == 0) {                                                  // zero or subnormal: mantissa * 2^-24, exact
        const float value = float(mantissa) * 0x1p-24f;
        std::memcpy(&bits, &value, 4);
        bits |= sign;
    } else if (exponent == 31) {                                          // infinity or NaN
        bits = sign | 0x7f800000u | (mantissa << 13);
    } else {
        bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
    }
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}
#endif
