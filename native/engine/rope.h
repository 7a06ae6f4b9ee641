/* Rotary angles in double precision, without a mathematical library: the same bits on every machine. */
#ifndef OUTLAST_ENGINE_ROPE_H
#define OUTLAST_ENGINE_ROPE_H
#include <cstdint>
#include <vector>

namespace outlast::engine {

/* rate[i] = base^(-2 i / head_dim) / factors[i]; factors may be null (all 1). */
std::vector<double> rope_rates(double base, uint32_t head_dim, const float *factors);
/* out[2 i] = cos, out[2 i + 1] = sin of position * rate[i]. */
void rope_angles(const std::vector<double> &rates, uint32_t position, float *out);

double exact_exp(double x);     // |x| < 700
double exact_log(double x);     // x > 0, normal
void exact_sin_cos(double x, double *sine, double *cosine);   // 0 <= x < 2^26

}  // namespace outlast::engine
#endif
