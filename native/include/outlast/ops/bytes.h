/* Handlers of append-only and opaque regions. */
#ifndef OUTLAST_OPS_BYTES_H
#define OUTLAST_OPS_BYTES_H
#include "outlast/dialect.h"
#include "outlast/region.h"

/* Refuses before anything is copied. */
#define OL_BYTES_CHECK_RUNS(a, runs)                                                                                   \
    for (uint32_t i = 0; i < (a)->count; ++i)                                                                          \
        if (runs[i].offset > (a)->size || runs[i].length > (a)->size - runs[i].offset)                                 \
    OL_FAIL("run %u (offset %llu, %llu bytes) leaves the region of %llu bytes", i,                                     \
            static_cast<unsigned long long>(runs[i].offset), static_cast<unsigned long long>(runs[i].length),          \
            static_cast<unsigned long long>((a)->size))

/* Copies `count` runs between a region and its staged form (runs one after the other). */
OL_OPERATOR(bytes_delta, ol_bytes_args, a) {
    const auto *runs = reinterpret_cast<const ol_run *>(a->runs);
    OL_BYTES_CHECK_RUNS(a, runs);
    char *to = reinterpret_cast<char *>(a->staged);
    for (uint32_t i = 0; i < a->count; ++i) {
        if (i % gridDim.x == blockIdx.x) memcpy(to, reinterpret_cast<const char *>(a->base) + runs[i].offset, runs[i].length);
        to += runs[i].length;
    }
    return OL_OK;
}

OL_OPERATOR(bytes_apply, ol_bytes_args, a) {
    const auto *runs = reinterpret_cast<const ol_run *>(a->runs);
    OL_BYTES_CHECK_RUNS(a, runs);
    const char *from = reinterpret_cast<const char *>(a->staged);
    for (uint32_t i = 0; i < a->count; ++i) {
        if (i % gridDim.x == blockIdx.x) memcpy(reinterpret_cast<char *>(a->base) + runs[i].offset, from, runs[i].length);
        from += runs[i].length;
    }
    return OL_OK;
}
#endif
