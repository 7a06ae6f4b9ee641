/* Whole runs of bytes: concatenation, rows picked by index, triangles. Elements picked by index: ops/indexing.h. */
#ifndef OUTLAST_OPS_MOVEMENT_H
#define OUTLAST_OPS_MOVEMENT_H
#include "outlast/args_movement.h"
#include "outlast/dialect.h"
#include "outlast/ops/types.h"

/* Code off the common path: kept out of the loops that call it, and compiled once. */
#ifdef __CUDACC__
#define OL_RARE static __device__ __noinline__
#else
#define OL_RARE inline __attribute__((noinline))
#endif

namespace OL_NAMESPACE {

/* An index that may lie outside: `at` becomes its place; false = outside. */
OL_DEVICE bool ol_index_inside(int64_t &at, int64_t limit, uint32_t negative) {
    if (static_cast<uint64_t>(at) < static_cast<uint64_t>(limit)) return true;
    if (negative == 0 || at >= 0 || at < -limit) return false;
    at += limit;
    return true;
}

/* The text names PyTorch's exception first, so that whoever raises can choose it. */
OL_RARE int32_t ol_index_outside(ol_env *environment, int64_t at, int64_t limit, uint32_t dim, uint32_t error) {
    const char *type = error == OL_RUNTIME_ERROR ? "RuntimeError" : "IndexError";
    if (dim == OL_MAX_DIMS)
        OL_FAIL("%s: index %lld is out of bounds for a tensor of %lld elements", type, static_cast<long long>(at),
                static_cast<long long>(limit));
    OL_FAIL("%s: index %lld is out of bounds for dimension %u with size %lld", type, static_cast<long long>(at), dim,
            static_cast<long long>(limit));
}

#ifdef __CUDACC__
/* Threads of a block copy together: by words of 8 or 4 bytes where everything is aligned, else by bytes. */
OL_DEVICE void ol_move_run(char *to, const char *from, int64_t bytes) {
    const uint64_t low = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) | static_cast<uint64_t>(bytes);
    if ((low & 7) == 0) {
        for (int64_t i = threadIdx.x; i < bytes / 8; i += blockDim.x)
            reinterpret_cast<uint64_t *>(to)[i] = reinterpret_cast<const uint64_t *>(from)[i];
    } else if ((low & 3) == 0) {
        for (int64_t i = threadIdx.x; i < bytes / 4; i += blockDim.x)
            reinterpret_cast<uint32_t *>(to)[i] = reinterpret_cast<const uint32_t *>(from)[i];
    } else {
        for (int64_t i = threadIdx.x; i < bytes; i += blockDim.x) to[i] = from[i];
    }
}
#else
/* `bytes` known to the compiler: a few moves, no call. */
template <int64_t bytes> OL_DEVICE void ol_move_fixed(char *to, const char *from) { __builtin_memcpy(to, from, bytes); }

/* Short runs by two moves that may overlap, since a call of memcpy costs more than they do. Source and target are
 * different memory. */
OL_DEVICE void ol_move_run(char *to, const char *from, int64_t bytes) {
    if (bytes > 128) {
        __builtin_memcpy(to, from, static_cast<uint64_t>(bytes));
    } else if (bytes >= 64) {
        ol_move_fixed<64>(to, from);
        ol_move_fixed<64>(to + bytes - 64, from + bytes - 64);
    } else if (bytes >= 32) {
        ol_move_fixed<32>(to, from);
        ol_move_fixed<32>(to + bytes - 32, from + bytes - 32);
    } else if (bytes >= 16) {
        ol_move_fixed<16>(to, from);
        ol_move_fixed<16>(to + bytes - 16, from + bytes - 16);
    } else if (bytes >= 8) {
        ol_move_fixed<8>(to, from);
        ol_move_fixed<8>(to + bytes - 8, from + bytes - 8);
    } else if (bytes >= 4) {
        ol_move_fixed<4>(to, from);
        ol_move_fixed<4>(to + bytes - 4, from + bytes - 4);
    } else {
        for (int64_t i = 0; i < bytes; ++i) to[i] = from[i];
    }
}
#endif

/* Blocks share out rows; on the host, where a long row would leave other parts idle, also the pieces. */
OL_DEVICE int32_t ol_cat(const ol_cat_args *a, ol_dim3 block, ol_dim3 grid, ol_env *) {
    char *out = reinterpret_cast<char *>(a->out);
    const int64_t count = static_cast<int64_t>(a->count), pieces = a->rows * count;
#ifdef __CUDACC__
    for (int64_t row = block.x; row < a->rows; row += grid.x) {
        int64_t done = row * a->out_pitch;
        for (int64_t k = 0; k < count; done += a->bytes[k++])
            ol_move_run(out + done, reinterpret_cast<const char *>(a->source[k]) + row * a->source_pitch[k], a->bytes[k]);
    }
    (void)pieces;
#else
    int64_t begin = 0, end = pieces, row = 0, k = 0, done = 0;
    if (grid.x != 1) {
        begin = pieces * block.x / grid.x;
        end = pieces * (block.x + 1) / grid.x;
        row = begin / count;
        k = begin % count;
        for (int64_t before = 0; before < k; ++before) done += a->bytes[before];
    }
    char *to = out + row * a->out_pitch;
    for (int64_t i = begin; i < end; ++i) {
        const int64_t bytes = a->bytes[k];
        ol_move_run(to + done, reinterpret_cast<const char *>(a->source[k]) + row * a->source_pitch[k], bytes);
        done += bytes;
        if (++k == count) {
            k = done = 0;
            ++row;
            to += a->out_pitch;
        }
    }
#endif
    return OL_OK;
}

#ifndef __CUDACC__
/* fixed = bytes of a row, or 0 when the compiler does not know them */
template <int64_t fixed, class Index>
OL_RARE int32_t ol_rows_pick_as(const ol_pick_args *a, ol_dim3 block, ol_dim3 grid, ol_env *environment) {
    const int64_t bytes = fixed != 0 ? fixed : a->bytes, count = a->count, stride = a->index_stride, pitch = a->pitch;
    int64_t begin = 0, end = a->outer * count, outer = 0, first = 0;
    if (grid.x != 1) {
        begin = a->outer * count * block.x / grid.x;
        end = a->outer * count * (block.x + 1) / grid.x;
        outer = begin / count;
        first = begin % count;
    }
    const auto *index = reinterpret_cast<const Index *>(a->index);
    const char *data = reinterpret_cast<const char *>(a->data) + outer * a->outer_pitch;
    char *to = reinterpret_cast<char *>(a->out) + begin * bytes;
    for (int64_t done = begin; done < end; data += a->outer_pitch, first = 0) {
        const int64_t past = end - done < count - first ? first + (end - done) : count;
        bool plain = false;
        if (fixed != 0 && stride == 1) { /* short rows: all indices are looked at first, in a loop that vectorises */
            uint64_t outside = 0;
            for (int64_t i = first; i < past; ++i)
                outside |= static_cast<uint64_t>(static_cast<int64_t>(index[i])) >= static_cast<uint64_t>(a->limit);
            plain = outside == 0;
        }
        if (plain) {
            for (int64_t i = first; i < past; ++i, to += bytes)
                ol_move_fixed<fixed != 0 ? fixed : 1>(to, data + index[i] * pitch);
        } else {
            for (int64_t i = first; i < past; ++i, to += bytes) {
                int64_t at = index[i * stride];
                if (!ol_index_inside(at, a->limit, a->negative))
                    return ol_index_outside(environment, at, a->limit, a->dim, a->error);
                if (fixed != 0)
                    ol_move_fixed<fixed != 0 ? fixed : 1>(to, data + at * pitch);
                else
                    ol_move_run(to, data + at * pitch, bytes);
            }
        }
        done += past - first;
    }
    return OL_OK;
}
#endif

OL_DEVICE int32_t ol_rows_pick(const ol_pick_args *a, ol_dim3 block, ol_dim3 grid, ol_env *environment) {
#ifdef __CUDACC__
    const int64_t rows = a->outer * a->count;
    for (int64_t row = block.x; row < rows; row += grid.x) {
        const int64_t outer = row / a->count, place = (row - outer * a->count) * a->index_stride;
        int64_t at = a->wide ? reinterpret_cast<const int64_t *>(a->index)[place]
                             : reinterpret_cast<const int32_t *>(a->index)[place];
        if (!ol_index_inside(at, a->limit, a->negative)) return ol_index_outside(environment, at, a->limit, a->dim, a->error);
        ol_move_run(reinterpret_cast<char *>(a->out) + row * a->bytes,
                    reinterpret_cast<const char *>(a->data) + outer * a->outer_pitch + at * a->pitch, a->bytes);
    }
    return OL_OK;
#else
    if (a->wide == 0) return ol_rows_pick_as<0, int32_t>(a, block, grid, environment);
    switch (a->bytes) {
    case 1: return ol_rows_pick_as<1, int64_t>(a, block, grid, environment);
    case 2: return ol_rows_pick_as<2, int64_t>(a, block, grid, environment);
    case 4: return ol_rows_pick_as<4, int64_t>(a, block, grid, environment);
    case 8: return ol_rows_pick_as<8, int64_t>(a, block, grid, environment);
    default: return ol_rows_pick_as<0, int64_t>(a, block, grid, environment);
    }
#endif
}

template <class T> OL_DEVICE int32_t ol_triangle_as(const ol_triangle_args *a, ol_dim3 block, ol_dim3 grid) {
    const uint32_t last = a->dims - 1;
    const int64_t columns = a->size[last], out_step = a->out_stride[last], in_step = a->source_stride[last];
    int64_t rows = 1;
    for (uint32_t d = 0; d < last; ++d) rows *= a->size[d];
    for (int64_t row = block.x; row < rows; row += grid.x) {
        int64_t rest = row, out_at = 0, in_at = 0, line = 0;
        for (uint32_t d = last; d-- > 0;) {
            const int64_t above = rest / a->size[d], at = rest - above * a->size[d];
            if (d == last - 1) line = at;
            out_at += at * a->out_stride[d];
            in_at += at * a->source_stride[d];
            rest = above;
        }
        /* columns [first, past) keep their value */
        int64_t edge = line + a->diagonal + (a->upper ? 0 : 1);
        edge = edge < 0 ? 0 : edge > columns ? columns : edge;
        const int64_t first = a->upper ? edge : 0, past = a->upper ? columns : edge;
        T *out = reinterpret_cast<T *>(a->out) + out_at;
        const T *in = reinterpret_cast<const T *>(a->source) + in_at;
        if (out_step == 1 && in_step == 1) { /* separate loops, so that each vectorises */
            for (int64_t j = threadIdx.x; j < first; j += blockDim.x) out[j] = 0;
            for (int64_t j = first + threadIdx.x; j < past; j += blockDim.x) out[j] = in[j];
            for (int64_t j = past + threadIdx.x; j < columns; j += blockDim.x) out[j] = 0;
        } else {
            for (int64_t j = threadIdx.x; j < columns; j += blockDim.x)
                out[j * out_step] = j >= first && j < past ? in[j * in_step] : T(0);
        }
    }
    return OL_OK;
}

OL_DEVICE int32_t ol_triangle(const ol_triangle_args *a, ol_dim3 block, ol_dim3 grid, ol_env *environment) {
    switch (a->bytes) {
    case 1: return ol_triangle_as<uint8_t>(a, block, grid);
    case 2: return ol_triangle_as<uint16_t>(a, block, grid);
    case 4: return ol_triangle_as<uint32_t>(a, block, grid);
    case 8: return ol_triangle_as<uint64_t>(a, block, grid);
    default: OL_FAIL("elements of %u bytes are not known", a->bytes);
    }
}

}  // namespace OL_NAMESPACE
#endif
