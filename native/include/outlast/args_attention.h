/* Arguments of scaled dot-product attention: out = softmax(scale * q k^T + mask) v, for each batch and head.
 *
 * Strides count elements; those of the innermost dimension of q, k, v and out are 1.
 */
#ifndef OUTLAST_ARGS_ATTENTION_H
#define OUTLAST_ARGS_ATTENTION_H

#include "outlast/tensor.h"

#define OL_HEAD_DIM_MAX 256

/* `mask_kind` */
#define OL_MASK_NONE 0
#define OL_MASK_ADDED 1  /* float (double for double q): added to the scores */
#define OL_MASK_KEPT 2   /* bool: scores where it is false count as -infinity */

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ol_attention_args {
    uint64_t q;          /* [batch, heads, queries, dim] */
    uint64_t k;          /* [batch, heads / group, keys, dim] */
    uint64_t v;          /* [batch, heads / group, keys, dim] */
    uint64_t mask;       /* [batch, heads, queries, keys] */
    uint64_t out;        /* [batch, heads, queries, dim] */
    uint64_t logsumexp;  /* [batch, heads, queries], float (double for double q); 0 = not wanted */
    int64_t batch;
    int64_t heads;
    int64_t group;       /* heads that share one head of k and v */
    int64_t queries;
    int64_t keys;        /* > 0 */
    int64_t dim;         /* 1 ... OL_HEAD_DIM_MAX */
    int64_t q_batch;     /* strides */
    int64_t q_head;
    int64_t q_row;
    int64_t k_batch;
    int64_t k_head;
    int64_t k_row;
    int64_t v_batch;
    int64_t v_head;
    int64_t v_row;
    int64_t mask_batch;
    int64_t mask_head;
    int64_t mask_row;
    int64_t mask_column;
    int64_t out_batch;
    int64_t out_head;
    int64_t out_row;
    int64_t logsumexp_batch;
    int64_t logsumexp_head;
    int64_t logsumexp_row;
    double scale;
    uint32_t mask_kind;  /* OL_MASK_... */
    uint32_t causal;     /* query i sees keys 0 ... i only */
} ol_attention_args;

#ifdef __cplusplus
}
static_assert(sizeof(ol_attention_args) == 264, "layout of ol_attention_args");
#endif
#endif
