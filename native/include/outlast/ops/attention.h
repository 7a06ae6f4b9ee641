/* Scaled dot-product attention of a few queries over a few hundred keys.
 *
 * Keys are taken in spans of 256, counted from key 0, each with its own maximum; what earlier spans gave is rescaled.
 * Scores and sums of a query come in an order that depends on the number of keys alone (tiles.h), so neither the other
 * queries nor heads change a bit.  Like PyTorch's: a query that may see no key gets zeros and a logsumexp of 0, and so
 * does one whose scores are all NaN, since the maximum passes NaN over.
 */
#ifndef OUTLAST_OPS_ATTENTION_H
#define OUTLAST_OPS_ATTENTION_H
#include "outlast/args_attention.h"
#include "outlast/ops/math.h"
#include "outlast/ops/tiles.h"

namespace OL_NAMESPACE {

/* The addresses of one head. */
template <class T> struct ol_attention_head {
    typedef ol_compute<T> C;
    const ol_attention_args *args;
    const T *q, *k, *v;
    T *out;
    int64_t z, h;

    OL_DEVICE ol_attention_head(const ol_attention_args *given, int64_t batch, int64_t head) : args(given), z(batch), h(head) {
        const int64_t shared = args->group == 1 ? h : h / args->group;
        q = reinterpret_cast<const T *>(args->q) + z * args->q_batch + h * args->q_head;
        k = reinterpret_cast<const T *>(args->k) + z * args->k_batch + shared * args->k_head;
        v = reinterpret_cast<const T *>(args->v) + z * args->v_batch + shared * args->v_head;
        out = reinterpret_cast<T *>(args->out) + z * args->out_batch + h * args->out_head;
    }
    template <class M> OL_DEVICE const M *mask_row(int64_t i) const {
        return reinterpret_cast<const M *>(args->mask) + z * args->mask_batch + h * args->mask_head + i * args->mask_row;
    }
    OL_DEVICE void put_logsumexp(int64_t i, C largest, C total) const {
        if (args->logsumexp == 0) return;
        C *to = reinterpret_cast<C *>(args->logsumexp) + z * args->logsumexp_batch + h * args->logsumexp_head + i * args->logsumexp_row;
        *to = largest == -ol_infinity<C>() ? C(0) : largest + ol_log(total);
    }
};

#ifdef __CUDACC__
/* One thread, one query. */
template <class T> OL_DEVICE int32_t ol_attention(const ol_attention_args *args, ol_dim3 block, ol_dim3 grid, ol_env *) {
    typedef ol_compute<T> C;
    const C scale = static_cast<C>(args->scale), lowest = -ol_infinity<C>();
    const ol_share share = ol_share_of(args->batch * args->heads * args->queries, block, grid);
    for (int64_t item = share.begin; item < share.end; item += share.step) {
        const int64_t i = item % args->queries, h = item / args->queries % args->heads;
        const ol_attention_head<T> head(args, item / args->queries / args->heads, h);
        const int64_t keys = args->causal && i + 1 < args->keys ? i + 1 : args->keys;
        C sum[OL_HEAD_DIM_MAX], largest = lowest, total = 0;
        for (int64_t d = 0; d < args->dim; ++d) sum[d] = 0;
        for (int64_t j = 0; j < keys; ++j) {
            C score = 0;
            for (int64_t d = 0; d < args->dim; ++d)
                score = ol_fma(ol_load(head.q + i * args->q_row + d), ol_load(head.k + j * args->k_row + d), score);
            score *= scale;
            if (args->mask_kind == OL_MASK_ADDED) score += head.template mask_row<C>(i)[j * args->mask_column];
            if (args->mask_kind == OL_MASK_KEPT && head.template mask_row<uint8_t>(i)[j * args->mask_column] == 0) score = lowest;
            const C before = largest;
            if (score > largest) largest = score;
            if (largest == lowest) continue; /* nothing seen yet that counts */
            const C shrink = before == lowest ? C(0) : ol_exp(before - largest), weight = ol_exp(score - largest);
            total = total * shrink + weight;
            for (int64_t d = 0; d < args->dim; ++d)
                sum[d] = ol_fma(weight, ol_load(head.v + j * args->v_row + d), before == lowest ? C(0) : sum[d] * shrink);
        }
        for (int64_t d = 0; d < args->dim; ++d)
            ol_store(head.out + i * args->out_row + d, largest == lowest ? C(0) : sum[d] / total);
        head.put_logsumexp(i, largest, total);
    }
    return OL_OK;
}
#else

#define OL_KEY_SPAN 256 /* keys whose scores are held at once: a multiple of every tile */

/* The largest number, NaN passed over. */
template <class C> struct ol_op_peak : ol_op<C, ol_op_peak<C>, C> {
    OL_DEVICE C identity() const { return -ol_infinity<C>(); }
    OL_DEVICE C fill() const { return -ol_infinity<C>(); }
    template <class X> OL_DEVICE X map(X x) const { return x; }
    template <class X> OL_DEVICE X join(X a, X b) const { return b > a ? b : a; }
};

/* R queries from i on, of one head. */
template <class T, int R> struct ol_attention_rows {
    typedef ol_compute<T> C;
    static constexpr int width = ol_width<C>, columns = width / R;
    /* accumulators that fit the registers; see ol_matmul_outer */
    static constexpr int wide = R == 1 ? 4 : 2;

    const ol_attention_head<T> &head;
    const ol_attention_args *args;
    const int64_t i;
    C largest[R], total[R], shrink[R];
    alignas(64) C score[R][OL_KEY_SPAN];
    alignas(64) C sum[R][OL_HEAD_DIM_MAX];

    OL_DEVICE ol_attention_rows(const ol_attention_head<T> &given, int64_t row) : head(given), args(given.args), i(row) {}

    /* score = scale * q k^T for keys first ... first + n - 1; what follows up to a whole tile is undefined. */
    OL_DEVICE void multiply(int64_t first, int n) {
        const ol_wide<C> scale = ol_fill(static_cast<C>(args->scale));
        const T *q = head.q + i * args->q_row, *k = head.k + first * args->k_row;
        const auto put = [&](ol_wide<C> tile, int j) __attribute__((always_inline)) {
            tile = tile * scale;
            OL_UNROLL
            for (int r = 0; r < R; ++r)
                memcpy(&score[r][j], reinterpret_cast<const char *>(&tile) + r * columns * sizeof(C), columns * sizeof(C));
        };
        int j = 0;
        for (; j + columns <= n; j += columns)
            put(ol_dot_tile<T, R, false>(q, args->q_row, k + j * args->k_row, args->k_row, args->dim), j);
        if (j < n) put(ol_dot_tile<T, R, true>(q, args->q_row, k + j * args->k_row, args->k_row, args->dim, n - j), j);
    }
    OL_DEVICE void hide(int64_t first, int n) {
        for (int r = 0; r < R; ++r) {
            if (args->mask_kind == OL_MASK_ADDED) {
                const C *mask = head.template mask_row<C>(i + r) + first * args->mask_column;
                if (args->mask_column == 1)
                    for (int j = 0; j < n; ++j) score[r][j] += mask[j];
                else
                    for (int j = 0; j < n; ++j) score[r][j] += mask[j * args->mask_column];
            } else if (args->mask_kind == OL_MASK_KEPT) {
                const uint8_t *mask = head.template mask_row<uint8_t>(i + r) + first * args->mask_column;
                for (int j = 0; j < n; ++j)
                    if (mask[j * args->mask_column] == 0) score[r][j] = -ol_infinity<C>();
            }
            const int64_t seen = args->causal ? i + r + 1 - first : n;
            for (int j = seen < 0 ? 0 : (seen < n ? static_cast<int>(seen) : n); j % 16 != 0 || j < n; ++j)
                score[r][j] = -ol_infinity<C>(); /* up to whole vectors, which then weigh nothing */
        }
    }
    /* Scores become weights relative to the largest score so far. */
    OL_DEVICE void weigh(int n, bool first) {
        for (int r = 0; r < R; ++r) {
            const C here = ol_lanes<C>(score[r], n, ol_op_peak<C>{}), before = first ? -ol_infinity<C>() : largest[r];
            largest[r] = here > before ? here : before;
            const bool nothing = largest[r] == -ol_infinity<C>();
            shrink[r] = before == largest[r] ? C(1) : ol_exp(before - largest[r]);
            const C peak = nothing ? C(0) : largest[r];
            for (int j = 0; j < n; j += 16)
                for (int lane = 0; lane < 16; ++lane) score[r][j + lane] = ol_exp(score[r][j + lane] - peak);
            if (nothing) memset(score[r], 0, sizeof score[r]);
            const C added = ol_lanes<C>(score[r], n, ol_op_sum<C>{});
            total[r] = first ? added : total[r] * shrink[r] + added;
        }
    }
    template <int V, bool partial> OL_DEVICE void gather(int64_t from, int n, int d, int part, bool first, bool last) {
        ol_wide<C> tile[R][V];
        ol_outer_tile<C, T, R, V, partial>(score[0], OL_KEY_SPAN, 1, head.v + from * args->v_row + d, args->v_row, n, part, tile);
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v) {
                C *held = &sum[r][d + v * width];
                if (!first) tile[r][v] += ol_fill(shrink[r]) * ol_wide_load(held);
                if (!last) memcpy(held, &tile[r][v], sizeof tile[r][v]);
                else {
                    const C by = largest[r] == -ol_infinity<C>() ? C(0) : 1 / total[r];
                    ol_tile_put(head.out + (i + r) * args->out_row + d + v * width, tile[r][v] * ol_fill(by), partial ? part : width);
                }
            }
    }
    OL_DEVICE void run() {
        const int64_t keys = args->causal && i + R < args->keys ? i + R : args->keys, dim = args->dim;
        for (int64_t from = 0; from < keys; from += OL_KEY_SPAN) {
            const bool first = from == 0, last = from + OL_KEY_SPAN >= keys;
            const int n = last ? static_cast<int>(keys - from) : OL_KEY_SPAN;
            multiply(from, n);
            hide(from, n);
            weigh(n, first);
            int d = 0;
            for (; d + wide * width <= dim; d += wide * width) gather<wide, false>(from, n, d, width, first, last);
            for (; d < dim; d += width) gather<1, true>(from, n, d, dim - d < width ? static_cast<int>(dim - d) : width, first, last);
        }
        for (int r = 0; r < R; ++r) head.put_logsumexp(i + r, largest[r], total[r]);
    }
};
template <class T, int R> OL_RARE void ol_attend(const ol_attention_head<T> &head, int64_t i) { ol_attention_rows<T, R>(head, i).run(); }

template <class T> OL_DEVICE int32_t ol_attention(const ol_attention_args *args, ol_dim3 block, ol_dim3 grid, ol_env *) {
    constexpr int rows = ol_width<ol_compute<T>> == 16 ? 4 : 2;
    const int64_t blocks = (args->queries + rows - 1) / rows;
    const ol_share share = ol_share_of(args->batch * args->heads * blocks, block, grid);
    for (int64_t item = share.begin; item < share.end; ++item) {
        const int64_t which = blocks == 1 ? item : item / blocks, z = args->batch == 1 ? 0 : which / args->heads;
        const ol_attention_head<T> head(args, z, which - z * args->heads);
        int64_t i = (item - which * blocks) * rows;
        if (i + rows <= args->queries) ol_attend<T, rows>(head, i);
        else
            for (; i < args->queries; ++i) ol_attend<T, 1>(head, i);
    }
    return OL_OK;
}
#endif

}  // namespace OL_NAMESPACE
#endif
