/* Arguments of the movement family: operators that copy elements from place to place.
 *
 * Addresses are those of first elements. A "pitch" counts bytes, a "stride" counts elements.
 */
#ifndef OUTLAST_ARGS_MOVEMENT_H
#define OUTLAST_ARGS_MOVEMENT_H

#include "outlast/tensor.h"

#define OL_CAT_PIECES 8
#define OL_INDEX_TENSORS 4

/* what an index outside its dimension means: an exception of PyTorch, or nothing */
#define OL_INDEX_ERROR 0
#define OL_RUNTIME_ERROR 1
#define OL_INDEX_IGNORED 2


#ifdef __cplusplus
extern "C" {
#endif

/* cat: row r of the output is row r of each piece, one after the other. */
typedef struct ol_cat_args {
    uint64_t out;        /* where the first piece goes */
    int64_t rows;
    int64_t out_pitch;
    uint64_t count;      /* pieces, 1 ... OL_CAT_PIECES */
    uint64_t source[8];
    int64_t bytes[8];    /* of one row of the piece */
    int64_t source_pitch[8];
} ol_cat_args;

/* rows_pick: out[o, i] = data[o, index[i]], whole rows; the output lies densely. */
typedef struct ol_pick_args {
    uint64_t out;
    uint64_t data;
    uint64_t index;
    int64_t outer;        /* number of o */
    int64_t count;        /* number of i */
    int64_t bytes;        /* of a row */
    int64_t pitch;        /* between neighbouring rows of data */
    int64_t outer_pitch;  /* between data[o] and data[o + 1] */
    int64_t limit;        /* indices are 0 ... limit - 1 */
    int64_t index_stride;
    uint32_t wide;        /* 1: the indices are int64, 0: int32 */
    uint32_t negative;    /* 1: -limit ... -1 count from the end */
    uint32_t dim;         /* of the error's text */
    uint32_t error;       /* OL_INDEX_ERROR or OL_RUNTIME_ERROR */
} ol_pick_args;

/* index_get, index_set, index_add and the like: for every p of the shape `size`,
 *
 *     place = data + sum over dims of p[d] * data_stride[d] + sum over k of index[k][p] * step[k]
 *
 * and get copies *place to value[p], set copies value[p] to *place, the others join value[p] to what is there.
 */
typedef struct ol_index_args {
    uint64_t data;
    uint64_t value;
    uint64_t index[4];         /* int64 elements */
    uint32_t count;            /* index tensors, 1 ... OL_INDEX_TENSORS */
    uint32_t dims;             /* 1 ... OL_MAX_DIMS; the last one is the inner loop */
    int64_t size[8];
    int64_t data_stride[8];
    int64_t value_stride[8];
    int64_t index_stride[32];  /* tensor k, dimension d: [k * 8 + d] */
    int64_t limit[4];
    int64_t step[4];
    int64_t skip;              /* passed over where it stands in an index; INT64_MIN: none is */
    double factor;             /* ADD: value[p] is multiplied by it first; for types that are not integers */
    int64_t whole;             /* the same for integers and bool */
    uint32_t negative;         /* 1: -limit ... -1 count from the end */
    uint32_t error;            /* OL_INDEX_ERROR, OL_RUNTIME_ERROR, or for joining kernels OL_INDEX_IGNORED */
    uint32_t dtype;            /* of the joined elements; get and set do not look at it */
    uint32_t bytes;            /* of an element: 1, 2, 4, 8 */
    uint32_t dim[4];           /* of the error's text; OL_MAX_DIMS = the tensor taken as one row */
} ol_index_args;

/* triangle: out = source, but 0 on the other side of the diagonal.  The last two dimensions are rows and columns. */
typedef struct ol_triangle_args {
    uint64_t out;
    uint64_t source;
    uint32_t dims;         /* 2 ... OL_MAX_DIMS */
    uint32_t upper;        /* 1: keep column >= row + diagonal, 0: keep column <= row + diagonal */
    int64_t diagonal;
    int64_t size[8];
    int64_t out_stride[8];
    int64_t source_stride[8];
    uint32_t bytes;        /* of an element */
    uint32_t reserved;
} ol_triangle_args;

/* masked_scatter: the elements of `out` that the mask names become those of `source`, in order.  All lie densely. */
typedef struct ol_masked_args {
    uint64_t out;
    uint64_t mask;         /* bytes */
    uint64_t source;
    int64_t count;         /* elements of out */
    int64_t limit;         /* elements of source */
    uint32_t bytes;        /* of an element */
    uint32_t reserved;
} ol_masked_args;

/* searchsorted: out[r, i] = how many of sorted[r, :] lie before value[r, i].  All lie densely. */
typedef struct ol_search_args {
    uint64_t out;
    uint64_t sorted;
    uint64_t value;
    int64_t rows;
    int64_t length;        /* of a sorted row */
    int64_t pitch;         /* elements between sorted rows, 0 = one for all */
    int64_t count;         /* values of a row */
    uint32_t right;        /* 1: equal elements lie before */
    uint32_t narrow;       /* 1: out is int32, 0: int64 */
    uint32_t dtype;        /* of sorted and value */
    uint32_t reserved;
} ol_search_args;

#ifdef __cplusplus
}
static_assert(sizeof(ol_masked_args) == 48, "layout of ol_masked_args");
static_assert(sizeof(ol_search_args) == 72, "layout of ol_search_args");
static_assert(sizeof(ol_cat_args) == 224, "layout of ol_cat_args");
static_assert(sizeof(ol_pick_args) == 96, "layout of ol_pick_args");
static_assert(sizeof(ol_index_args) == 624, "layout of ol_index_args");
static_assert(sizeof(ol_triangle_args) == 232, "layout of ol_triangle_args");
#endif
#endif
