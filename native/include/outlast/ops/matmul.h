/* Matrix products of small sizes: nothing is packed or allocated, so that a call costs little more than its products.
 *
 * Three kernels: `dot` (a and b contiguous along k), `outer` (b contiguous along its columns, a anyhow), and `whole` for
 * integers with any strides.  The order of summation is that of the tiles (tiles.h).  Work is shared out by rows and
 * columns of the result.
 */
#ifndef OUTLAST_OPS_MATMUL_H
#define OUTLAST_OPS_MATMUL_H
#include "outlast/args_matmul.h"
#include "outlast/ops/tiles.h"

namespace OL_NAMESPACE {

#ifdef __CUDACC__
/* One thread, one result. */
template <class T> OL_DEVICE int32_t ol_matmul_plain(const ol_matmul_args *args, ol_dim3 block, ol_dim3 grid, ol_env *) {
    typedef ol_compute<T> C;
    const ol_share share = ol_share_of(args->batch * args->m * args->n, block, grid);
    for (int64_t item = share.begin; item < share.end; item += share.step) {
        const int64_t j = item % args->n, i = item / args->n % args->m, z = item / args->n / args->m;
        const T *a = reinterpret_cast<const T *>(args->a) + z * args->a_batch + i * args->a_m;
        const T *b = reinterpret_cast<const T *>(args->b) + z * args->b_batch + j * args->b_n;
        C sum[2] = {};
        for (int64_t k = 0; k < args->k; ++k) {
            const C x = ol_load(a + k * args->a_k), y = ol_load(b + k * args->b_k);
            if constexpr (ol_is_float<C>) sum[k & 1] = fma(x, y, sum[k & 1]);
            else sum[k & 1] += x * y;
        }
        C value = sum[0] + sum[1];
        if constexpr (ol_is_float<C>) value *= static_cast<C>(args->alpha);
        else value *= static_cast<C>(args->whole_alpha);
        if (args->c != 0) {
            const C c = ol_load(reinterpret_cast<const T *>(args->c) + z * args->c_batch + i * args->c_m + j * args->c_n);
            if constexpr (ol_is_float<C>) value += static_cast<C>(args->beta) * c;
            else value += static_cast<C>(args->whole_beta) * c;
        }
        if (args->activation == OL_ACT_RELU) value = value < 0 ? 0 : value;
        ol_store(reinterpret_cast<T *>(args->out) + z * args->out_batch + i * args->out_m + j * args->out_n, value);
    }
    return OL_OK;
}
template <class T> OL_DEVICE int32_t ol_matmul_dot(const ol_matmul_args *a, ol_dim3 b, ol_dim3 g, ol_env *e) { return ol_matmul_plain<T>(a, b, g, e); }
template <class T> OL_DEVICE int32_t ol_matmul_outer(const ol_matmul_args *a, ol_dim3 b, ol_dim3 g, ol_env *e) { return ol_matmul_plain<T>(a, b, g, e); }
template <class T> OL_DEVICE int32_t ol_matmul_whole(const ol_matmul_args *a, ol_dim3 b, ol_dim3 g, ol_env *e) { return ol_matmul_plain<T>(a, b, g, e); }
#else

/* One matrix of the batch, and what is done to a sum before it is stored. */
template <class T> struct ol_product {
    typedef ol_compute<T> C;
    const T *a, *b, *c;
    T *out;
    const ol_matmul_args *args;
    C alpha, beta;

    OL_DEVICE ol_product(const ol_matmul_args *given, int64_t z)
        : a(reinterpret_cast<const T *>(given->a) + z * given->a_batch), b(reinterpret_cast<const T *>(given->b) + z * given->b_batch),
          c(given->c == 0 ? nullptr : reinterpret_cast<const T *>(given->c) + z * given->c_batch),
          out(reinterpret_cast<T *>(given->out) + z * given->out_batch), args(given), alpha(static_cast<C>(given->alpha)),
          beta(static_cast<C>(given->beta)) {}

    OL_DEVICE void finish_one(C value, int64_t i, int64_t j) const {
        value = alpha * value;
        if (c != nullptr) value += beta * ol_load(c + i * args->c_m + j * args->c_n);
        if (args->activation == OL_ACT_RELU) value = value < 0 ? 0 : value;
        ol_store(out + i * args->out_m + j * args->out_n, value);
    }
    OL_RARE void finish_each(ol_wide<C> sum, int64_t i, int64_t j, int count) const {
        for (int lane = 0; lane < count; ++lane) finish_one(sum[lane], i, j + lane);
    }
    OL_DEVICE bool in_runs() const { return (c == nullptr || args->c_n == 1) && args->out_n == 1; }
    /* Sums of `count` <= width columns from j on, of row i. */
    OL_DEVICE void finish(ol_wide<C> sum, int64_t i, int64_t j, int count) const {
        if (!in_runs()) [[unlikely]] return finish_each(sum, i, j, count);
        sum = ol_fill(alpha) * sum;
        if (c != nullptr) {
            const T *from = c + i * args->c_m + j;
            sum += ol_fill(beta) * (count == ol_width<C> ? ol_tile_load(from) : ol_tile_part(from, count));
        }
        if (args->activation == OL_ACT_RELU) sum = sum < 0 ? ol_wide<C>{} : sum;
        ol_tile_put(out + i * args->out_m + j, sum, count);
    }
    /* A dot tile's sums: R rows of width / R columns. */
    template <int R> OL_DEVICE void finish_tile(ol_wide<C> sum, int64_t i, int64_t j) const {
        constexpr int cols = ol_width<C> / R;
        if constexpr (ol_same<T, C>)
            if (in_runs()) [[likely]] {
                typedef ol_vector<C, cols> piece;
                OL_UNROLL
                for (int r = 0; r < R; ++r) {
                    piece x, y;
                    memcpy(&x, reinterpret_cast<const char *>(&sum) + r * sizeof x, sizeof x);
                    x = alpha * x;
                    if (c != nullptr) {
                        memcpy(&y, c + (i + r) * args->c_m + j, sizeof y);
                        x += beta * y;
                    }
                    if (args->activation == OL_ACT_RELU) x = x < 0 ? piece{} : x;
                    memcpy(out + (i + r) * args->out_m + j, &x, sizeof x);
                }
                return;
            }
        C sums[ol_width<C>];
        memcpy(sums, &sum, sizeof sums);
        for (int lane = 0; lane < ol_width<C>; ++lane) finish_one(sums[lane], i + lane / cols, j + lane % cols);
    }

    /* Columns `from` ... `to` of one row of the result. */
    OL_RARE void dot_row(int64_t i, int64_t from, int64_t to) const {
        const T *row = a + i * args->a_m;
        int64_t j = from;
        for (; j + ol_width<C> <= to; j += ol_width<C>)
            finish(ol_dot_tile<T, 1, false>(row, 0, b + j * args->b_n, args->b_n, args->k), i, j, ol_width<C>);
        if (j < to) {
            const int left = static_cast<int>(to - j);
            finish(ol_dot_tile<T, 1, true>(row, 0, b + j * args->b_n, args->b_n, args->k, left), i, j, left);
        }
    }
    /* The same of R rows. */
    template <int R> OL_RARE void dot_rows(int64_t i, int64_t from, int64_t to) const {
        constexpr int cols = ol_width<C> / R;
        int64_t j = from;
        for (; j + cols <= to; j += cols)
            finish_tile<R>(ol_dot_tile<T, R, false>(a + i * args->a_m, args->a_m, b + j * args->b_n, args->b_n, args->k), i, j);
        if (j < to)
            for (int r = 0; r < R; ++r) dot_row(i + r, j, to);
    }
    template <int R, int V> OL_RARE void outer_rows(int64_t i, int64_t from, int64_t to) const {
        constexpr int width = ol_width<C>;
        const T *rows = a + i * args->a_m;
        int64_t j = from;
        for (; j + V * width <= to; j += V * width) {
            ol_wide<C> sum[R][V];
            ol_outer_tile<T, T, R, V, false>(rows, args->a_m, args->a_k, b + j, args->b_k, args->k, 0, sum);
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < V; ++v) finish(sum[r][v], i + r, j + v * width, width);
        }
        for (; j < to; j += width) {
            const int count = to - j < width ? static_cast<int>(to - j) : width;
            ol_wide<C> sum[R][1];
            ol_outer_tile<T, T, R, 1, true>(rows, args->a_m, args->a_k, b + j, args->b_k, args->k, count, sum);
            for (int r = 0; r < R; ++r) finish(sum[r][0], i + r, j, count);
        }
    }
};

/* Calls part(z, first row, last row, first column, last column) for this part's share of the result. */
template <class Part> OL_DEVICE void ol_matmul_shares(const ol_matmul_args *args, ol_dim3 block, ol_dim3 grid, const Part &part) {
    const bool whole = grid.x == 1;
    const int64_t rows = whole ? args->m : 4, columns = whole ? args->n : 64; /* a piece of work: whole tiles */
    const int64_t down = whole ? 1 : (args->m + rows - 1) / rows, across = whole ? 1 : (args->n + columns - 1) / columns;
    const ol_share share = ol_share_of(args->batch * down * across, block, grid);
    for (int64_t item = share.begin; item < share.end; ++item) {
        const int64_t z = whole ? item : item / across / down;
        const int64_t i = whole ? 0 : item / across % down * rows, j = whole ? 0 : item % across * columns;
        part(z, i, i + rows < args->m ? i + rows : args->m, j, j + columns < args->n ? j + columns : args->n);
    }
}

template <class T> OL_DEVICE int32_t ol_matmul_dot(const ol_matmul_args *args, ol_dim3 block, ol_dim3 grid, ol_env *) {
    typedef ol_compute<T> C;
    if (args->n == 1 && args->m == 1) {
        if (block.x == 0)
            for (int64_t z = 0; z < args->batch; ++z) {
                const ol_product<T> product(args, z);
                product.finish_one(ol_dot_one(product.a, product.b, args->k), 0, 0);
            }
        return OL_OK;
    }
    ol_matmul_shares(args, block, grid, [args](int64_t z, int64_t i, int64_t to, int64_t j, int64_t j_to) __attribute__((always_inline)) {
        const ol_product<T> product(args, z);
        if constexpr (ol_width<C> == 16)
            for (; i + 4 <= to; i += 4) product.template dot_rows<4>(i, j, j_to);
        else
            for (; i + 2 <= to; i += 2) product.template dot_rows<2>(i, j, j_to);
        for (; i < to; ++i) product.dot_row(i, j, j_to);
    });
    return OL_OK;
}

template <class T> OL_DEVICE int32_t ol_matmul_outer(const ol_matmul_args *args, ol_dim3 block, ol_dim3 grid, ol_env *) {
    ol_matmul_shares(args, block, grid, [args](int64_t z, int64_t i, int64_t to, int64_t j, int64_t j_to) __attribute__((always_inline)) {
        const ol_product<T> product(args, z);
        if constexpr (OL_VECTOR_BYTES == 64)
            for (; i + 4 <= to; i += 4) product.template outer_rows<4, 2>(i, j, j_to);
        else
            for (; i + 2 <= to; i += 2) product.template outer_rows<2, 2>(i, j, j_to);
        for (; i < to; ++i) product.template outer_rows<1, 4>(i, j, j_to);
    });
    return OL_OK;
}

/* Integers: sums wrap around in their own type, so any order gives the same. */
template <class T> OL_DEVICE int32_t ol_matmul_whole(const ol_matmul_args *args, ol_dim3 block, ol_dim3 grid, ol_env *) {
    ol_matmul_shares(args, block, grid, [args](int64_t z, int64_t i, int64_t to, int64_t j, int64_t j_to) __attribute__((always_inline)) {
        constexpr int64_t columns = 64;
        const T *b = reinterpret_cast<const T *>(args->b) + z * args->b_batch;
        const T alpha = static_cast<T>(args->whole_alpha), beta = static_cast<T>(args->whole_beta);
        for (; i < to; ++i) {
            const T *a = reinterpret_cast<const T *>(args->a) + z * args->a_batch + i * args->a_m;
            T *out = reinterpret_cast<T *>(args->out) + z * args->out_batch + i * args->out_m;
            for (int64_t first = j; first < j_to; first += columns) {
                const int64_t count = j_to - first < columns ? j_to - first : columns;
                T sum[columns] = {};
                for (int64_t k = 0; k < args->k; ++k) {
                    const T x = a[k * args->a_k], *y = b + k * args->b_k + first * args->b_n;
                    if (args->b_n == 1)
                        for (int64_t l = 0; l < count; ++l) sum[l] = static_cast<T>(sum[l] + 1u * x * y[l]);
                    else
                        for (int64_t l = 0; l < count; ++l) sum[l] = static_cast<T>(sum[l] + 1u * x * y[l * args->b_n]);
                }
                const T *c = reinterpret_cast<const T *>(args->c) + z * args->c_batch + i * args->c_m + first * args->c_n;
                for (int64_t l = 0; l < count; ++l) {
                    T value = static_cast<T>(1u * alpha * sum[l]);
                    if (args->c != 0) value = static_cast<T>(value + 1u * beta * c[l * args->c_n]);
                    out[(first + l) * args->out_n] = value;
                }
            }
        }
    });
    return OL_OK;
}
#endif

}  // namespace OL_NAMESPACE
#endif
