/* Elements picked by one or several index tensors: reading, writing, and joining with what is there (ol_index_args). */
#ifndef OUTLAST_OPS_INDEXING_H
#define OUTLAST_OPS_INDEXING_H
#include "outlast/ops/movement.h"

namespace OL_NAMESPACE {

/* Where one run of the inner loop starts: elements from the addresses in the arguments. */
struct ol_index_place {
    int64_t data, value, index[OL_INDEX_TENSORS];
};

OL_RARE ol_index_place ol_index_seek(const ol_index_args *a, int64_t run) {
    ol_index_place place{};
    for (uint32_t d = a->dims - 1; d-- > 0;) {
        const int64_t above = run / a->size[d], at = run - above * a->size[d];
        place.data += at * a->data_stride[d];
        place.value += at * a->value_stride[d];
        for (uint32_t k = 0; k < a->count; ++k) place.index[k] += at * a->index_stride[k * 8 + d];
        run = above;
    }
    return place;
}

#define OL_INDEX_CHECK(at, k)                                                                                          \
    if (!ol_index_inside(at, a->limit[k], a->negative))                                                                \
    return ol_index_outside(environment, at, a->limit[k], a->dim[k], a->error)

/* Whether all indices of a run of the first index tensor are 0 ... limit - 1 and none is to be skipped. */
OL_RARE bool ol_index_plain(const ol_index_args *a, int64_t at, int64_t begin, int64_t end, int64_t by) {
    const auto *index = reinterpret_cast<const int64_t *>(a->index[0]) + at;
    const int64_t stride = a->index_stride[a->dims - 1];
    const uint64_t limit = static_cast<uint64_t>(a->limit[0]);
    uint64_t outside = a->skip >= 0;
    if (stride == 1)
        for (int64_t i = begin; i < end; i += by) outside |= static_cast<uint64_t>(index[i]) >= limit;
    else
        for (int64_t i = begin; i < end; i += by) outside |= static_cast<uint64_t>(index[i * stride]) >= limit;
    return outside == 0;
}

/* Move{}(T *data, T *value) is done for the elements [begin, end) of the run at `place`, in order on the host. */
template <class T, class Move>
OL_RARE int32_t ol_index_run(const ol_index_args *a, const ol_index_place &place, int64_t begin, int64_t end, int64_t by,
                             ol_env *environment, Move move) {
    const uint32_t inner = a->dims - 1, count = a->count;
    T *data = reinterpret_cast<T *>(a->data) + place.data;
    T *value = reinterpret_cast<T *>(a->value) + place.value;
    const int64_t data_stride = a->data_stride[inner], value_stride = a->value_stride[inner], skip = a->skip;
    bool row = data_stride == 1 && value_stride == 1;
    for (uint32_t k = 0; k < count; ++k) row = row && a->index_stride[k * 8 + inner] == 0;
    if (row) { /* the index is the same all along */
        for (uint32_t k = 0; k < count; ++k) {
            int64_t at = reinterpret_cast<const int64_t *>(a->index[k])[place.index[k]];
            if (at == skip || (a->error == OL_INDEX_IGNORED && !ol_index_inside(at, a->limit[k], a->negative))) return OL_OK;
            OL_INDEX_CHECK(at, k);
            data += at * a->step[k];
        }
        for (int64_t i = begin; i < end; i += by) move(data + i, value + i);
        return OL_OK;
    }
    if (count == 1 && ol_index_plain(a, place.index[0], begin, end, by)) { /* the loop need not look at each index again */
        const auto *index = reinterpret_cast<const int64_t *>(a->index[0]) + place.index[0];
        const int64_t index_stride = a->index_stride[inner], step = a->step[0];
        if (Move::copies && index_stride == 1 && value_stride == 1 && data_stride == 0)
            for (int64_t i = begin; i < end; i += by) move(data + index[i] * step, value + i);
        else
            for (int64_t i = begin; i < end; i += by)
                move(data + index[i * index_stride] * step + i * data_stride, value + i * value_stride);
        return OL_OK;
    }
    for (int64_t i = begin; i < end; i += by) {
        T *target = data + i * data_stride;
        for (uint32_t k = 0; k < count; ++k) {
            int64_t at = reinterpret_cast<const int64_t *>(a->index[k])[place.index[k] + i * a->index_stride[k * 8 + inner]];
            if (at == skip || (a->error == OL_INDEX_IGNORED && !ol_index_inside(at, a->limit[k], a->negative))) {
                target = nullptr;
                break;
            }
            OL_INDEX_CHECK(at, k);
            target += at * a->step[k];
        }
        if (target != nullptr) move(target, value + i * value_stride);
    }
    return OL_OK;
}

/* Every part takes some of the runs, or of the only run. `ordered`: elements may fall on the same place, and the last
 * one wins or the sums are rounded in order. On the host such a call has one part. On a device the threads share out an
 * inner loop that can not meet itself; one whose places depend on the index is walked by a single thread. */
template <class T, bool ordered, class Move>
OL_DEVICE int32_t ol_index_walk(const ol_index_args *a, ol_dim3 block, ol_dim3 grid, ol_env *environment, Move move) {
    const uint32_t inner = a->dims - 1;
    const int64_t n = a->size[inner];
    int64_t runs = 1;
    for (uint32_t d = 0; d < inner; ++d) runs *= a->size[d];
#ifdef __CUDACC__
    int64_t begin = threadIdx.x, by = blockDim.x, first = block.x, stride = grid.x;
    if (ordered) {
        bool meets = a->data_stride[inner] == 0;
        for (uint32_t k = 0; k < a->count; ++k) meets = meets || a->index_stride[k * 8 + inner] != 0;
        if (block.x != 0 || (meets && threadIdx.x != 0)) return OL_OK;
        if (meets) by = 1;
        first = 0;
        stride = 1;
    } else if (runs == 1) {
        begin += static_cast<int64_t>(block.x) * blockDim.x;
        by *= grid.x;
        first = 0;
        stride = 1;
    }
    for (int64_t run = first; run < runs; run += stride) {
        const int32_t status = ol_index_run<T>(a, ol_index_seek(a, run), begin, n, by, environment, move);
        if (status != OL_OK) return status;
    }
    return OL_OK;
#else
    if (inner == 0) {
        const ol_share w = ol_share_of(n, block, grid);
        return ol_index_run<T>(a, ol_index_place{}, w.begin, w.end, 1, environment, move);
    }
    int64_t first = 0, past = runs, counter[OL_MAX_DIMS] = {};
    ol_index_place place{};
    if (grid.x != 1) {
        first = runs * block.x / grid.x;
        past = runs * (block.x + 1) / grid.x;
        place = ol_index_seek(a, first);
        int64_t rest = first;
        for (uint32_t d = inner; d-- > 0; rest /= a->size[d]) counter[d] = rest % a->size[d];
    }
    for (int64_t run = first; run < past; ++run) {
        const int32_t status = ol_index_run<T>(a, place, 0, n, 1, environment, move);
        if (status != OL_OK) return status;
        for (uint32_t d = inner; d-- > 0;) { /* the next run, like an odometer */
            place.data += a->data_stride[d];
            place.value += a->value_stride[d];
            for (uint32_t k = 0; k < a->count; ++k) place.index[k] += a->index_stride[k * 8 + d];
            if (++counter[d] < a->size[d]) break;
            counter[d] = 0;
            place.data -= a->size[d] * a->data_stride[d];
            place.value -= a->size[d] * a->value_stride[d];
            for (uint32_t k = 0; k < a->count; ++k) place.index[k] -= a->size[d] * a->index_stride[k * 8 + d];
        }
    }
    return OL_OK;
#endif
}

struct ol_move_out {
    static constexpr bool copies = true;
    template <class T> OL_DEVICE void operator()(T *data, T *value) const { *value = *data; }
};
struct ol_move_in {
    static constexpr bool copies = true;
    template <class T> OL_DEVICE void operator()(T *data, T *value) const { *data = *value; }
};

template <bool ordered, class Move>
OL_DEVICE int32_t ol_index_move(const ol_index_args *a, ol_dim3 block, ol_dim3 grid, ol_env *environment, Move move) {
#define OL_CASE(size, T)                                                                                               \
    case size: return ol_index_walk<T, ordered>(a, block, grid, environment, move)
    switch (a->bytes) {
        OL_CASE(1, uint8_t);
        OL_CASE(2, uint16_t);
        OL_CASE(4, uint32_t);
        OL_CASE(8, uint64_t);
    default: OL_FAIL("elements of %u bytes are not known", a->bytes);
    }
#undef OL_CASE
}

OL_DEVICE int32_t ol_index_get(const ol_index_args *a, ol_dim3 block, ol_dim3 grid, ol_env *environment) {
    return ol_index_move<false>(a, block, grid, environment, ol_move_out{});
}
OL_DEVICE int32_t ol_index_set(const ol_index_args *a, ol_dim3 block, ol_dim3 grid, ol_env *environment) {
    return ol_index_move<true>(a, block, grid, environment, ol_move_in{});
}

/* Integers wrap around, so they are added and multiplied without sign; a bool is a truth value. */
template <class T> struct ol_wrapping {
    typedef T type;
};
template <> struct ol_wrapping<uint8_t> {
    typedef uint32_t type;
};
template <> struct ol_wrapping<int8_t> {
    typedef uint32_t type;
};
template <> struct ol_wrapping<int16_t> {
    typedef uint32_t type;
};
template <> struct ol_wrapping<int32_t> {
    typedef uint32_t type;
};
template <> struct ol_wrapping<int64_t> {
    typedef uint64_t type;
};
template <> struct ol_wrapping<bool> {
    typedef uint32_t type;
};
template <> struct ol_wrapping<ol_half> {
    typedef float type;
};
template <> struct ol_wrapping<ol_bfloat> {
    typedef float type;
};

/* How an element is joined to what is there. */
enum : uint32_t { OL_COMBINE_ADD, OL_COMBINE_MUL, OL_COMBINE_MIN, OL_COMBINE_MAX };

/* A sum in a narrow float type is rounded after every element, as PyTorch does. */
template <class T, uint32_t kind> struct ol_combine {
    static constexpr bool copies = false;
    typename ol_wrapping<T>::type factor;
    OL_DEVICE void operator()(T *data, T *value) const {
        typedef typename ol_wrapping<T>::type W;
        const ol_compute<T> there = ol_load(data), comes = ol_load(value);
        if constexpr (kind == OL_COMBINE_ADD)
            ol_store(data, static_cast<ol_compute<T>>(static_cast<W>(there) + static_cast<W>(factor * static_cast<W>(comes))));
        else if constexpr (kind == OL_COMBINE_MUL)
            ol_store(data, static_cast<ol_compute<T>>(static_cast<W>(there) * static_cast<W>(comes)));
        else if constexpr (kind == OL_COMBINE_MIN) /* a NaN stays or comes in */
            ol_store(data, comes != comes || comes < there ? comes : there);
        else
            ol_store(data, comes != comes || there < comes ? comes : there);
    }
};

template <class T, uint32_t kind>
OL_DEVICE int32_t ol_combine_as(const ol_index_args *a, ol_dim3 block, ol_dim3 grid, ol_env *environment) {
    typedef typename ol_wrapping<T>::type W;
    ol_combine<T, kind> join;
    if constexpr (W(0.5f) != W(0))
        join.factor = static_cast<W>(a->factor);
    else
        join.factor = static_cast<W>(a->whole);
    return ol_index_walk<T, true>(a, block, grid, environment, join);
}

template <uint32_t kind>
OL_DEVICE int32_t ol_index_combine(const ol_index_args *a, ol_dim3 block, ol_dim3 grid, ol_env *environment) {
    switch (a->dtype) {
    case OL_BOOL: return ol_combine_as<bool, kind>(a, block, grid, environment);
    case OL_U8: return ol_combine_as<uint8_t, kind>(a, block, grid, environment);
    case OL_I8: return ol_combine_as<int8_t, kind>(a, block, grid, environment);
    case OL_I16: return ol_combine_as<int16_t, kind>(a, block, grid, environment);
    case OL_I32: return ol_combine_as<int32_t, kind>(a, block, grid, environment);
    case OL_I64: return ol_combine_as<int64_t, kind>(a, block, grid, environment);
    case OL_F16: return ol_combine_as<ol_half, kind>(a, block, grid, environment);
    case OL_BF16: return ol_combine_as<ol_bfloat, kind>(a, block, grid, environment);
    case OL_F32: return ol_combine_as<float, kind>(a, block, grid, environment);
    case OL_F64: return ol_combine_as<double, kind>(a, block, grid, environment);
    default: OL_FAIL("element type %u is not known", a->dtype);
    }
}

template <class T> OL_DEVICE int32_t ol_masked_scatter_as(const ol_masked_args *a, ol_env *environment) {
    auto *out = reinterpret_cast<T *>(a->out);
    const auto *in = reinterpret_cast<const T *>(a->source);
    const auto *mask = reinterpret_cast<const uint8_t *>(a->mask);
    int64_t taken = 0;
    for (int64_t i = 0; i < a->count; ++i) {
        if (mask[i] == 0) continue;
        if (taken == a->limit)
            OL_FAIL("RuntimeError: the mask names more elements than the source has (%lld)", static_cast<long long>(a->limit));
        out[i] = in[taken++];
    }
    return OL_OK;
}

/* What an element gets depends on all before it: one thread. */
OL_DEVICE int32_t ol_masked_scatter(const ol_masked_args *a, ol_dim3 block, ol_dim3, ol_env *environment) {
    if (block.x != 0 || threadIdx.x != 0) return OL_OK;
    switch (a->bytes) {
    case 1: return ol_masked_scatter_as<uint8_t>(a, environment);
    case 2: return ol_masked_scatter_as<uint16_t>(a, environment);
    case 4: return ol_masked_scatter_as<uint32_t>(a, environment);
    case 8: return ol_masked_scatter_as<uint64_t>(a, environment);
    default: OL_FAIL("elements of %u bytes are not known", a->bytes);
    }
}

/* Halving; a NaN in the row counts as greater than all, and so does one that is looked for. */
template <class T> OL_DEVICE int32_t ol_searchsorted_as(const ol_search_args *a, ol_dim3 block, ol_dim3 grid) {
    const ol_share w = ol_share_of(a->rows * a->count, block, grid);
    for (int64_t i = w.begin; i < w.end; i += w.step) {
        const T *row = reinterpret_cast<const T *>(a->sorted) + (a->pitch == 0 ? 0 : i / a->count * a->pitch);
        const ol_compute<T> value = ol_load(reinterpret_cast<const T *>(a->value) + i);
        int64_t first = 0, past = a->length;
        while (first < past) {
            const int64_t middle = first + (past - first) / 2;
            const ol_compute<T> there = ol_load(row + middle);
            if (a->right ? !(there > value) : !(there >= value))
                first = middle + 1;
            else
                past = middle;
        }
        if (a->narrow)
            reinterpret_cast<int32_t *>(a->out)[i] = static_cast<int32_t>(first);
        else
            reinterpret_cast<int64_t *>(a->out)[i] = first;
    }
    return OL_OK;
}

OL_DEVICE int32_t ol_searchsorted(const ol_search_args *a, ol_dim3 block, ol_dim3 grid, ol_env *environment) {
    switch (a->dtype) {
    case OL_U8: return ol_searchsorted_as<uint8_t>(a, block, grid);
    case OL_I8: return ol_searchsorted_as<int8_t>(a, block, grid);
    case OL_I16: return ol_searchsorted_as<int16_t>(a, block, grid);
    case OL_I32: return ol_searchsorted_as<int32_t>(a, block, grid);
    case OL_I64: return ol_searchsorted_as<int64_t>(a, block, grid);
    case OL_F16: return ol_searchsorted_as<ol_half>(a, block, grid);
    case OL_BF16: return ol_searchsorted_as<ol_bfloat>(a, block, grid);
    case OL_F32: return ol_searchsorted_as<float>(a, block, grid);
    case OL_F64: return ol_searchsorted_as<double>(a, block, grid);
    default: OL_FAIL("element type %u can not be searched for", a->dtype);
    }
}

}  // namespace OL_NAMESPACE
#endif
