/* Arguments of the reductions (outlast/ops/reduce.h).
 *
 * A tensor's dimensions are split into kept and reduced ones; dimensions that lie behind each other in memory are
 * merged, size-1 dimensions dropped.  Both lists have the innermost dimension first; strides count elements.
 */
#ifndef OUTLAST_ARGS_REDUCE_H
#define OUTLAST_ARGS_REDUCE_H
#include "outlast/tensor.h"

/* What is done with the total before it is stored. */
#define OL_FINISH_NONE 0
#define OL_FINISH_MEAN 1 /* divide by the number of elements */
#define OL_FINISH_ROOT 2 /* square root */
#define OL_FINISH_ANY 3  /* count -> bool: is it above 0 */
#define OL_FINISH_ALL 4  /* count -> bool: is it the number of elements */

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ol_reduce_args {
    uint64_t in;
    uint64_t out;            /* 0: not wanted (arg reductions and var only) */
    uint64_t second;         /* indices as i64, or means; 0: not wanted */
    int64_t count;           /* results: product of the kept sizes */
    int64_t length;          /* elements of each result: product of the reduced sizes */
    uint32_t kept_dims;      /* 0 ... 8 */
    uint32_t reduced_dims;   /* 0 ... 8 */
    uint32_t columns;        /* 1: kept[0] is contiguous and walked in the inner loop; 0: reduced[0] is */
    uint32_t finish;         /* OL_FINISH_... */
    double number;           /* order of the norm, or correction of the variance */
    int64_t kept_size[8];
    int64_t kept_in[8];      /* strides in the input */
    int64_t kept_out[8];     /* strides in the results */
    int64_t reduced_size[8];
    int64_t reduced_in[8];
} ol_reduce_args;

/* Negative log likelihood: input [rows, classes, places], target and result [rows, places] */
typedef struct ol_nll_args {
    uint64_t in;
    uint64_t target;         /* i64 */
    uint64_t weight;         /* [classes], or 0 */
    uint64_t out;            /* each loss, their sum or their mean; backward: gradient of the input, all 0 before */
    uint64_t total;          /* sum of the weights that count, made with a sum or a mean; backward: input */
    uint64_t grad;           /* backward: gradient of the losses or of their sum or mean */
    int64_t rows;
    int64_t classes;
    int64_t places;
    int64_t in_row;          /* strides */
    int64_t in_class;
    int64_t in_place;
    int64_t target_row;
    int64_t target_place;
    int64_t out_row;
    int64_t out_class;
    int64_t out_place;
    int64_t grad_row;
    int64_t grad_place;
    int64_t weight_stride;
    int64_t ignored;         /* target that does not count */
    uint32_t reduction;      /* 0 none, 1 mean, 2 sum */
    uint32_t backward;
} ol_nll_args;

#ifdef __cplusplus
}
#endif
#endif
