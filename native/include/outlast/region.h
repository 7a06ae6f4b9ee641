/* Geometry of checkpointed regions and the arguments of their handlers.
 *
 * KV pool layout: block b, piece p (= layer * 2 + {0: K, 1: V}), token t of the block:
 *     base + b * block_bytes + p * piece_stride + t * row_bytes          (row_bytes contiguous bytes)
 * Staged (logical) layout of n tokens, as it stands in a log record:
 *     [token][piece][row_bytes]                                           (token_bytes = pieces * row_bytes each)
 * Physical block numbers never enter the log.
 */
#ifndef OUTLAST_REGION_H
#define OUTLAST_REGION_H
#include "outlast/task.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ol_kv_geometry {
    uint32_t pieces;        /* layers * 2 */
    uint32_t block_tokens;  /* tokens a block holds */
    uint32_t row_bytes;     /* bytes of one token in one piece; a multiple of 4 */
    uint32_t blocks;        /* blocks in the pool */
    uint64_t piece_stride;  /* bytes between pieces of a block */
    uint64_t block_bytes;   /* bytes between blocks */
} ol_kv_geometry;

/* Arguments of kv_delta (gather: pool -> staged) and kv_apply (scatter: staged -> pool). */
typedef struct ol_kv_args {
    uint64_t base;          /* address of the pool */
    uint64_t table;         /* address of uint32_t[], physical block of each logical block of the sequence */
    uint64_t staged;        /* address of the staged bytes */
    uint32_t first;         /* position of the first token */
    uint32_t count;         /* tokens */
    ol_kv_geometry geometry;/* ignored by a handler specialised to its geometry, which checks it instead */
} ol_kv_args;

/* Arguments of bytes_delta (region -> staged) and bytes_apply (staged -> region). */
typedef struct ol_run {
    uint64_t offset;        /* in the region */
    uint64_t length;
} ol_run;

typedef struct ol_bytes_args {
    uint64_t base;          /* address of the region */
    uint64_t size;          /* its bytes */
    uint64_t runs;          /* address of ol_run[] */
    uint64_t staged;
    uint32_t count;         /* runs */
    uint32_t reserved;
} ol_bytes_args;

/* What one engine step wrote for one sequence: the interface between an engine's step and the checkpointer.
 * The engine fills it before the plan runs; state_bytes and state_length are read when the append task runs. */
typedef struct ol_step_write {
    uint64_t key;           /* request key */
    uint64_t table;         /* address of uint32_t[] block table */
    uint32_t generation;    /* incarnation of the request's state */
    uint32_t first;         /* first position written */
    uint32_t count;         /* positions written */
    uint32_t state_offset;  /* index of the emitted token that `state` describes */
    uint64_t state;         /* address of the request-state bytes (ol_emission), 0 = none */
    uint64_t state_length;  /* address of a uint32_t with their length; length 0 when run = nothing emitted */
} ol_step_write;

/* Request state of one step: the token that was sampled.  Followed in memory and in the log by `top` pairs. */
typedef struct ol_top {
    uint32_t token;
    float logprob;
} ol_top;

#define OL_MAX_TOP 20

typedef struct ol_emission {
    uint32_t token;
    float logprob;          /* natural log of the probability under the unmodified logits */
    uint32_t tops;          /* entries that follow; at most OL_MAX_TOP */
    uint32_t flags;         /* reserved, 0 */
    ol_top top[OL_MAX_TOP];
} ol_emission;

#ifdef __cplusplus
}
static_assert(sizeof(ol_kv_geometry) == 32, "layout of ol_kv_geometry");
static_assert(sizeof(ol_run) == 16, "layout of ol_run");
static_assert(sizeof(ol_bytes_args) == 40, "layout of ol_bytes_args");
static_assert(sizeof(ol_kv_args) == 64, "layout of ol_kv_args");
static_assert(sizeof(ol_step_write) == 48, "layout of ol_step_write");
static_assert(sizeof(ol_emission) == 16 + 8 * OL_MAX_TOP, "layout of ol_emission");
#endif
#endif
