/* Operators on rows: softmax and log_softmax with gradients, layer_norm with gradient, rms_norm, group_norm,
 * batch_norm with given statistics, scans.
 *
 * Rows are shared out over parts and threads; a row is never split.
 */
#ifndef OUTLAST_OPS_ROWS_H
#define OUTLAST_OPS_ROWS_H
#include "outlast/args_rows.h"
#include "outlast/ops/lanes.h"
#include "outlast/ops/math.h"

#ifndef __CUDACC__
#include <cmath>
#define OL_INDEPENDENT _Pragma("GCC ivdep") /* an output is an input exactly, or apart from it */
#else
#define OL_INDEPENDENT
#endif

#define OL_ROW_COLUMNS 256 /* rows side by side */

namespace OL_NAMESPACE {

template <class T> OL_DEVICE T *ol_at(uint64_t data, const int64_t *stride, int64_t outer, int64_t inner) {
    return reinterpret_cast<T *>(data) + outer * stride[0] + inner * stride[2];
}

/* Calls row(outer, inner) for each row of this share; or on the host, where neighbouring rows are neighbours in memory,
 * columns(outer, inner, m) for m of them. */
template <class Row, class Columns>
OL_DEVICE void ol_rows(const ol_rows_args *a, ol_dim3 block, ol_dim3 grid, Row row, [[maybe_unused]] Columns columns) {
    const ol_share share = ol_share_of(a->outer * a->inner, block, grid);
#ifndef __CUDACC__
    if (a->inner == 1) {
        for (int64_t i = share.begin; i < share.end; ++i) row(i, int64_t{0});
        return;
    }
    if (a->in_stride[2] == 1 && a->out_stride[2] == 1 && a->in_stride[1] != 1) {
        for (int64_t i = share.begin; i < share.end;) {
            const int64_t outer = i / a->inner, inner = i - outer * a->inner;
            int64_t m = a->inner - inner;
            if (m > share.end - i) m = share.end - i;
            if (m > OL_ROW_COLUMNS) m = OL_ROW_COLUMNS;
            columns(outer, inner, m);
            i += m;
        }
        return;
    }
#endif
    for (int64_t i = share.begin; i < share.end; i += share.step) row(i / a->inner, i % a->inner);
}

/* A sum of exp(x - center). */
template <class C> struct ol_op_row_exps : ol_op_each<C, ol_op_row_exps<C>> {
    C center;
    OL_DEVICE C map(C x) const { return ol_exp(x - center); }
};

template <class T, bool logarithm>
OL_DEVICE int32_t ol_softmax(const ol_rows_args *a, ol_dim3 block, ol_dim3 grid, ol_env *) {
    typedef ol_compute<T> C;
    typedef typename ol_carry_of<C>::type carry;
    const int64_t n = a->n, in = a->in_stride[1], to = a->out_stride[1];
    ol_rows(
        a, block, grid,
        [&](int64_t outer, int64_t inner) {
            const T *x = ol_at<const T>(a->in, a->in_stride, outer, inner);
            T *y = ol_at<T>(a->out, a->out_stride, outer, inner);
#ifndef __CUDACC__
            C run[OL_RUN];
            const C *from = nullptr;
            C *work = run; /* a short row is worked on in place, as C */
            if constexpr (ol_same<T, C>)
                if (in == 1 && to == 1) {
                    from = x;
                    work = y;
                }
            if (from == nullptr && n <= OL_RUN) {
                ol_fetch<T, C>(run, x, in, n);
                from = run;
            }
            if (from != nullptr) {
                const C most = ol_op_max<C>{}.template run<C>(from, 1, n);
                if constexpr (logarithm) {
                    ol_op_row_exps<C> exps;
                    exps.center = most;
                    const C shift = static_cast<C>(ol_log(static_cast<C>(exps.template run<C>(from, 1, n))));
                    OL_INDEPENDENT
                    for (int64_t i = 0; i < n; ++i) work[i] = from[i] - most - shift;
                } else {
                    OL_INDEPENDENT
                    for (int64_t i = 0; i < n; ++i) work[i] = ol_exp(from[i] - most);
                    const C factor = static_cast<C>(1 / ol_op_sum<C>{}.template run<C>(work, 1, n));
                    OL_INDEPENDENT
                    for (int64_t i = 0; i < n; ++i) work[i] *= factor;
                }
                if (work == run) {
                    if (to == 1)
                        for (int64_t i = 0; i < n; ++i) ol_store(y + i, run[i]);
                    else
                        for (int64_t i = 0; i < n; ++i) ol_store(y + i * to, run[i]);
                }
                return;
            }
#endif
            ol_op_row_exps<C> exps;
            exps.center = ol_op_max<C>{}.template run<T>(x, in, n);
            const carry total = exps.template run<T>(x, in, n);
            if constexpr (logarithm) {
                const C shift = static_cast<C>(ol_log(static_cast<C>(total)));
                for (int64_t i = 0; i < n; ++i) ol_store(y + i * to, static_cast<C>(ol_load(x + i * in)) - exps.center - shift);
            } else {
                const C factor = static_cast<C>(1 / total);
                for (int64_t i = 0; i < n; ++i) ol_store(y + i * to, exps.map(ol_load(x + i * in)) * factor);
            }
        },
        [&](int64_t outer, int64_t inner, int64_t m) {
            const T *x = ol_at<const T>(a->in, a->in_stride, outer, inner);
            T *y = ol_at<T>(a->out, a->out_stride, outer, inner);
            C most[OL_ROW_COLUMNS], total[OL_ROW_COLUMNS];
            for (int64_t k = 0; k < m; ++k) most[k] = ol_load(x + k), total[k] = 0;
            for (int64_t i = 1; i < n; ++i)
                for (int64_t k = 0; k < m; ++k) {
                    const C v = ol_load(x + i * in + k), b = most[k];
                    most[k] = ((v > b) | (v != v)) & (b == b) ? v : b;
                }
            for (int64_t i = 0; i < n; ++i)
                for (int64_t k = 0; k < m; ++k) total[k] += ol_exp(ol_load(x + i * in + k) - most[k]);
            for (int64_t k = 0; k < m; ++k) total[k] = logarithm ? ol_log(total[k]) : 1 / total[k];
            for (int64_t i = 0; i < n; ++i)
                for (int64_t k = 0; k < m; ++k) {
                    const C v = ol_load(x + i * in + k) - most[k];
                    ol_store(y + i * to + k, logarithm ? v - total[k] : ol_exp(v) * total[k]);
                }
        });
    return OL_OK;
}

/* in = gradient g, other = result y:  (g - sum(g y)) y  of softmax,  g - exp(y) sum(g)  of log_softmax. */
template <class T, bool logarithm>
OL_DEVICE int32_t ol_softmax_backward(const ol_rows_args *a, ol_dim3 block, ol_dim3 grid, ol_env *) {
    typedef ol_compute<T> C;
    typedef typename ol_carry_of<C>::type carry;
    const int64_t n = a->n, gs = a->in_stride[1], ys = a->other_stride[1], os = a->out_stride[1];
    const ol_share share = ol_share_of(a->outer * a->inner, block, grid);
    for (int64_t r = share.begin; r < share.end; r += share.step) {
        const int64_t outer = r / a->inner, inner = r % a->inner;
        const T *g = ol_at<const T>(a->in, a->in_stride, outer, inner), *y = ol_at<const T>(a->other, a->other_stride, outer, inner);
        T *to = ol_at<T>(a->out, a->out_stride, outer, inner);
        carry total = 0;
        if constexpr (logarithm) total = ol_op_sum<C>{}.template run<T>(g, gs, n);
        else {
#ifdef __CUDACC__
            for (int64_t i = 0; i < n; ++i) total += ol_load(g + i * gs) * ol_load(y + i * ys);
#else
            C run[OL_RUN];
            for (int64_t i = 0; i < n; i += OL_RUN) {
                const int64_t m = n - i < OL_RUN ? n - i : OL_RUN;
                for (int64_t k = 0; k < m; ++k) run[k] = ol_load(g + (i + k) * gs) * ol_load(y + (i + k) * ys);
                total += ol_lanes<C>(run, m, ol_op_sum<C>{});
            }
#endif
        }
        const C sum = static_cast<C>(total);
        const auto each = [&](int64_t gi, int64_t yi, int64_t oi) {
            const C gv = ol_load(g + gi), yv = ol_load(y + yi);
            ol_store(to + oi, logarithm ? gv - ol_exp(yv) * sum : (gv - sum) * yv);
        };
        if (gs == 1 && ys == 1 && os == 1) {
            OL_INDEPENDENT
            for (int64_t i = 0; i < n; ++i) each(i, i, i);
        } else
            for (int64_t i = 0; i < n; ++i) each(i * gs, i * ys, i * os);
    }
    return OL_OK;
}

/* y = scale(x) weight + bias over a row, weight and bias [n] or absent */
template <class T, class Scale>
OL_DEVICE void ol_affine(const T *x, T *y, int64_t n, const T *weight, const T *bias, Scale scale) {
    if (weight && bias) {
        OL_INDEPENDENT
        for (int64_t i = 0; i < n; ++i) ol_store(y + i, ol_fma(scale(ol_load(x + i)), ol_load(weight + i), ol_load(bias + i)));
    } else if (weight) {
        OL_INDEPENDENT
        for (int64_t i = 0; i < n; ++i) ol_store(y + i, scale(ol_load(x + i)) * ol_load(weight + i));
    } else if (bias) {
        OL_INDEPENDENT
        for (int64_t i = 0; i < n; ++i) ol_store(y + i, scale(ol_load(x + i)) + ol_load(bias + i));
    } else {
        OL_INDEPENDENT
        for (int64_t i = 0; i < n; ++i) ol_store(y + i, scale(ol_load(x + i)));
    }
}

/* Mean of a run and 1 / sqrt(its variance + eps), in two passes. */
template <class T, class C> struct ol_moments {
    C mean, rstd;
    OL_DEVICE ol_moments(const T *x, int64_t n, double eps) {
        typedef typename ol_carry_of<C>::type carry;
        const carry scale = 1 / static_cast<carry>(n);
        mean = static_cast<C>(ol_op_sum<C>{}.template run<T>(x, 1, n) * scale);
        ol_op_deviations<C> op;
        op.center = mean;
        const C variance = static_cast<C>(op.template run<T>(x, 1, n) * scale);
        rstd = 1 / ol_sqrt(variance + static_cast<C>(eps));
    }
};

template <class T> OL_DEVICE int32_t ol_layer_norm(const ol_norm_args *a, ol_dim3 block, ol_dim3 grid, ol_env *) {
    typedef ol_compute<T> C;
    const auto *weight = reinterpret_cast<const T *>(a->weight), *bias = reinterpret_cast<const T *>(a->bias);
    auto *means = reinterpret_cast<T *>(a->mean), *rstds = reinterpret_cast<T *>(a->rstd);
    const ol_share share = ol_share_of(a->rows, block, grid);
    for (int64_t r = share.begin; r < share.end; r += share.step) {
        const T *x = reinterpret_cast<const T *>(a->in) + r * a->in_row;
        const ol_moments<T, C> of(x, a->n, a->eps);
        if (means) ol_store(means + r, of.mean);
        if (rstds) ol_store(rstds + r, of.rstd);
        ol_affine(x, reinterpret_cast<T *>(a->out) + r * a->out_row, a->n, weight, bias,
                  [&](C v) { return (v - of.mean) * of.rstd; });
    }
    return OL_OK;
}

/* dx = rstd (dy w - mean(dy w) - xhat mean(dy w xhat)), with xhat = (x - mean) rstd */
template <class T> OL_DEVICE int32_t ol_layer_norm_backward(const ol_norm_args *a, ol_dim3 block, ol_dim3 grid, ol_env *) {
    typedef ol_compute<T> C;
    typedef typename ol_carry_of<C>::type carry;
    const auto *weight = reinterpret_cast<const T *>(a->weight);
    const auto *means = reinterpret_cast<const T *>(a->mean), *rstds = reinterpret_cast<const T *>(a->rstd);
    const int64_t n = a->n;
    const ol_share share = ol_share_of(a->rows, block, grid);
    for (int64_t r = share.begin; r < share.end; r += share.step) {
        const T *x = reinterpret_cast<const T *>(a->in) + r * a->in_row;
        const T *dy = reinterpret_cast<const T *>(a->grad) + r * a->grad_row;
        T *dx = reinterpret_cast<T *>(a->out) + r * a->out_row;
        const C mean = ol_load(means + r), rstd = ol_load(rstds + r);
        carry sum = 0, dot = 0;
#ifdef __CUDACC__
        for (int64_t i = 0; i < n; ++i) {
            const C d = ol_load(dy + i) * (weight ? ol_load(weight + i) : C{1});
            sum += d;
            dot += d * (ol_load(x + i) - mean);
        }
#else
        C run[OL_RUN], product[OL_RUN];
        for (int64_t i = 0; i < n; i += OL_RUN) {
            const int64_t m = n - i < OL_RUN ? n - i : OL_RUN;
            if (weight)
                for (int64_t k = 0; k < m; ++k) run[k] = ol_load(dy + i + k) * ol_load(weight + i + k);
            else
                for (int64_t k = 0; k < m; ++k) run[k] = ol_load(dy + i + k);
            for (int64_t k = 0; k < m; ++k) product[k] = run[k] * (ol_load(x + i + k) - mean);
            sum += ol_lanes<C>(run, m, ol_op_sum<C>{});
            dot += ol_lanes<C>(product, m, ol_op_sum<C>{});
        }
#endif
        const C a1 = static_cast<C>(sum / static_cast<carry>(n));
        const C a2 = static_cast<C>(dot / static_cast<carry>(n)) * rstd * rstd;
        OL_INDEPENDENT
        for (int64_t i = 0; i < n; ++i) {
            const C d = ol_load(dy + i) * (weight ? ol_load(weight + i) : C{1});
            ol_store(dx + i, rstd * (d - a1 - (ol_load(x + i) - mean) * a2));
        }
    }
    return OL_OK;
}
/* Gradients of weight and bias: sums over the rows, columns shared out; a column's order does not depend on the share. */
template <class T>
OL_DEVICE int32_t ol_layer_norm_backward_weight(const ol_norm_args *a, ol_dim3 block, ol_dim3 grid, ol_env *) {
    typedef ol_compute<T> C;
    typedef typename ol_carry_of<C>::type carry;
    const auto *means = reinterpret_cast<const T *>(a->mean), *rstds = reinterpret_cast<const T *>(a->rstd);
    const auto *in = reinterpret_cast<const T *>(a->in), *grad = reinterpret_cast<const T *>(a->grad);
    auto *gw = reinterpret_cast<T *>(a->grad_weight), *gb = reinterpret_cast<T *>(a->grad_bias);
    const ol_share share = ol_share_of(a->n, block, grid);
#ifdef __CUDACC__
    constexpr int64_t most = 1;
#else
    constexpr int64_t most = OL_ROW_COLUMNS;
#endif
    carry w[most], b[most];
    for (int64_t i = share.begin; i < share.end; i += share.step * most) {
        const int64_t m = share.end - i < most ? share.end - i : most;
        for (int64_t k = 0; k < m; ++k) w[k] = b[k] = 0;
        for (int64_t r = 0; r < a->rows; ++r) {
            const T *x = in + r * a->in_row + i, *dy = grad + r * a->grad_row + i;
            const C mean = ol_load(means + r), rstd = ol_load(rstds + r);
            for (int64_t k = 0; k < m; ++k) {
                const C d = ol_load(dy + k);
                w[k] += d * ((ol_load(x + k) - mean) * rstd);
                b[k] += d;
            }
        }
        if (gw)
            for (int64_t k = 0; k < m; ++k) ol_store(gw + i + k, static_cast<C>(w[k]));
        if (gb)
            for (int64_t k = 0; k < m; ++k) ol_store(gb + i + k, static_cast<C>(b[k]));
    }
    return OL_OK;
}

template <class T> OL_DEVICE int32_t ol_rms_norm(const ol_norm_args *a, ol_dim3 block, ol_dim3 grid, ol_env *) {
    typedef ol_compute<T> C;
    const auto *weight = reinterpret_cast<const T *>(a->weight);
    auto *rstds = reinterpret_cast<C *>(a->rstd);
    const ol_share share = ol_share_of(a->rows, block, grid);
    for (int64_t r = share.begin; r < share.end; r += share.step) {
        const T *x = reinterpret_cast<const T *>(a->in) + r * a->in_row;
        const auto squares = ol_op_squares<C>{}.template run<T>(x, 1, a->n);
        const C rstd = 1 / ol_sqrt(static_cast<C>(squares / static_cast<decltype(squares)>(a->n)) + static_cast<C>(a->eps));
        if (rstds) rstds[r] = rstd;
        ol_affine(x, reinterpret_cast<T *>(a->out) + r * a->out_row, a->n, weight, static_cast<const T *>(nullptr),
                  [&](C v) { return v * rstd; });
    }
    return OL_OK;
}

/* [batch, groups] rows of channels / groups times `places` elements */
template <class T> OL_DEVICE int32_t ol_group_norm(const ol_channel_args *a, ol_dim3 block, ol_dim3 grid, ol_env *) {
    typedef ol_compute<T> C;
    const auto *weight = reinterpret_cast<const T *>(a->weight), *bias = reinterpret_cast<const T *>(a->bias);
    auto *means = reinterpret_cast<T *>(a->mean), *rstds = reinterpret_cast<T *>(a->rstd);
    const int64_t channels = a->channels / a->groups, n = channels * a->places;
    const ol_share share = ol_share_of(a->batch * a->groups, block, grid);
    for (int64_t r = share.begin; r < share.end; r += share.step) {
        const T *x = reinterpret_cast<const T *>(a->in) + r * n;
        T *y = reinterpret_cast<T *>(a->out) + r * n;
        const ol_moments<T, C> of(x, n, a->eps);
        if (means) ol_store(means + r, of.mean);
        if (rstds) ol_store(rstds + r, of.rstd);
        const int64_t first = r % a->groups * channels;
        for (int64_t c = 0; c < channels; ++c, x += a->places, y += a->places) {
            const C scale = weight ? of.rstd * ol_load(weight + first + c) : of.rstd;
            const C shift = bias ? ol_load(bias + first + c) : C{0};
            OL_INDEPENDENT
            for (int64_t i = 0; i < a->places; ++i) ol_store(y + i, ol_fma(ol_load(x + i) - of.mean, scale, shift));
        }
    }
    return OL_OK;
}

/* batch_norm with given mean and variance: rows are [batch, channels] */
template <class T> OL_DEVICE int32_t ol_batch_norm(const ol_channel_args *a, ol_dim3 block, ol_dim3 grid, ol_env *) {
    typedef ol_compute<T> C;
    const auto *weight = reinterpret_cast<const T *>(a->weight), *bias = reinterpret_cast<const T *>(a->bias);
    const auto *means = reinterpret_cast<const T *>(a->mean), *variances = reinterpret_cast<const T *>(a->rstd);
    const C eps = static_cast<C>(a->eps);
    const auto *in = reinterpret_cast<const T *>(a->in);
    auto *out = reinterpret_cast<T *>(a->out);
    if (a->places == 1) { /* a row of channels at a time */
        const ol_share share = ol_share_of(a->batch, block, grid);
        for (int64_t r = share.begin; r < share.end; r += share.step) {
            const T *x = in + r * a->channels;
            T *y = out + r * a->channels;
            OL_INDEPENDENT
            for (int64_t c = 0; c < a->channels; ++c) {
                const C scale = (weight ? ol_load(weight + c) : C{1}) / ol_sqrt(ol_load(variances + c) + eps);
                ol_store(y + c, ol_fma(ol_load(x + c) - ol_load(means + c), scale, bias ? ol_load(bias + c) : C{0}));
            }
        }
        return OL_OK;
    }
    const ol_share share = ol_share_of(a->batch * a->channels, block, grid);
    for (int64_t r = share.begin; r < share.end; r += share.step) {
        const int64_t c = r % a->channels;
        const T *x = in + r * a->places;
        T *y = out + r * a->places;
        const C scale = (weight ? ol_load(weight + c) : C{1}) / ol_sqrt(ol_load(variances + c) + eps);
        const C mean = ol_load(means + c), shift = bias ? ol_load(bias + c) : C{0};
        OL_INDEPENDENT
        for (int64_t i = 0; i < a->places; ++i) ol_store(y + i, ol_fma(ol_load(x + i) - mean, scale, shift));
    }
    return OL_OK;
}

/* Scans: out[i] = total of in[0 ... i], kept in a wider type. */
template <class C> struct ol_scan_sum {
    typedef typename ol_carry_of<C>::type carry;
    static constexpr carry start = 0;
    OL_DEVICE carry join(carry a, carry b) const { return a + b; }
};
template <class C> struct ol_scan_prod {
    typedef typename ol_carry_of<C>::type carry;
    static constexpr carry start = 1;
    OL_DEVICE carry join(carry a, carry b) const { return a * b; }
};
template <class C> struct ol_scan_logsumexp {
    typedef double carry;
    static constexpr double start = -static_cast<double>(__builtin_inff());
    OL_DEVICE double join(double a, double b) const {
        if (a != a || b != b) return a + b;
        const double low = a < b ? a : b, high = a < b ? b : a;
        return high - high != 0 ? high : high + log1p(exp(low - high));
    }
};
template <class T, template <class> class Operation>
OL_DEVICE int32_t ol_scan(const ol_rows_args *a, ol_dim3 block, ol_dim3 grid, ol_env *) {
    typedef ol_compute<T> C;
    typedef Operation<C> Op;
    typedef typename Op::carry carry;
    const Op op;
    const int64_t n = a->n, in = a->in_stride[1], to = a->out_stride[1];
    ol_rows(
        a, block, grid,
        [&](int64_t outer, int64_t inner) {
            const T *x = ol_at<const T>(a->in, a->in_stride, outer, inner);
            T *y = ol_at<T>(a->out, a->out_stride, outer, inner);
            carry total = Op::start;
            for (int64_t i = 0; i < n; ++i) {
                total = op.join(total, static_cast<carry>(ol_load(x + i * in)));
                ol_store(y + i * to, static_cast<C>(total));
            }
        },
        [&](int64_t outer, int64_t inner, int64_t m) {
            const T *x = ol_at<const T>(a->in, a->in_stride, outer, inner);
            T *y = ol_at<T>(a->out, a->out_stride, outer, inner);
            carry total[OL_ROW_COLUMNS];
            for (int64_t k = 0; k < m; ++k) total[k] = Op::start;
            for (int64_t i = 0; i < n; ++i)
                for (int64_t k = 0; k < m; ++k) {
                    total[k] = op.join(total[k], static_cast<carry>(ol_load(x + i * in + k)));
                    ol_store(y + i * to + k, static_cast<C>(total[k]));
                }
        });
    return OL_OK;
}

/* cummax, cummin: the extremum so far and where it last stood; a NaN stays. */
template <class T, template <class> class Operation>
OL_DEVICE int32_t ol_scan_extremum(const ol_rows_args *a, ol_dim3 block, ol_dim3 grid, ol_env *) {
    typedef ol_compute<T> C;
    const Operation<C> op;
    const ol_share share = ol_share_of(a->outer * a->inner, block, grid);
    for (int64_t r = share.begin; r < share.end; r += share.step) {
        const int64_t outer = r / a->inner, inner = r % a->inner;
        const T *x = ol_at<const T>(a->in, a->in_stride, outer, inner);
        T *y = ol_at<T>(a->out, a->out_stride, outer, inner);
        int64_t *where = ol_at<int64_t>(a->second, a->second_stride, outer, inner), index = 0;
        C best = a->n > 0 ? ol_load(x) : C{};
        for (int64_t i = 0; i < a->n; ++i) {
            const C v = ol_load(x + i * a->in_stride[1]);
            if (v != v || (best == best && !op.before(v, best))) best = v, index = i;
            ol_store(y + i * a->out_stride[1], best);
            where[i * a->second_stride[1]] = index;
        }
    }
    return OL_OK;
}

}  // namespace OL_NAMESPACE
#endif
