/* KV handlers: kv_delta gathers token rows of a paged pool into their logical form, kv_apply scatters them back.
 *
 * Built once with run-time geometry (shipped) and, where there is a compiler, once per region with the geometry as
 * constants: define OL_PIECES, OL_BLOCK_TOKENS, OL_ROW_BYTES, OL_PIECE_STRIDE, OL_BLOCK_BYTES, OL_BLOCKS.
 * A specialised handler refuses arguments of another geometry.
 */
#ifndef OUTLAST_OPS_KV_H
#define OUTLAST_OPS_KV_H
#include "outlast/dialect.h"
#include "outlast/region.h"

#ifdef OL_PIECES
#define OL_KV_GEOMETRY(a)                                                                                              \
    constexpr uint32_t pieces = OL_PIECES, block_tokens = OL_BLOCK_TOKENS, row_bytes = OL_ROW_BYTES, blocks = OL_BLOCKS; \
    constexpr uint64_t piece_stride = OL_PIECE_STRIDE, block_bytes = OL_BLOCK_BYTES;                                   \
    const ol_kv_geometry &given = (a)->geometry;                                                                       \
    if (given.pieces != pieces || given.block_tokens != block_tokens || given.row_bytes != row_bytes ||                \
        given.blocks != blocks || given.piece_stride != piece_stride || given.block_bytes != block_bytes)              \
    OL_FAIL("handler was built for another geometry")
#else
#define OL_KV_GEOMETRY(a)                                                                                              \
    const uint32_t pieces = (a)->geometry.pieces, block_tokens = (a)->geometry.block_tokens,                           \
                   row_bytes = (a)->geometry.row_bytes, blocks = (a)->geometry.blocks;                                 \
    const uint64_t piece_stride = (a)->geometry.piece_stride, block_bytes = (a)->geometry.block_bytes
#endif

/* Refuses before anything is copied, by whatever part: a wrong table writes nothing. */
#define OL_KV_CHECK_TABLE(a, table)                                                                                    \
    for (uint32_t i = 0; i < (a)->count; i += block_tokens - ((a)->first + i) % block_tokens)                          \
        if ((table)[((a)->first + i) / block_tokens] >= blocks)                                                        \
    OL_FAIL("block table names block %u of %u at position %u", (table)[((a)->first + i) / block_tokens], blocks, (a)->first + i)

OL_OPERATOR(kv_delta, ol_kv_args, a) {
    OL_KV_GEOMETRY(a);
    const auto *table = reinterpret_cast<const uint32_t *>(a->table);
    OL_KV_CHECK_TABLE(a, table);
    for (uint32_t i = blockIdx.x; i < a->count; i += gridDim.x) {
        const uint32_t position = a->first + i, block = table[position / block_tokens];
        const char *from = reinterpret_cast<const char *>(a->base) + block * block_bytes +
                           static_cast<uint64_t>(position % block_tokens) * row_bytes;
        char *to = reinterpret_cast<char *>(a->staged) + static_cast<uint64_t>(i) * pieces * row_bytes;
        for (uint32_t p = threadIdx.x; p < pieces; p += blockDim.x)
            memcpy(to + static_cast<uint64_t>(p) * row_bytes, from + p * piece_stride, row_bytes);
    }
    return OL_OK;
}

OL_OPERATOR(kv_apply, ol_kv_args, a) {
    OL_KV_GEOMETRY(a);
    const auto *table = reinterpret_cast<const uint32_t *>(a->table);
    OL_KV_CHECK_TABLE(a, table);
    for (uint32_t i = blockIdx.x; i < a->count; i += gridDim.x) {
        const uint32_t position = a->first + i, block = table[position / block_tokens];
        char *to = reinterpret_cast<char *>(a->base) + block * block_bytes +
                   static_cast<uint64_t>(position % block_tokens) * row_bytes;
        const char *from = reinterpret_cast<const char *>(a->staged) + static_cast<uint64_t>(i) * pieces * row_bytes;
        for (uint32_t p = threadIdx.x; p < pieces; p += blockDim.x)
            memcpy(to + p * piece_stride, from + static_cast<uint64_t>(p) * row_bytes, row_bytes);
    }
    return OL_OK;
}
#endif
