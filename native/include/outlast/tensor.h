/* Layout of a tensor as operators see it, and the numbers of the element types.
 *
 * Plain C, like task.h.  Strides count elements, as in PyTorch; 0 repeats an element (broadcasting), negative ones walk
 * backwards.  `data` is the address of element [0, 0, ...].  A tensor of 0 dimensions has one element.
 */
#ifndef OUTLAST_TENSOR_H
#define OUTLAST_TENSOR_H

#include "outlast/task.h"

#define OL_MAX_DIMS 8

/* element types; bool is a byte that is 0 or 1 */
#define OL_BOOL 0
#define OL_U8 1
#define OL_I8 2
#define OL_I16 3
#define OL_I32 4
#define OL_I64 5
#define OL_F16 6
#define OL_BF16 7
#define OL_F32 8
#define OL_F64 9

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ol_tensor {
    uint64_t data;
    uint32_t dtype;
    uint32_t dims;       /* 0 ... OL_MAX_DIMS */
    int64_t size[8];     /* elements; those past `dims` are unused */
    int64_t stride[8];   /* elements */
} ol_tensor;

#ifdef __cplusplus
}
static_assert(sizeof(ol_tensor) == 144, "layout of ol_tensor");
#endif
#endif
