#include "rope.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace outlast::engine {

namespace {

constexpr double kLn2High = 0x1.62e42feep-1, kLn2Low = 0x1.a39ef35793c76p-33;      // the sum is ln 2; 32 + 53 bits

double nearest(double x) {
    const double magic = 6755399441055744.0;                                       // 1.5 * 2^52
    volatile double shifted = x + magic;                                           // must not be folded away
    return shifted - magic;
}

}  // namespace

double exact_exp(double x) {
    const double n = nearest(x * 1.4426950408889634);
    const double r = (x - n * kLn2High) - n * kLn2Low;
    double sum = 1.0;
    for (int i = 17; i > 0; --i) sum = 1.0 + sum * r / i;                          // |r| < 0.35: the rest is below 1e-21
    const uint64_t bits = uint64_t(int64_t(n) + 1023) << 52;
    double power;
    std::memcpy(&power, &bits, 8);
    return sum * power;
}

double exact_log(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, 8);
    int exponent = int(bits >> 52) - 1023;
    bits = (bits & 0xfffffffffffffull) | (1023ull << 52);
    double m;
    std::memcpy(&m, &bits, 8);
    if (m > 1.4142135623730951) {
        m /= 2;
        ++exponent;
    }
    const double z = (m - 1) / (m + 1), square = z * z;                            // |z| < 0.172
    double sum = 0;
    for (int i = 25; i > 0; i -= 2) sum = 1.0 / i + square * sum;
    return exponent * kLn2High + (exponent * kLn2Low + 2 * z * sum);
}

void exact_sin_cos(double x, double *sine, double *cosine) {
    // x = n pi/2 + r. The first two parts of pi/2 have 27 bits, so that n times them is exact for n < 2^26.
    const double n = nearest(x * 0.6366197723675814);
    const double r = ((x - n * 0x1.921fb54p+0) - n * 0x1.10b461p-30) - n * 0x1.a62633145c06ep-58;
    const double square = r * r;
    double s = 1.0, c = 1.0;
    for (int i = 19; i > 1; i -= 2) s = 1.0 - s * square / (i * (i - 1));
    for (int i = 20; i > 1; i -= 2) c = 1.0 - c * square / (i * (i - 1));
    s *= r;
    switch (int64_t(n) & 3) {
        case 0: *sine = s, *cosine = c; break;
        case 1: *sine = c, *cosine = -s; break;
        case 2: *sine = -s, *cosine = -c; break;
        default: *sine = -c, *cosine = s; break;
    }
}

Rope make_rope(double base, uint32_t head_dim, const RopeScaling &scaling, const float *factors) {
    Rope rope;
    rope.rates.resize(head_dim / 2);
    const double log_base = exact_log(base);
    // Index, with fractions, of the pair that turns so many times within the original context.
    const auto pair_of = [&](double turns) {
        return head_dim * exact_log(scaling.original_context / (turns * 6.283185307179586)) / (2 * log_base);
    };
    double low = 0, span = 1;
    if (scaling.kind == RopeScaling::yarn) {
        low = std::max(0.0, std::floor(pair_of(scaling.beta_fast)));
        span = std::max(0.001, std::min(head_dim - 1.0, std::ceil(pair_of(scaling.beta_slow))) - low);
        rope.length = 1 + 0.1 * exact_log(scaling.factor);
    }
    for (uint32_t i = 0; i < rope.rates.size(); ++i) {
        double rate = exact_exp(-2.0 * i / head_dim * log_base);
        if (factors != nullptr) rate /= factors[i];
        if (scaling.kind == RopeScaling::linear) rate /= scaling.factor;
        if (scaling.kind == RopeScaling::yarn) {
            const double slow = std::clamp((i - low) / span, 0.0, 1.0);
            rate = rate / scaling.factor * slow + rate * (1 - slow);
        }
        if (!(rate > 0) || !(rate <= kMaxRopeRate)) throw std::invalid_argument("a rotary frequency is out of range");
        rope.rates[i] = rate;
    }
    return rope;
}

void rope_angles(const Rope &rope, uint32_t position, float *out) {
    for (size_t i = 0; i < rope.rates.size(); ++i) {
        double s, c;
        exact_sin_cos(position * rope.rates[i], &s, &c);
        out[2 * i] = float(rope.length * c);
        out[2 * i + 1] = float(rope.length * s);
    }
}

}  // namespace outlast::engine
