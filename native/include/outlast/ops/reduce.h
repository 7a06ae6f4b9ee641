/* Reductions: sum, mean, product, extrema and where they are, counts, norms, variance, log-sum-exp, nll loss.
 *
 * Results are shared out over parts and threads, one result is never split: it does not depend on the sharing.  On the
 * host a reduced dimension that is contiguous is walked by ol_reduce_run; where a kept dimension is contiguous instead,
 * up to OL_COLUMNS results are made side by side, so that memory is read in its order.
 */
#ifndef OUTLAST_OPS_REDUCE_H
#define OUTLAST_OPS_REDUCE_H
#include "outlast/args_reduce.h"
#include "outlast/ops/lanes.h"
#include "outlast/ops/math.h"

#ifndef __CUDACC__
#include <cmath>
#endif

#define OL_COLUMNS 512 /* results side by side: 2 kB of float, and as much again of their doubles twice */

namespace OL_NAMESPACE {

template <class C> OL_DEVICE C ol_nan() { return static_cast<C>(__builtin_nanf("")); }

/* Place in a nest of dimensions, innermost first, with two offsets. */
struct ol_walk {
    int64_t in, out, at[8];
};
OL_DEVICE void ol_kept_to(ol_walk &w, const ol_reduce_args *a, int64_t i) {
    w.in = w.out = 0;
    for (uint32_t d = 0; d < a->kept_dims; ++d) {
        const int64_t rest = i / a->kept_size[d];
        w.at[d] = i - rest * a->kept_size[d];
        w.in += w.at[d] * a->kept_in[d];
        w.out += w.at[d] * a->kept_out[d];
        i = rest;
    }
}
OL_DEVICE void ol_kept_next(ol_walk &w, const ol_reduce_args *a) {
    for (uint32_t d = 0;; ++d) {
        w.in += a->kept_in[d];
        w.out += a->kept_out[d];
        if (++w.at[d] < a->kept_size[d] || d + 1 == a->kept_dims) return;
        w.in -= a->kept_size[d] * a->kept_in[d];
        w.out -= a->kept_size[d] * a->kept_out[d];
        w.at[d] = 0;
    }
}
/* Offsets of the reduced elements (from dimension `first` on), one after the other. */
struct ol_reduced_walk {
    const ol_reduce_args *a;
    uint32_t first;
    int64_t in, at[8];
    OL_DEVICE ol_reduced_walk(const ol_reduce_args *args, uint32_t from) : a(args), first(from), in(0) {
        for (uint32_t d = from; d < args->reduced_dims; ++d) at[d] = 0;
    }
    OL_DEVICE int64_t next() {
        const int64_t here = in;
        for (uint32_t d = first; d < a->reduced_dims; ++d) {
            in += a->reduced_in[d];
            if (++at[d] < a->reduced_size[d]) break;
            in -= a->reduced_size[d] * a->reduced_in[d];
            at[d] = 0;
        }
        return here;
    }
};

/* Everything that belongs to one result. */
template <class T, class Op> OL_DEVICE typename Op::carry ol_reduce_all(const ol_reduce_args *a, const T *p, const Op &op) {
    typedef typename Op::carry carry;
    if (a->reduced_dims == 1) [[likely]]
        return op.template run<T>(p, a->reduced_in[0], a->length);
    carry total = op.identity();
    ol_reduced_walk w(a, 1);
    const int64_t n = a->reduced_size[0];
    for (int64_t done = 0; done < a->length; done += n)
        total = op.join(total, op.template run<T>(p + w.next(), a->reduced_in[0], n));
    return total;
}

/* Whether `value` takes the place of `best`: NaN is better than all numbers. */
template <class Op, class C> OL_DEVICE bool ol_better(const Op &op, C value, C best) {
    return (op.before(best, value) | (value != value)) & (best == best);
}

#ifndef __CUDACC__
/* part[k] = join(part[k], x[k]), in a form that vectorises: a NaN once there stays. */
template <class C, class T, class Op> OL_DEVICE void ol_columns_ordered(C *part, const T *x, int64_t m, const Op &op) {
    for (int64_t k = 0; k < m; ++k) {
        const C b = static_cast<C>(ol_load(x + k)), a = part[k];
        const bool more = ol_better(op, b, a);
        part[k] = more ? b : a;
    }
}

/* m results side by side, p the first's first element; op.at(x, k) takes element x of result k. */
template <class T, class Op>
OL_DEVICE void ol_reduce_columns(const ol_reduce_args *a, const T *p, int64_t m, const Op &op, typename Op::carry *total) {
    typedef typename Op::number C;
    C part[OL_COLUMNS];
    const bool split = a->length > 512;
    if (split)
        for (int64_t k = 0; k < m; ++k) total[k] = op.identity();
    ol_reduced_walk w(a, 0);
    for (int64_t r = 0; r < a->length;) {
        const int64_t stop = a->length - r < 512 ? a->length : r + 512;
        for (int64_t k = 0; k < m; ++k) part[k] = op.identity();
        for (; r + 4 <= stop; r += 4) {
            const T *x0 = p + w.next(), *x1 = p + w.next(), *x2 = p + w.next(), *x3 = p + w.next();
            if constexpr (Op::ordered && ol_is_float<C>) {
                ol_columns_ordered(part, x0, m, op);
                ol_columns_ordered(part, x1, m, op);
                ol_columns_ordered(part, x2, m, op);
                ol_columns_ordered(part, x3, m, op);
            } else
                for (int64_t k = 0; k < m; ++k) {
                    const C low = op.join(op.at(static_cast<C>(ol_load(x0 + k)), k), op.at(static_cast<C>(ol_load(x1 + k)), k));
                    const C high = op.join(op.at(static_cast<C>(ol_load(x2 + k)), k), op.at(static_cast<C>(ol_load(x3 + k)), k));
                    part[k] = op.join(part[k], op.join(low, high));
                }
        }
        for (; r < stop; ++r) {
            const T *x = p + w.next();
            if constexpr (Op::ordered && ol_is_float<C>) ol_columns_ordered(part, x, m, op);
            else
                for (int64_t k = 0; k < m; ++k) part[k] = op.join(part[k], op.at(static_cast<C>(ol_load(x + k)), k));
        }
        if (split)
            for (int64_t k = 0; k < m; ++k) total[k] = op.join(total[k], static_cast<typename Op::carry>(part[k]));
    }
    if (!split) {
        if (a->length == 0)
            for (int64_t k = 0; k < m; ++k) part[k] = op.identity();
        for (int64_t k = 0; k < m; ++k) total[k] = static_cast<typename Op::carry>(part[k]);
    }
}
#endif

/* Calls rows(p, out) for each result of this share, or on the host, if the walk is by columns, columns(p, out, m)
 * for m results side by side whose outputs are `kept_out[0]` apart. */
template <class T, class Rows, class Columns>
OL_DEVICE void ol_results(const ol_reduce_args *a, ol_dim3 block, ol_dim3 grid, Rows rows, [[maybe_unused]] Columns columns) {
    const T *in = reinterpret_cast<const T *>(a->in);
    const ol_share share = ol_share_of(a->count, block, grid);
#ifdef __CUDACC__
    ol_walk w;
    for (int64_t i = share.begin; i < share.end; i += share.step) {
        ol_kept_to(w, a, i);
        rows(in + w.in, w.out);
    }
#else
    if (share.begin >= share.end) return;
    ol_walk w = {};
    ol_kept_to(w, a, share.begin);
    if (!a->columns) {
        for (int64_t i = share.begin; i < share.end; ++i) {
            rows(in + w.in, w.out);
            ol_kept_next(w, a);
        }
        return;
    }
    for (int64_t i = share.begin; i < share.end;) {
        int64_t m = a->kept_size[0] - w.at[0];
        if (m > share.end - i) m = share.end - i;
        if (m > OL_COLUMNS) m = OL_COLUMNS;
        columns(in + w.in, w.out, m);
        i += m;
        if (i < share.end) ol_kept_to(w, a, i);
    }
#endif
}

template <class R, class V> OL_DEVICE void ol_put(uint64_t out, int64_t i, V value) {
    ol_store(reinterpret_cast<R *>(out) + i, static_cast<ol_compute<R>>(value));
}

/* The frame of most reductions: finish(total) -> what is stored. */
template <class T, class R, class Op, class Finish>
OL_DEVICE void ol_reduce_with(const ol_reduce_args *a, ol_dim3 block, ol_dim3 grid, const Op &op, Finish finish) {
    ol_results<T>(
        a, block, grid,
        [&](const T *p, int64_t out) { ol_put<R>(a->out, out, finish(ol_reduce_all<T>(a, p, op))); },
        [&]([[maybe_unused]] const T *p, [[maybe_unused]] int64_t out, [[maybe_unused]] int64_t m) {
#ifndef __CUDACC__
            typename Op::carry total[OL_COLUMNS];
            ol_reduce_columns<T>(a, p, m, op, total);
            const int64_t step = a->kept_out[0];
            if (step == 1)
                for (int64_t k = 0; k < m; ++k) ol_put<R>(a->out, out + k, finish(total[k]));
            else
                for (int64_t k = 0; k < m; ++k) ol_put<R>(a->out, out + k * step, finish(total[k]));
#endif
        });
}

/* sum, nansum, prod, amax, amin: T -> T; sums may be turned into means. */
template <class T, template <class> class Operation>
OL_DEVICE int32_t ol_reduce(const ol_reduce_args *a, ol_dim3 block, ol_dim3 grid, ol_env *) {
    typedef Operation<ol_compute<T>> Op;
    typedef typename Op::carry carry;
    if constexpr (ol_is_float<carry>)
        if (a->finish == OL_FINISH_MEAN) {
            const carry n = static_cast<carry>(a->length);
            ol_reduce_with<T, T>(a, block, grid, Op{}, [n](carry total) { return total / n; });
            return OL_OK;
        }
    ol_reduce_with<T, T>(a, block, grid, Op{}, [](carry total) { return total; });
    return OL_OK;
}

/* How many are not 0: count_nonzero, any, all.  Half precision comes as its bits without the sign (as i16). */
struct ol_op_count {
    typedef int64_t carry;
    OL_DEVICE int64_t identity() const { return 0; }
    OL_DEVICE int64_t join(int64_t a, int64_t b) const { return a + b; }
    template <class T> OL_DEVICE int64_t run(const T *p, int64_t stride, int64_t n) const {
        int64_t total = 0;
        for (int64_t i = 0; i < n; i += 65536) {
            const int64_t stop = n - i < 65536 ? n : i + 65536;
            uint32_t some = 0;
            if (stride == 1)
                for (int64_t k = i; k < stop; ++k) some += ol_load(p + k) != 0 ? 1u : 0u;
            else
                for (int64_t k = i; k < stop; ++k) some += ol_load(p + k * stride) != 0 ? 1u : 0u;
            total += some;
        }
        return total;
    }
};
template <class T> OL_DEVICE int32_t ol_count(const ol_reduce_args *a, ol_dim3 block, ol_dim3 grid, ol_env *) {
    ol_results<T>(
        a, block, grid,
        [&](const T *p, int64_t out) {
            const int64_t total = ol_reduce_all<T>(a, p, ol_op_count{});
            if (a->finish == OL_FINISH_ANY) ol_put<uint8_t>(a->out, out, total > 0);
            else if (a->finish == OL_FINISH_ALL) ol_put<uint8_t>(a->out, out, total == a->length);
            else ol_put<int64_t>(a->out, out, total);
        },
        [&]([[maybe_unused]] const T *p, [[maybe_unused]] int64_t out, [[maybe_unused]] int64_t m) {
#ifndef __CUDACC__
            uint32_t total[OL_COLUMNS] = {}; /* the planner keeps the length below 2^32 */
            ol_reduced_walk w(a, 0);
            for (int64_t r = 0; r < a->length; ++r) {
                const T *x = p + w.next();
                for (int64_t k = 0; k < m; ++k) total[k] += ol_load(x + k) != 0 ? 1u : 0u;
            }
            for (int64_t k = 0; k < m; ++k) {
                const int64_t place = out + k * a->kept_out[0];
                if (a->finish == OL_FINISH_ANY) ol_put<uint8_t>(a->out, place, total[k] > 0);
                else if (a->finish == OL_FINISH_ALL) ol_put<uint8_t>(a->out, place, total[k] == a->length);
                else ol_put<int64_t>(a->out, place, total[k]);
            }
#endif
        });
    return OL_OK;
}

/* argmax, argmin, max.dim, min.dim: the first of the largest (a NaN counts as larger than all), and its index.  One
 * reduced dimension, shorter than 2^31. */
template <class T, template <class> class Operation>
OL_DEVICE int32_t ol_arg_reduce(const ol_reduce_args *a, ol_dim3 block, ol_dim3 grid, ol_env *) {
    typedef ol_compute<T> C;
    const Operation<C> op;
    const int64_t n = a->length, stride = a->reduced_in[0];
    const auto put = [a](int64_t out, C value, int64_t index) {
        if (a->out) ol_put<T>(a->out, out, value);
        if (a->second) ol_put<int64_t>(a->second, out, index);
    };
    ol_results<T>(
        a, block, grid,
        [&](const T *p, int64_t out) {
            C best = ol_load(p);
            int64_t index = 0;
#ifdef __CUDACC__
            for (int64_t i = 1; i < n; ++i) {
                const C x = ol_load(p + i * stride);
                if (ol_better(op, x, best)) best = x, index = i;
            }
#else
            constexpr int64_t most = ol_same<T, C> ? 4096 : OL_RUN;
            C run[OL_RUN];
            for (int64_t i = 0; i < n; ) {
                const C *x = run;
                int64_t m = n - i < OL_RUN ? n - i : OL_RUN;
                if constexpr (ol_same<T, C>)
                    if (stride == 1) {
                        x = p + i;
                        m = n - i < most ? n - i : most;
                    }
                if (x == run) ol_fetch<T, C>(run, p + i * stride, stride, m);
                const C value = op.template run<C>(x, 1, m);
                if (i == 0 || ol_better(op, value, best)) {
                    const int64_t first = ol_find(x, m, value);
                    best = x[first];
                    index = i + first;
                }
                i += m;
            }
#endif
            put(out, best, index);
        },
        [&]([[maybe_unused]] const T *p, [[maybe_unused]] int64_t out, [[maybe_unused]] int64_t m) {
#ifndef __CUDACC__
            C best[OL_COLUMNS];
            int32_t index[OL_COLUMNS];
            for (int64_t k = 0; k < m; ++k) best[k] = ol_load(p + k), index[k] = 0;
            for (int64_t r = 1; r < n; ++r) {
                const T *row = p + r * stride;
                for (int64_t k = 0; k < m; ++k) {
                    const C x = ol_load(row + k), b = best[k];
                    const bool more = ol_better(op, x, b);
                    best[k] = more ? x : b;
                    index[k] = more ? static_cast<int32_t>(r) : index[k];
                }
            }
            for (int64_t k = 0; k < m; ++k) put(out + k * a->kept_out[0], best[k], index[k]);
#endif
        });
    return OL_OK;
}

/* var, std and their means.  Two passes; the second takes out what the rounded mean left over. */
template <class C> struct ol_column_deviation : ol_op_sums<C, ol_column_deviation<C>> {
    const C *center;
    OL_DEVICE C at(C x, int64_t k) const { return x - center[k]; }
};
template <class C> struct ol_column_deviations : ol_op_sums<C, ol_column_deviations<C>> {
    const C *center;
    OL_DEVICE C at(C x, int64_t k) const { return (x - center[k]) * (x - center[k]); }
};
template <class T> OL_DEVICE int32_t ol_var(const ol_reduce_args *a, ol_dim3 block, ol_dim3 grid, ol_env *) {
    typedef ol_compute<T> C;
    typedef typename ol_carry_of<C>::type carry;
    const carry n = static_cast<carry>(a->length), left = n - static_cast<carry>(a->number);
    const carry divisor = left > 0 ? left : 0;
    const bool root = a->finish == OL_FINISH_ROOT;
    const auto put = [&](int64_t out, carry mean, carry rest, carry squares) {
        const carry around = squares - rest * rest / n, variance = (around < 0 ? 0 : around) / divisor;
        if (a->out) ol_put<T>(a->out, out, root ? sqrt(variance) : variance);
        if (a->second) ol_put<T>(a->second, out, mean + rest / n);
    };
    ol_results<T>(
        a, block, grid,
        [&](const T *p, int64_t out) {
            ol_op_deviation<C> rest;
            ol_op_deviations<C> squares;
            const carry mean = static_cast<C>(ol_reduce_all<T>(a, p, ol_op_sum<C>{}) / n);
            rest.center = squares.center = static_cast<C>(mean);
            put(out, mean, ol_reduce_all<T>(a, p, rest), ol_reduce_all<T>(a, p, squares));
        },
        [&]([[maybe_unused]] const T *p, [[maybe_unused]] int64_t out, [[maybe_unused]] int64_t m) {
#ifndef __CUDACC__
            carry first[OL_COLUMNS], second[OL_COLUMNS];
            C mean[OL_COLUMNS];
            ol_reduce_columns<T>(a, p, m, ol_op_sum<C>{}, first);
            for (int64_t k = 0; k < m; ++k) mean[k] = static_cast<C>(first[k] / n);
            ol_column_deviation<C> rest;
            ol_column_deviations<C> squares;
            rest.center = squares.center = mean;
            ol_reduce_columns<T>(a, p, m, rest, first);
            ol_reduce_columns<T>(a, p, m, squares, second);
            for (int64_t k = 0; k < m; ++k) put(out + k * a->kept_out[0], mean[k], first[k], second[k]);
#endif
        });
    return OL_OK;
}

/* linalg_vector_norm of a finite order, without its last root if `finish` is OL_FINISH_NONE; OL_FINISH_MEAN divides
 * instead (mse_loss). */
template <class C> struct ol_op_powers : ol_op_each<C, ol_op_powers<C>> {
    C power;
    OL_DEVICE C map(C x) const {
        if (power == 0) return x == 0 ? 0 : 1;
        return ol_pow(x < 0 ? -x : x, power);
    }
};
template <class T> OL_DEVICE int32_t ol_norm(const ol_reduce_args *a, ol_dim3 block, ol_dim3 grid, ol_env *) {
    typedef ol_compute<T> C;
    typedef typename ol_carry_of<C>::type carry;
    const double p = a->number;
    const uint32_t finish = a->finish;
    const carry n = static_cast<carry>(a->length);
    if (p == 2)
        ol_reduce_with<T, T>(a, block, grid, ol_op_squares<C>{}, [n, finish](carry total) {
            return finish == OL_FINISH_ROOT ? sqrt(total) : finish == OL_FINISH_MEAN ? total / n : total;
        });
    else if (p == 1) ol_reduce_with<T, T>(a, block, grid, ol_op_absolutes<C>{}, [](carry total) { return total; });
    else {
        ol_op_powers<C> op;
        op.power = static_cast<C>(p);
        ol_reduce_with<T, T>(a, block, grid, op, [p, finish](carry total) {
            return finish == OL_FINISH_ROOT ? pow(static_cast<double>(total), 1.0 / p) : static_cast<double>(total);
        });
    }
    return OL_OK;
}

/* logsumexp: the largest is taken out, so that nothing overflows; an infinite one stays in. */
template <class C> struct ol_op_exps : ol_op_each<C, ol_op_exps<C>> {
    C center;
    OL_DEVICE C map(C x) const { return ol_exp(x - center); }
};
template <class C> struct ol_column_exps : ol_op_sums<C, ol_column_exps<C>> {
    const C *center;
    OL_DEVICE C at(C x, int64_t k) const { return ol_exp(x - center[k]); }
};
template <class T> OL_DEVICE int32_t ol_logsumexp(const ol_reduce_args *a, ol_dim3 block, ol_dim3 grid, ol_env *) {
    typedef ol_compute<T> C;
    typedef typename ol_carry_of<C>::type carry;
    const auto center = [](C most) { return most - most == 0 ? most : most == most ? C{0} : most; };
    ol_results<T>(
        a, block, grid,
        [&](const T *p, int64_t out) {
            ol_op_exps<C> op;
            op.center = center(ol_reduce_all<T>(a, p, ol_op_max<C>{}));
            ol_put<T>(a->out, out, log(ol_reduce_all<T>(a, p, op)) + static_cast<carry>(op.center));
        },
        [&]([[maybe_unused]] const T *p, [[maybe_unused]] int64_t out, [[maybe_unused]] int64_t m) {
#ifndef __CUDACC__
            C most[OL_COLUMNS];
            carry total[OL_COLUMNS];
            ol_reduce_columns<T>(a, p, m, ol_op_max<C>{}, most);
            for (int64_t k = 0; k < m; ++k) most[k] = center(most[k]);
            ol_column_exps<C> op;
            op.center = most;
            ol_reduce_columns<T>(a, p, m, op, total);
            for (int64_t k = 0; k < m; ++k) ol_put<T>(a->out, out + k * a->kept_out[0], log(total[k]) + static_cast<carry>(most[k]));
#endif
        });
    return OL_OK;
}

/* Negative log likelihood of the targets.  One loss each, shared out; their sum or mean in one part. */
template <class T> OL_DEVICE int32_t ol_nll(const ol_nll_args *a, ol_dim3 block, ol_dim3 grid, ol_env *environment) {
    typedef ol_compute<T> C;
    typedef typename ol_carry_of<C>::type carry;
    const auto *in = reinterpret_cast<const T *>(a->in), *weights = reinterpret_cast<const T *>(a->weight);
    const auto *targets = reinterpret_cast<const int64_t *>(a->target);
    const auto *grad = reinterpret_cast<const T *>(a->grad);
    auto *out = reinterpret_cast<T *>(a->out);
    const bool each = a->reduction == 0 || a->backward;
    ol_share share = ol_share_of(a->rows * a->places, block, grid);
    if (!each) {
        if (block.x != 0 || threadIdx.x != 0) return OL_OK;
        share.begin = 0;
        share.end = a->rows * a->places;
    }
    carry sum = 0, total = 0;
    for (int64_t i = share.begin; i < share.end; i += each ? share.step : 1) {
        const int64_t row = i / a->places, place = i % a->places;
        const int64_t target = targets[row * a->target_row + place * a->target_place];
        const bool counts = target != a->ignored;
        if (counts && (target < 0 || target >= a->classes))
            OL_FAIL("target %lld is not below the number of classes, %lld", static_cast<long long>(target),
                    static_cast<long long>(a->classes));
        const C weight = !counts ? C{0} : weights ? ol_load(weights + target * a->weight_stride) : C{1};
        if (a->backward) { /* `out` is all 0 before */
            if (!counts) continue;
            C g = a->reduction == 0 ? ol_load(grad + row * a->grad_row + place * a->grad_place) : ol_load(grad);
            if (a->reduction == 1) g /= ol_load(reinterpret_cast<const T *>(a->total));
            ol_store(out + row * a->out_row + target * a->out_class + place * a->out_place, -weight * g);
            continue;
        }
        const C loss = counts ? -weight * ol_load(in + row * a->in_row + target * a->in_class + place * a->in_place) : C{0};
        if (each) ol_store(out + row * a->out_row + place * a->out_place, loss);
        sum += static_cast<carry>(loss);
        total += static_cast<carry>(weight);
    }
    if (each) return OL_OK;
    ol_store(out, static_cast<C>(a->reduction == 1 ? sum / total : sum));
    ol_store(reinterpret_cast<T *>(a->total), static_cast<C>(total));
    return OL_OK;
}

}  // namespace OL_NAMESPACE
#endif
