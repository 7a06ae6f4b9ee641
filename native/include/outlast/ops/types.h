/* Element types in the operators' dialect: how each is loaded, computed with, and stored. */
#ifndef OUTLAST_OPS_TYPES_H
#define OUTLAST_OPS_TYPES_H
#include "outlast/dialect.h"
#include "outlast/tensor.h"

namespace OL_NAMESPACE {

struct ol_half {
    uint16_t bits;
};
struct ol_bfloat {
    uint16_t bits;
};

template <class To, class From> OL_DEVICE To ol_bits(const From &from) {
    static_assert(sizeof(To) == sizeof(From), "a reinterpretation keeps the size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

/* a if the condition holds, else b; without a branch that the compiler could merge with others into something that does
 * not vectorise. */
OL_DEVICE uint32_t ol_pick(bool condition, uint32_t a, uint32_t b) {
    const uint32_t mask = 0u - static_cast<uint32_t>(condition);
    return (a & mask) | (b & ~mask);
}

/* Branch-free both ways, so that loops over them vectorise; 16-bit patterns are 32-bit words on the way for the same
 * reason.  Rounding is to nearest, ties to even. */
OL_DEVICE float ol_half_to_float(uint32_t h) {
    const uint32_t sign = (h & 0x8000u) << 16, rest = (h & 0x7fffu) << 13;
    /* 2^112 moves the exponent from the half's bias to the float's; the product is exact, subnormals included. */
    const float scaled = ol_bits<float>(rest) * 0x1p112f;
    const uint32_t special = rest | 0x7f800000u; /* infinity and NaN keep their mantissa */
    return ol_bits<float>(sign | ol_pick(rest >= 0x0f800000u, special, ol_bits<uint32_t>(scaled)));
}
OL_DEVICE uint32_t ol_float_to_half(float f) {
    const uint32_t bits = ol_bits<uint32_t>(f), sign = (bits >> 16) & 0x8000u, value = bits & 0x7fffffffu;
    /* normal: round the mantissa to 10 bits in the integer, then rebias */
    const uint32_t rounded = value + 0xfffu + ((value >> 13) & 1u);
    const uint32_t normal = (rounded - 0x38000000u) >> 13;
    /* subnormal: adding 0.5 lets the float unit round at the bit that is 2^-24 */
    const uint32_t small = ol_bits<uint32_t>(ol_bits<float>(value) + 0.5f) - 0x3f000000u;
    const uint32_t finite = ol_pick(value < 0x38800000u, small, ol_pick(rounded >= 0x47800000u, 0x7c00u, normal));
    const uint32_t nan = 0x7e00u | ((value >> 13) & 0x3ffu);
    return sign | ol_pick(value > 0x7f800000u, nan, finite);
}
OL_DEVICE float ol_bfloat_to_float(uint32_t b) { return ol_bits<float>(b << 16); }
OL_DEVICE uint32_t ol_float_to_bfloat(float f) {
    const uint32_t bits = ol_bits<uint32_t>(f);
    const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return ol_pick((bits & 0x7fffffffu) > 0x7f800000u, 0x7fc0u, rounded >> 16);
}

/* ol_compute<T>: what a T is computed with. */
template <class T> struct ol_compute_of {
    typedef T type;
};
template <> struct ol_compute_of<ol_half> {
    typedef float type;
};
template <> struct ol_compute_of<ol_bfloat> {
    typedef float type;
};
template <class T> using ol_compute = typename ol_compute_of<T>::type;

template <class T> OL_DEVICE ol_compute<T> ol_load(const T *p) { return *p; }
template <> OL_DEVICE float ol_load<ol_half>(const ol_half *p) { return ol_half_to_float(p->bits); }
template <> OL_DEVICE float ol_load<ol_bfloat>(const ol_bfloat *p) { return ol_bfloat_to_float(p->bits); }
/* A bool in memory is a byte; anything but 0 counts as true. */
template <> OL_DEVICE bool ol_load<bool>(const bool *p) { return *reinterpret_cast<const uint8_t *>(p) != 0; }

template <class T> OL_DEVICE void ol_store(T *p, ol_compute<T> value) { *p = value; }
template <> OL_DEVICE void ol_store<ol_half>(ol_half *p, float value) {
    p->bits = static_cast<uint16_t>(ol_float_to_half(value));
}
template <> OL_DEVICE void ol_store<ol_bfloat>(ol_bfloat *p, float value) {
    p->bits = static_cast<uint16_t>(ol_float_to_bfloat(value));
}

}  // namespace OL_NAMESPACE
#endif
