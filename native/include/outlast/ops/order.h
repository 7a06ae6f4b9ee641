/* sort, topk and selection by rank of short rows.
 *
 * An element becomes an unsigned key in the wanted order (a NaN is the largest, -0 equals 0), its index goes behind the
 * key: all are different, so that every way of sorting them is stable.
 */
#ifndef OUTLAST_OPS_ORDER_H
#define OUTLAST_OPS_ORDER_H
#include "outlast/args_rows.h"
#include "outlast/ops/rows.h"

namespace OL_NAMESPACE {

struct ol_wide_key {
    uint64_t key;
    uint32_t index;
    OL_DEVICE bool operator<(const ol_wide_key &b) const { return key < b.key || (key == b.key && index < b.index); }
};

/* Elements of up to 32 bits fit into one word with their index. */
OL_DEVICE uint32_t ol_key_of(float x) {
    const uint32_t bits = ol_bits<uint32_t>(x == 0 ? 0.0f : x);
    return x != x ? 0xffffffffu : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
OL_DEVICE uint32_t ol_key_of(uint8_t x) { return x; }
OL_DEVICE uint32_t ol_key_of(int32_t x) { return static_cast<uint32_t>(x) ^ 0x80000000u; }
OL_DEVICE uint64_t ol_key_of(int64_t x) { return static_cast<uint64_t>(x) ^ 0x8000000000000000ull; }
OL_DEVICE uint64_t ol_key_of(double x) {
    const uint64_t bits = ol_bits<uint64_t>(x == 0 ? 0.0 : x);
    return x != x ? ~uint64_t{0} : bits >> 63 ? ~bits : bits | 0x8000000000000000ull;
}
OL_DEVICE uint64_t ol_indexed(uint32_t key, bool descending, uint32_t index) {
    return static_cast<uint64_t>(descending ? ~key : key) << 32 | index;
}
OL_DEVICE ol_wide_key ol_indexed(uint64_t key, bool descending, uint32_t index) { return {descending ? ~key : key, index}; }
OL_DEVICE uint32_t ol_index_of(uint64_t key) { return static_cast<uint32_t>(key); }
OL_DEVICE uint32_t ol_index_of(const ol_wide_key &key) { return key.index; }

/* Merge sort of n <= OL_SORT_MAX keys, from runs of 8 sorted by insertion; returns where the result is. */
template <class K> OL_DEVICE K *ol_sort_keys(K *keys, K *spare, int64_t n) {
    for (int64_t i = 0; i < n; i += 8) {
        const int64_t stop = n - i < 8 ? n : i + 8;
        for (int64_t j = i + 1; j < stop; ++j) {
            const K key = keys[j];
            int64_t k = j;
            for (; k > i && key < keys[k - 1]; --k) keys[k] = keys[k - 1];
            keys[k] = key;
        }
    }
    for (int64_t width = 8; width < n; width *= 2) {
        for (int64_t i = 0; i < n; i += 2 * width) {
            const int64_t middle = n - i < width ? n : i + width, stop = n - i < 2 * width ? n : i + 2 * width;
            int64_t a = i, b = middle, to = i;
            while (a < middle && b < stop) { /* without a branch on the data */
                const bool second = keys[b] < keys[a];
                spare[to++] = second ? keys[b] : keys[a];
                b += second;
                a += !second;
            }
            while (a < middle) spare[to++] = keys[a++];
            while (b < stop) spare[to++] = keys[b++];
        }
        K *other = keys;
        keys = spare;
        spare = other;
    }
    return keys;
}

/* Whether one of 64 elements can be among the first k: its key is below the worst of those. */
template <class T, class Word> OL_DEVICE bool ol_any_before(const T *x, Word worst, bool descending) {
    typedef ol_compute<T> C;
    Word any = 0;
    const Word flip = descending ? ~Word{0} : Word{0};
    for (int i = 0; i < 64; ++i) any |= (ol_key_of(static_cast<C>(ol_load(x + i))) ^ flip) < worst ? 1 : 0;
    return any != 0;
}
OL_DEVICE uint32_t ol_word_of(uint64_t key) { return static_cast<uint32_t>(key >> 32); }
OL_DEVICE uint64_t ol_word_of(const ol_wide_key &key) { return key.key; }

#ifdef __CUDACC__
/* The keys of a row in order, without room for them: a device's threads have some kilobytes of stack at most.  Each step to
 * the next or the previous rank looks at all elements, so that n in order cost n^2 looks; rows are short. */
template <class T, class K> struct ol_ranks {
    const T *x;
    int64_t step, n;
    bool descending;
    int64_t rank; /* of `at`; -1 and n stand before the first and behind the last */
    K at;

    OL_DEVICE K operator[](int64_t wanted) {
        typedef ol_compute<T> C;
        if (rank < 0 && wanted > n / 2) rank = n; /* from the nearer end */
        while (rank != wanted) {
            const bool up = rank < wanted, free = rank < 0 || rank == n;
            K best{};
            bool found = false;
            for (int64_t i = 0; i < n; ++i) {
                const K key = ol_indexed(ol_key_of(static_cast<C>(ol_load(x + i * step))), descending, static_cast<uint32_t>(i));
                const bool beyond = free || (up ? at < key : key < at);
                if (beyond && (!found || (up ? key < best : best < key))) {
                    best = key;
                    found = true;
                }
            }
            at = best;
            rank += up ? 1 : -1;
        }
        return at;
    }
};
template <class T, class Done> OL_DEVICE void ol_ordered_rows(const ol_rows_args *a, ol_dim3 block, ol_dim3 grid, Done done) {
    typedef ol_compute<T> C;
    typedef decltype(ol_indexed(ol_key_of(C{}), false, 0u)) K;
    const ol_share share = ol_share_of(a->outer * a->inner, block, grid);
    for (int64_t r = share.begin; r < share.end; r += share.step) {
        const int64_t outer = r / a->inner, inner = r % a->inner;
        const T *x = ol_at<const T>(a->in, a->in_stride, outer, inner);
        done(x, outer, inner, ol_ranks<T, K>{x, a->in_stride[1], a->n, a->descending != 0, -1, K{}});
    }
}
#else
/* Calls done(x, outer, inner, keys) for each row of this share, with its first a->k elements in order.
 *
 * Few of many: candidates are gathered until there are `room`, then sorted and cut to k; from then on the worst of them
 * is the bar for the rest. */
template <class T, class Done> OL_DEVICE void ol_ordered_rows(const ol_rows_args *a, ol_dim3 block, ol_dim3 grid, Done done) {
    typedef ol_compute<T> C;
    typedef decltype(ol_indexed(ol_key_of(C{}), false, 0u)) K;
    const bool descending = a->descending != 0;
    const int64_t step = a->in_stride[1], n = a->n;
    const int64_t room = n <= OL_SORT_MAX && 4 * a->k > n ? OL_SORT_MAX : a->k <= 16 ? 32 : a->k <= 128 ? 4 * a->k : OL_SORT_MAX;
    const ol_share share = ol_share_of(a->outer * a->inner, block, grid);
    for (int64_t r = share.begin; r < share.end; r += share.step) {
        const int64_t outer = a->inner == 1 ? r : r / a->inner, inner = a->inner == 1 ? 0 : r % a->inner;
        const T *x = ol_at<const T>(a->in, a->in_stride, outer, inner);
        K first[OL_SORT_MAX], second[OL_SORT_MAX], *keys = first, *spare = second;
        K worst{};
        bool full = false;
        int64_t have = 0;
        const auto cut = [&] {
            K *sorted = ol_sort_keys(keys, spare, have);
            if (sorted != keys) {
                spare = keys;
                keys = sorted;
            }
            have = have < a->k ? have : a->k;
        };
        for (int64_t i = 0; i < n;) {
            if (full && step == 1)
                while (i + 64 <= n && !ol_any_before(x + i, ol_word_of(worst), descending)) i += 64;
            const int64_t stop = n - i < 64 ? n : i + 64;
            for (; i < stop; ++i) {
                const K key = ol_indexed(ol_key_of(static_cast<C>(ol_load(x + i * step))), descending, static_cast<uint32_t>(i));
                if (full && !(key < worst)) continue;
                keys[have++] = key;
                if (have == room && i + 1 < n) {
                    cut();
                    worst = keys[have - 1];
                    full = true;
                }
            }
        }
        cut();
        done(x, outer, inner, keys);
    }
}
#endif

/* sort (k = n) and topk: the first k in order, and their indices */
template <class T> OL_DEVICE int32_t ol_order(const ol_rows_args *a, ol_dim3 block, ol_dim3 grid, ol_env *) {
    ol_ordered_rows<T>(a, block, grid, [a](const T *x, int64_t outer, int64_t inner, auto keys) {
        T *y = ol_at<T>(a->out, a->out_stride, outer, inner);
        int64_t *where = ol_at<int64_t>(a->second, a->second_stride, outer, inner);
        for (int64_t i = 0; i < a->k; ++i) {
            const int64_t index = ol_index_of(keys[i]);
            if (a->out) y[i * a->out_stride[1]] = x[index * a->in_stride[1]];
            if (a->second) where[i * a->second_stride[1]] = index;
        }
    });
    return OL_OK;
}

/* kthvalue and median: element number k - 1 in order and its index; with `nan_wins` a NaN in the row is the result. */
template <class T> OL_DEVICE int32_t ol_select(const ol_rows_args *a, ol_dim3 block, ol_dim3 grid, ol_env *) {
    ol_ordered_rows<T>(a, block, grid, [a](const T *x, int64_t outer, int64_t inner, auto keys) {
        int64_t rank = a->k - 1;
        if (a->nan_wins) /* NaNs are last in order; the first of them */
            for (int64_t i = a->n - 1; i >= 0; --i) {
                const auto v = ol_load(x + ol_index_of(keys[i]) * a->in_stride[1]);
                if (v == v) break;
                rank = i;
            }
        const int64_t index = ol_index_of(keys[rank]);
        if (a->out) *ol_at<T>(a->out, a->out_stride, outer, inner) = x[index * a->in_stride[1]];
        if (a->second) *ol_at<int64_t>(a->second, a->second_stride, outer, inner) = index;
    });
    return OL_OK;
}

}  // namespace OL_NAMESPACE
#endif
