/* Arguments of the pointwise family: out[i] = f(in0[i], in1[i], ...) over up to 8 dimensions.
 *
 * The planner has collapsed dimensions that lie behind each other in all operands, so most calls have outer = 0.
 * Operand 0 is the output.  Strides count elements; an input that is broadcast has stride 0.
 *
 * A kernel computes in one type (float, double or int64_t) and serves every element type that is loaded into it without
 * loss, so each operand names its own: float16 and bfloat16 are computed in float and rounded once, when stored.
 */
#ifndef OUTLAST_ARGS_POINTWISE_H
#define OUTLAST_ARGS_POINTWISE_H

#include "outlast/tensor.h"

#define OL_MAP_OPERANDS 5
#define OL_MAP_OUTER 7

/* ol_map_args.form: what the planner knows about all operands, so that a small call need not look */
#define OL_MAP_GENERAL 0
#define OL_MAP_DENSE 1    /* outer = 0; every operand has stride 1 and the kernel's own element type; parameters apart */
#define OL_MAP_LAST_ONE 2 /* the same, but the last input (of two) is a single element */

/* operands of a fused operator: see outlast/executor/fusion.py */
#define OL_FUSED_OPERANDS 64

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ol_map_args {
    uint64_t data[5];        /* addresses of the operands' first elements */
    int64_t n;               /* length of the innermost dimension */
    int64_t inner[5];        /* strides of the innermost dimension */
    uint8_t outer;           /* number of dimensions around it */
    uint8_t form;            /* OL_MAP_... */
    uint8_t dtype[5];        /* of the operands, numbers of tensor.h */
    uint8_t reserved;
    int64_t size[7];         /* of the outer dimensions, [0] = the one next to the innermost */
    int64_t stride[35];      /* operand k, outer dimension d: stride[k * 7 + d] */
} ol_map_args;

/* A fused operator runs over `rows` rows of `n` elements.  Operand k starts at data[k]; what follows (dense, one row for
 * all rows, a single element) is part of its generated source. */
typedef struct ol_fused_args {
    int64_t rows;
    int64_t n;
    uint64_t data[64];       /* inputs, then outputs */
} ol_fused_args;

#ifdef __cplusplus
}
static_assert(sizeof(ol_map_args) == 432, "layout of ol_map_args");
static_assert(sizeof(ol_fused_args) == 528, "layout of ol_fused_args");
#endif
#endif
