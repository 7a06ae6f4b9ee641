/* Arguments of the pointwise family: out[i] = f(in0[i], in1[i], ...) over up to 8 dimensions.
 *
 * The planner has collapsed dimensions that lie behind each other in all operands, so most calls have outer = 0.
 * Operand 0 is the output.  Strides count elements; an input that is broadcast has stride 0.
 */
#ifndef OUTLAST_ARGS_POINTWISE_H
#define OUTLAST_ARGS_POINTWISE_H

#include "outlast/tensor.h"

#define OL_MAP_OPERANDS 5
#define OL_MAP_OUTER 7

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ol_map_args {
    uint64_t data[5];        /* addresses of the operands' first elements */
    int64_t n;               /* length of the innermost dimension */
    int64_t inner[5];        /* strides of the innermost dimension */
    uint32_t outer;          /* number of dimensions around it */
    uint32_t reserved;
    int64_t size[7];         /* of the outer dimensions, [0] = the one next to the innermost */
    int64_t stride[35];      /* operand k, outer dimension d: stride[k * 7 + d] */
} ol_map_args;

#ifdef __cplusplus
}
static_assert(sizeof(ol_map_args) == 432, "layout of ol_map_args");
#endif
#endif
