/* Rotary angles in double precision, without a mathematical library: the same bits on every machine. */
#ifndef OUTLAST_ENGINE_ROPE_H
#define OUTLAST_ENGINE_ROPE_H
#include <cstdint>
#include <vector>

#include "model.h"

namespace outlast::engine {

struct Rope {
    std::vector<double> rates;          // [head_dim / 2] radians per position, each at most kMaxRopeRate
    double length = 1;                  // of the rotated pair, relative to the pair: yarn's attention factor
};
constexpr double kMaxRopeRate = 4;      // times 2^24 positions is what exact_sin_cos takes

/* Rates base^(-2 i / head_dim) / factors[i], stretched by `scaling`; factors may be null (all 1).
 *
 *   linear   every rate / factor
 *   yarn     (Peng et al., 2023) pairs that turn more than beta_fast times within the original context keep their rate,
 *            those that turn less than beta_slow times get rate / factor, those between a mixture, linear in the index;
 *            the pairs are lengthened to 1 + 0.1 ln(factor)
 *
 * Llama 3's scaling comes as `factors`. Throws std::invalid_argument if a rate is not in (0, kMaxRopeRate]. */
Rope make_rope(double base, uint32_t head_dim, const RopeScaling &scaling, const float *factors);
/* out[2 i] = length * cos, out[2 i + 1] = length * sin of position * rate[i]. */
void rope_angles(const Rope &rope, uint32_t position, float *out);

double exact_exp(double x);     // |x| < 700
double exact_log(double x);     // x > 0, normal
void exact_sin_cos(double x, double *sine, double *cosine);   // 0 <= x < 2^26

}  // namespace outlast::engine
#endif
