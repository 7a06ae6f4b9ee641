/* Arguments of matrix products: out[z, i, j] = activation(alpha * sum over k of a[z, i, k] * b[z, k, j] + beta * c[z, i, j]).
 *
 * Strides count elements and may be anything, 0 and negative included; c is broadcast by strides of 0.  `out` overlaps
 * neither a nor b, and c only if it is exactly out.
 */
#ifndef OUTLAST_ARGS_MATMUL_H
#define OUTLAST_ARGS_MATMUL_H

#include "outlast/tensor.h"

/* `activation` */
#define OL_ACT_NONE 0
#define OL_ACT_RELU 1

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ol_matmul_args {
    uint64_t a;          /* [batch, m, k] */
    uint64_t b;          /* [batch, k, n] */
    uint64_t c;          /* [batch, m, n]; 0 = nothing is added, beta is not used */
    uint64_t out;        /* [batch, m, n] */
    int64_t batch;
    int64_t m;
    int64_t n;
    int64_t k;
    int64_t a_batch;     /* strides */
    int64_t a_m;
    int64_t a_k;
    int64_t b_batch;
    int64_t b_k;
    int64_t b_n;
    int64_t c_batch;
    int64_t c_m;
    int64_t c_n;
    int64_t out_batch;
    int64_t out_m;
    int64_t out_n;
    double alpha;        /* for floating-point elements */
    double beta;
    int64_t whole_alpha; /* for integers, which wrap around */
    int64_t whole_beta;
    uint32_t activation; /* OL_ACT_...; floating-point elements only */
    uint32_t reserved;
} ol_matmul_args;

#ifdef __cplusplus
}
static_assert(sizeof(ol_matmul_args) == 200, "layout of ol_matmul_args");
#endif
#endif
