/* Arguments of the operators on rows: softmax, normalisations, scans, sorting (outlast/ops/rows.h, ops/order.h).
 *
 * An operand of these is seen as [outer, n, inner]: rows of n elements along the middle dimension.  Strides count
 * elements.
 */
#ifndef OUTLAST_ARGS_ROWS_H
#define OUTLAST_ARGS_ROWS_H
#include "outlast/tensor.h"

#define OL_SORT_MAX 1024 /* longest row that is sorted */
#define OL_TOPK_MAX 512  /* most elements that topk takes of a longer row */

#ifdef __cplusplus
extern "C" {
#endif

/* softmax and its gradient, cumsum and other scans, sort, topk, median; strides of [outer, n, inner] */
typedef struct ol_rows_args {
    uint64_t in;
    uint64_t other;          /* second input: the result of which a gradient is taken */
    uint64_t out;
    uint64_t second;         /* indices as i64; sort, topk, median: 0 = not wanted */
    int64_t in_stride[3];
    int64_t other_stride[3];
    int64_t out_stride[3];
    int64_t second_stride[3];
    int64_t outer;
    int64_t n;
    int64_t inner;
    int64_t k;               /* elements that topk takes; rank, from 1 on, that select takes */
    uint32_t descending;
    uint32_t nan_wins;       /* select: a NaN in the row is the result */
} ol_rows_args;

/* layer_norm and rms_norm: rows of n elements without gaps inside a row */
typedef struct ol_norm_args {
    uint64_t in;
    uint64_t weight;         /* [n], or 0 */
    uint64_t bias;           /* [n], or 0 */
    uint64_t out;
    uint64_t mean;           /* [rows] of the element type; 0: not wanted */
    uint64_t rstd;
    uint64_t grad;           /* backward: gradient of the result, rows like `in` */
    uint64_t grad_weight;
    uint64_t grad_bias;
    int64_t rows;
    int64_t n;
    int64_t in_row;          /* strides */
    int64_t out_row;
    int64_t grad_row;
    double eps;
} ol_norm_args;

/* group_norm, and batch_norm with given statistics: in and out are [batch, channels, places], contiguous */
typedef struct ol_channel_args {
    uint64_t in;
    uint64_t weight;         /* [channels], or 0 */
    uint64_t bias;
    uint64_t out;
    uint64_t mean;           /* group_norm: results [batch, groups] or 0; batch_norm: input [channels] */
    uint64_t rstd;           /* the same; batch_norm: the variance */
    int64_t batch;
    int64_t channels;
    int64_t places;
    int64_t groups;
    double eps;
} ol_channel_args;

#ifdef __cplusplus
}
#endif
#endif
