/* Functions of one element that pointwise operators are made of.
 *
 * The float forms of exp, expm1, log, log1p, tanh, sigmoid, erf and what is built on them are branch-free, so that a loop
 * over them vectorises; measured errors stand in docs/reference/operators-numerics.md.  Their coefficients are minimax
 * fits of our own (iteratively reweighted least squares on Chebyshev nodes).  What is rare calls the C library.
 * Everything gives the same bits whether a loop was vectorised or not, so a fused operator equals its parts.
 */
#ifndef OUTLAST_OPS_MATH_H
#define OUTLAST_OPS_MATH_H
#include "outlast/ops/types.h"

#ifndef __CUDACC__
#include <cmath>
#endif

/* A fused multiply-add where the instruction exists.  OL_NO_FMA makes a build agree with one that lacks it. */
#if (defined(__FMA__) || defined(__CUDACC__) || defined(__aarch64__)) && !defined(OL_NO_FMA)
#define OL_HAS_FMA 1
#else
#define OL_HAS_FMA 0
#endif

namespace OL_NAMESPACE {

OL_DEVICE float ol_fma(float a, float b, float c) {
#if OL_HAS_FMA
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}
OL_DEVICE double ol_fma(double a, double b, double c) {
#if OL_HAS_FMA
    return __builtin_fma(a, b, c);
#else
    return a * b + c;
#endif
}

/* The C library, chosen by type. */
#define OL_LIBM1(name)                                                                                                 \
    OL_DEVICE float ol_##name(float x) { return ::name##f(x); }                                                        \
    OL_DEVICE double ol_##name(double x) { return ::name(x); }
#define OL_LIBM2(name)                                                                                                 \
    OL_DEVICE float ol_##name(float x, float y) { return ::name##f(x, y); }                                            \
    OL_DEVICE double ol_##name(double x, double y) { return ::name(x, y); }
OL_LIBM1(fabs)
OL_LIBM1(sqrt)
OL_LIBM1(floor)
OL_LIBM1(ceil)
OL_LIBM1(trunc)
OL_LIBM1(exp2)
OL_LIBM1(log2)
OL_LIBM1(log10)
OL_LIBM1(sin)
OL_LIBM1(cos)
OL_LIBM1(tan)
OL_LIBM1(asin)
OL_LIBM1(acos)
OL_LIBM1(atan)
OL_LIBM1(sinh)
OL_LIBM1(cosh)
OL_LIBM1(asinh)
OL_LIBM1(acosh)
OL_LIBM1(atanh)
OL_LIBM1(erfc)
OL_LIBM2(fmod)
OL_LIBM2(atan2)
OL_LIBM2(hypot)
OL_LIBM2(copysign)
OL_LIBM2(pow)
#undef OL_LIBM1
#undef OL_LIBM2
OL_DEVICE double ol_exp(double x) { return ::exp(x); }
OL_DEVICE double ol_expm1(double x) { return ::expm1(x); }
OL_DEVICE double ol_log(double x) { return ::log(x); }
OL_DEVICE double ol_log1p(double x) { return ::log1p(x); }
OL_DEVICE double ol_tanh(double x) { return ::tanh(x); }
OL_DEVICE double ol_erf(double x) { return ::erf(x); }
/* To the nearest integer, ties to even. */
OL_DEVICE float ol_round(float x) { return ::rintf(x); }
OL_DEVICE double ol_round(double x) { return ::rint(x); }

/* condition ? a : b on the bits.  Unlike a conditional expression it can not be merged with the conditions of its
 * surroundings into a choice between choices, which GCC does not vectorise. */
OL_DEVICE float ol_select(bool condition, float a, float b) {
    return ol_bits<float>(ol_pick(condition, ol_bits<uint32_t>(a), ol_bits<uint32_t>(b)));
}
OL_DEVICE double ol_select(bool condition, double a, double b) {
    const uint64_t mask = 0u - static_cast<uint64_t>(condition);
    return ol_bits<double>((ol_bits<uint64_t>(a) & mask) | (ol_bits<uint64_t>(b) & ~mask));
}
template <class C> OL_DEVICE C ol_infinity() { return static_cast<C>(__builtin_inff()); }

/* Towards zero; what does not fit becomes the smallest integer, as the x86 instructions have it. */
template <class I, class C> OL_DEVICE I ol_truncated(C x) {
#if defined(__x86_64__) && !defined(__CUDACC__)
    return static_cast<I>(x);
#else
    constexpr C edge = sizeof(I) == 8 ? C(9223372036854775808.0) : C(2147483648.0);
    return x >= -edge && x < edge ? static_cast<I>(x) : static_cast<I>(static_cast<I>(1) << (8 * sizeof(I) - 1));
#endif
}

/* x = n ln 2 + r with |r| <= ln 2 / 2; n as float and integer. */
struct ol_reduced {
    float r, n;
    int32_t whole;
};
OL_DEVICE ol_reduced ol_reduce_exp(float x) {
    const float magic = 0x1.8p23f; /* adding it rounds to an integer, which then stands in the low bits */
    const float shifted = ol_fma(x, 0x1.715476p+0f, magic), n = shifted - magic;
    /* ln 2 = 0.693359375 - 2.1219444e-4; the first has 9 bits, so n times it is exact without a fused multiply-add too */
    const float r = ol_fma(n, 2.12194440e-4f, ol_fma(n, -0.693359375f, x));
    return {r, n, static_cast<int32_t>(ol_bits<uint32_t>(shifted) - 0x4b400000u)};
}
/* exp(r) - 1 for the reduced r */
OL_DEVICE float ol_expm1_reduced(float r) {
    float q = 0.00138145813f;
    q = ol_fma(q, r, 0.00836872403f);
    q = ol_fma(q, r, 0.041668389f);
    q = ol_fma(q, r, 0.166665211f);
    q = ol_fma(q, r, 0.49999994f);
    return ol_fma(q, r * r, r);
}
OL_DEVICE float ol_power_of_two(int32_t n) { /* -126 ... 127 */
    return ol_bits<float>(static_cast<uint32_t>(n + 127) << 23);
}

OL_DEVICE float ol_exp(float x) {
    float bounded = x < -104.0f ? -104.0f : x; /* a NaN stays one */
    bounded = bounded > 89.0f ? 89.0f : bounded;
    const ol_reduced t = ol_reduce_exp(bounded);
    const int32_t half = t.whole >> 1; /* two steps: the second rounds once where the result is subnormal */
    return (1.0f + ol_expm1_reduced(t.r)) * ol_power_of_two(half) * ol_power_of_two(t.whole - half);
}
OL_DEVICE float ol_exp_moderate(float x) { /* |x| < 87: neither overflows nor becomes subnormal */
    const ol_reduced t = ol_reduce_exp(x);
    return (1.0f + ol_expm1_reduced(t.r)) * ol_power_of_two(t.whole);
}
OL_DEVICE float ol_expm1(float x) {
    float bounded = x < -20.0f ? -20.0f : x;
    bounded = bounded > 89.0f ? 89.0f : bounded;
    const ol_reduced t = ol_reduce_exp(bounded);
    const int32_t half = t.whole >> 1;
    const float a = ol_power_of_two(half), b = ol_power_of_two(t.whole - half), p = ol_expm1_reduced(t.r);
    /* 2^n p + (2^n - 1): the difference is exact where it matters; above 2^24 the 1 is lost in rounding anyway */
    const float large = (1.0f + p) * a * b, small = ol_fma(p, a * b, a * b - 1.0f);
    const float value = t.whole > 24 ? large : small;
    return x == 0.0f ? x : value; /* keeps -0 */
}
OL_DEVICE float ol_log_of_one_plus(float f, float e) { /* log(1 + f) + e ln 2, sqrt(1/2) - 1 <= f <= sqrt(2) - 1 */
    float p = 0.0674660131f;
    p = ol_fma(p, f, -0.116756409f);
    p = ol_fma(p, f, 0.118881747f);
    p = ol_fma(p, f, -0.124055915f);
    p = ol_fma(p, f, 0.142195508f);
    p = ol_fma(p, f, -0.166679963f);
    p = ol_fma(p, f, 0.200021192f);
    p = ol_fma(p, f, -0.250000089f);
    p = ol_fma(p, f, 0.333333135f);
    const float square = f * f;
    float low = p * (f * square);
    low = ol_fma(e, -2.12194440e-4f, low);
    low = ol_fma(-0.5f, square, low);
    return ol_fma(e, 0.693359375f, f + low);
}
OL_DEVICE float ol_log(float x) {
    const bool tiny = x < 0x1p-126f;
    const float scaled = ol_select(tiny, x * 0x1p23f, x);
    const uint32_t bits = ol_bits<uint32_t>(scaled);
    /* mantissa between sqrt(1/2) and sqrt(2) */
    const uint32_t shifted = bits - 0x3f3504f3u;
    const int32_t whole = static_cast<int32_t>(shifted) >> 23;
    const float e = static_cast<float>(whole) - (tiny ? 23.0f : 0.0f);
    const float m = ol_bits<float>((shifted & 0x007fffffu) + 0x3f3504f3u);
    float value = ol_log_of_one_plus(m - 1.0f, e);
    value = ol_select(x < ol_infinity<float>(), value, x); /* infinity and NaN are their own logarithms */
    value = ol_select(x == 0.0f, -ol_infinity<float>(), value);
    return ol_select(x < 0.0f, __builtin_nanf(""), value);
}
OL_DEVICE float ol_log1p(float x) {
    const float u = 1.0f + x;
    /* what rounding lost of 1 + x; exact by Sterbenz on either side of 1 */
    const float lost = ol_select(x < 1.0f, x - (u - 1.0f), 1.0f - (u - x));
    const float logarithm = ol_log(u), value = logarithm + lost / u;
    /* for infinity and -1 the correction is NaN; for tiny x it is x itself, -0 included */
    const float plain = ol_select((u == ol_infinity<float>()) | (u <= 0.0f), logarithm, value);
    return ol_select(u == 1.0f, x, plain);
}
OL_DEVICE float ol_tanh(float x) {
    const float a = ol_fabs(x), bounded = a > 10.0f ? 10.0f : a;
    const float t = ol_expm1(2.0f * bounded);
    const float value = a > 10.0f ? 1.0f : t / (t + 2.0f);
    return ol_copysign(value, x);
}
OL_DEVICE float ol_erf(float x) {
    const float a = ol_fabs(x), bounded = a > 4.0f ? 4.0f : a;
    const float u = bounded * bounded;
    float s = 7.85385782e-05f;
    s = ol_fma(s, u, -0.000801019254f);
    s = ol_fma(s, u, 0.00518832775f);
    s = ol_fma(s, u, -0.026853811f);
    s = ol_fma(s, u, 0.112835854f);
    s = ol_fma(s, u, -0.37612626f);
    s = ol_fma(s, u, 0.128379166f);
    const float small = ol_fma(bounded, s, bounded);
    float g = 2.1686772e-05f;
    g = ol_fma(g, bounded, -0.000441335345f);
    g = ol_fma(g, bounded, 0.00420455635f);
    g = ol_fma(g, bounded, -0.0252082404f);
    g = ol_fma(g, bounded, 0.108418547f);
    g = ol_fma(g, bounded, 0.633219898f);
    g = ol_fma(g, bounded, 1.12957835f);
    g = ol_fma(g, bounded, -0.000188035934f);
    const float large = 1.0f - ol_exp_moderate(-g);
    return ol_copysign(ol_select(a < 1.0f, small, ol_select(a != a, a, large)), x);
}

template <class C> OL_DEVICE C ol_sigmoid(C x) { return C(1) / (C(1) + ol_exp(-x)); }
template <class C> OL_DEVICE C ol_silu(C x) { return x / (C(1) + ol_exp(-x)); }
template <class C> OL_DEVICE C ol_softplus(C x, C beta, C threshold) {
    return ol_select(x * beta > threshold, x, ol_log1p(ol_exp(x * beta)) / beta);
}
template <class C> OL_DEVICE C ol_mish(C x) { return x * ol_tanh(ol_log1p(ol_exp(x))); }
template <class C> OL_DEVICE C ol_gelu(C x) {
    return x * C(0.5) * (C(1) + ol_erf(x * C(0.70710678118654752440)));
}
template <class C> OL_DEVICE C ol_gelu_tanh(C x) {
    const C inner = C(0.79788456080286535588) * (x + C(0.044715) * (x * x * x));
    return C(0.5) * x * (C(1) + ol_tanh(inner));
}
template <class C> OL_DEVICE C ol_gelu_backward(C grad, C x) {
    const C cdf = C(0.5) * (C(1) + ol_erf(x * C(0.70710678118654752440)));
    const C pdf = ol_exp(x * x * C(-0.5)) * C(0.39894228040143267794);
    return grad * (cdf + x * pdf);
}
template <class C> OL_DEVICE C ol_gelu_tanh_backward(C grad, C x) {
    const C beta = C(0.79788456080286535588), kappa = C(0.044715), square = x * x;
    const C t = ol_tanh(beta * (x + kappa * (square * x)));
    const C left = C(0.5) * x, right = C(1) + t;
    return grad * (C(0.5) * right + left * ((C(1) - t * t) * (beta * (C(1) + C(3) * kappa * square))));
}
template <class C> OL_DEVICE C ol_silu_backward(C grad, C x) {
    const C s = ol_sigmoid(x);
    return grad * s * (C(1) + x * (C(1) - s));
}
template <class C> OL_DEVICE C ol_softplus_backward(C grad, C x, C beta, C threshold) {
    const C z = ol_exp(x * beta);
    return x * beta > threshold ? grad : grad * z / (z + C(1));
}
template <class C> OL_DEVICE C ol_mish_backward(C grad, C x) {
    const C t = ol_tanh(ol_log1p(ol_exp(x)));
    return grad * (t + x * ol_sigmoid(x) * (C(1) - t * t));
}
template <class C> OL_DEVICE C ol_elu_backward(C grad, C x, C slope, C scale) {
    return grad * slope * scale * ol_exp(x * slope);
}

/* A NaN on either side wins. */
template <class C> OL_DEVICE C ol_maximum(C x, C y) { return ol_select((x != x) | (x > y), x, y); }
template <class C> OL_DEVICE C ol_minimum(C x, C y) { return ol_select((x != x) | (x < y), x, y); }

/* Python's sign: that of the divisor. */
template <class C> OL_DEVICE C ol_remainder(C x, C y) {
    const C rest = ol_fmod(x, y);
    return rest != C(0) && (rest < C(0)) != (y < C(0)) ? rest + y : rest;
}
/* floor(x / y) of the exact quotient, as Python's //: the remainder decides, not the rounded quotient. */
template <class C> OL_DEVICE C ol_floor_divide(C x, C y) {
    const C rest = ol_fmod(x, y);
    C quotient = (x - rest) / y;
    quotient = rest != C(0) && (rest < C(0)) != (y < C(0)) ? quotient - C(1) : quotient;
    C down = ol_floor(quotient);
    down = quotient - down > C(0.5) ? down + C(1) : down;
    const C value = quotient != C(0) ? down : ol_copysign(C(0), x / y);
    return y == C(0) ? x / y : value;
}
template <class C> OL_DEVICE C ol_logaddexp(C x, C y) {
    const C high = ol_maximum(x, y);
    return ol_fabs(x) == ol_infinity<C>() && x == y ? x : high + ol_log1p(ol_exp(-ol_fabs(x - y)));
}
template <class C> OL_DEVICE C ol_lerp(C from, C to, C weight) {
    return ol_fabs(weight) < C(0.5) ? from + weight * (to - from) : to - (to - from) * (C(1) - weight);
}
template <class C> OL_DEVICE C ol_nan_to_num(C x, C nan, C high, C low) {
    return x != x ? nan : x == ol_infinity<C>() ? high : x == -ol_infinity<C>() ? low : x;
}

/* Integers wrap around. */
OL_DEVICE int64_t ol_wrap_add(int64_t x, int64_t y) { return static_cast<int64_t>(static_cast<uint64_t>(x) + static_cast<uint64_t>(y)); }
OL_DEVICE int64_t ol_wrap_sub(int64_t x, int64_t y) { return static_cast<int64_t>(static_cast<uint64_t>(x) - static_cast<uint64_t>(y)); }
OL_DEVICE int64_t ol_wrap_mul(int64_t x, int64_t y) { return static_cast<int64_t>(static_cast<uint64_t>(x) * static_cast<uint64_t>(y)); }
OL_DEVICE int64_t ol_wrap_neg(int64_t x) { return ol_wrap_sub(0, x); }
/* A divisor of 0 is refused by whoever calls; here it must only not trap.  -1 would trap for the smallest integer. */
OL_DEVICE int64_t ol_quotient(int64_t x, int64_t y) { return y == -1 ? ol_wrap_neg(x) : y == 0 ? 0 : x / y; }
OL_DEVICE int64_t ol_fmod(int64_t x, int64_t y) { return y == -1 || y == 0 ? 0 : x % y; }
OL_DEVICE int64_t ol_remainder(int64_t x, int64_t y) {
    const int64_t rest = ol_fmod(x, y);
    return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
}
OL_DEVICE int64_t ol_floor_divide(int64_t x, int64_t y) {
    const int64_t rest = ol_fmod(x, y);
    return ol_quotient(x, y) - (rest != 0 && (rest < 0) != (y < 0));
}
OL_DEVICE int64_t ol_pow(int64_t x, int64_t y) {
    if (y < 0) return x == 1 ? 1 : x == -1 ? (y % 2 != 0 ? -1 : 1) : 0;
    int64_t value = 1;
    for (; y > 0; y >>= 1, x = ol_wrap_mul(x, x))
        if (y & 1) value = ol_wrap_mul(value, x);
    return value;
}
OL_DEVICE int64_t ol_shift_left(int64_t x, int64_t y) {
    return y < 0 || y > 63 ? 0 : static_cast<int64_t>(static_cast<uint64_t>(x) << y);
}
OL_DEVICE int64_t ol_shift_right(int64_t x, int64_t y) { return x >> (y < 0 || y > 63 ? 63 : y); }

}  // namespace OL_NAMESPACE
#endif
