/* Reductions of a run of numbers by 32 (float) or 16 (double) interleaved partial results.
 *
 * Element i goes to lane i % lanes, and the lanes are folded by halves, on every instruction set alike: the result does
 * not depend on the vector width, on the address, or on how work is shared.  An operation is a struct with
 *   identity()   what a lane starts with
 *   fill()       an element that changes nothing, for the lanes past the end
 *   map(x)       what is taken of an element (a number or a vector of them)
 *   join(a, b)   associative and commutative up to rounding
 */
#ifndef OUTLAST_OPS_LANES_H
#define OUTLAST_OPS_LANES_H
#include "outlast/ops/types.h"

#ifndef __CUDACC__
#include <cmath>
#include <utility>
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__)
#define OL_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define OL_VECTOR_BYTES 32
#else
#define OL_VECTOR_BYTES 16
#endif
#endif

#define OL_INLINE __attribute__((always_inline)) /* on a lambda */

namespace OL_NAMESPACE {

template <class T> inline constexpr bool ol_is_float = false;
template <> inline constexpr bool ol_is_float<float> = true;
template <> inline constexpr bool ol_is_float<double> = true;
template <class A, class B> inline constexpr bool ol_same = false;
template <class A> inline constexpr bool ol_same<A, A> = true;

/* The order of infinity: what is below everything, for the types that reductions compare. */
template <class T> OL_DEVICE T ol_lowest() {
    if constexpr (ol_is_float<T>) return static_cast<T>(-__builtin_inff());
    else if constexpr (static_cast<T>(-1) > 0) return 0;
    else return static_cast<T>(static_cast<T>(1) << (sizeof(T) * 8 - 1));
}
template <class T> OL_DEVICE T ol_highest() {
    if constexpr (ol_is_float<T>) return static_cast<T>(__builtin_inff());
    else return static_cast<T>(~ol_lowest<T>());
}

#ifndef __CUDACC__
template <class C, int width> struct ol_vector_of {
    typedef C type __attribute__((vector_size(width * sizeof(C))));
};
template <class C, int width> using ol_vector = typename ol_vector_of<C, width>::type;
template <class C> inline constexpr int ol_width = OL_VECTOR_BYTES / sizeof(C);
template <class C> using ol_wide = ol_vector<C, ol_width<C>>;
#define OL_VECTORS (128 / OL_VECTOR_BYTES) /* accumulators, for all instruction sets 128 bytes in all */

template <class C> OL_DEVICE ol_wide<C> ol_wide_load(const C *p) {
    ol_wide<C> v;
    memcpy(&v, p, sizeof v);
    return v;
}
template <class C> OL_DEVICE ol_wide<C> ol_wide_set(C value) { return ol_wide<C>{} + value; }

/* The first n < width elements at p, `fill` behind them; nothing past them is touched. */
template <class C> OL_DEVICE ol_wide<C> ol_wide_part(const C *p, int n, C fill) {
#if defined(__AVX512F__)
    if constexpr (ol_same<C, float>)
        return (ol_wide<C>)_mm512_mask_loadu_ps(_mm512_set1_ps(fill), static_cast<__mmask16>((1u << n) - 1), p);
    else return (ol_wide<C>)_mm512_mask_loadu_pd(_mm512_set1_pd(fill), static_cast<__mmask8>((1u << n) - 1), p);
#elif defined(__AVX2__)
    if constexpr (ol_same<C, float>) {
        const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        return (ol_wide<C>)_mm256_blendv_ps(_mm256_set1_ps(fill), _mm256_maskload_ps(p, mask), (__m256)mask);
    } else {
        const __m256i mask = _mm256_cmpgt_epi64(_mm256_set1_epi64x(n), _mm256_setr_epi64x(0, 1, 2, 3));
        return (ol_wide<C>)_mm256_blendv_pd(_mm256_set1_pd(fill), _mm256_maskload_pd(p, mask), (__m256d)mask);
    }
#else
    ol_wide<C> v = ol_wide_set(fill);
    for (int k = 0; k < n; ++k) v[k] = p[k];
    return v;
#endif
}

template <class C, int width, int... k>
OL_DEVICE ol_vector<C, width / 2> ol_half_of(ol_vector<C, width> v, int, std::integer_sequence<int, k...>) {
    return __builtin_shufflevector(v, v, k...);
}
template <class C, int width, int... k>
OL_DEVICE ol_vector<C, width / 2> ol_upper_of(ol_vector<C, width> v, std::integer_sequence<int, k...>) {
    return __builtin_shufflevector(v, v, (k + width / 2)...);
}
template <class C, int width, class Op> OL_DEVICE C ol_fold(ol_vector<C, width> v, const Op &op) {
    if constexpr (width == 2) return op.join(static_cast<C>(v[0]), static_cast<C>(v[1]));
    else {
        constexpr auto half = std::make_integer_sequence<int, width / 2>{};
        return ol_fold<C, width / 2>(op.join(ol_half_of<C, width>(v, 0, half), ol_upper_of<C, width>(v, half)), op);
    }
}

/* Whether any lane of a comparison's result is set. */
template <class M> OL_DEVICE bool ol_any(M mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
    bool any = false;
    for (unsigned k = 0; k < sizeof(M) / sizeof(mask[0]); ++k) any |= mask[k] != 0;
    return any;
#endif
}
/* Index of the first element equal to `value`, which is there; a NaN stands for any NaN. */
template <class C> OL_DEVICE int64_t ol_find(const C *x, int64_t n, C value) {
    int64_t k = 0;
    if constexpr (ol_is_float<C>) {
        if (value == value)
            while (k + ol_width<C> <= n && !ol_any(ol_wide_load(x + k) == ol_wide_set(value))) k += ol_width<C>;
        else
            while (k + ol_width<C> <= n && !ol_any(ol_wide_load(x + k) != ol_wide_load(x + k))) k += ol_width<C>;
    }
    while (k < n - 1 && !(x[k] == value || (x[k] != x[k] && value != value))) ++k;
    return k;
}

/* The reduction of n numbers in a row.  An ordered operation (max, min) has a NaN win, which would lengthen the chain of
 * dependent instructions: NaNs are kept beside the lanes and joined at the end. */
template <class C, class Op> OL_DEVICE C ol_lanes(const C *p, int64_t n, const Op &op) {
    constexpr int width = ol_width<C>;
    ol_wide<C> lane[OL_VECTORS], odd = ol_wide_set<C>(op.identity());
#pragma GCC unroll 8
    for (int j = 0; j < OL_VECTORS; ++j) lane[j] = ol_wide_set<C>(op.identity());
    const auto take = [&](ol_wide<C> &to, ol_wide<C> x) OL_INLINE {
        if constexpr (Op::ordered) {
            to = op.pick(to, x);
            odd = x == x ? odd : x;
        } else to = op.join(to, op.map(x));
    };
    int64_t i = 0;
    for (; i + width * OL_VECTORS <= n; i += width * OL_VECTORS) {
#pragma GCC unroll 8
        for (int j = 0; j < OL_VECTORS; ++j) take(lane[j], ol_wide_load(p + i + j * width));
    }
    if (i < n) {
#pragma GCC unroll 8
        for (int j = 0; j < OL_VECTORS; ++j) {
            const int64_t left = n - i - j * width;
            if (left >= width) take(lane[j], ol_wide_load(p + i + j * width));
            else if (left > 0) take(lane[j], ol_wide_part<C>(p + i + j * width, static_cast<int>(left), op.fill()));
        }
    }
#pragma GCC unroll 8
    for (int s = OL_VECTORS / 2; s > 0; s /= 2) {
#pragma GCC unroll 8
        for (int j = 0; j < s; ++j) lane[j] = op.join(lane[j], lane[j + s]);
    }
    if constexpr (Op::ordered) lane[0] = op.join(lane[0], odd);
    return ol_fold<C, width>(lane[0], op);
}
#endif

/* A run of n elements of type T, `stride` apart, in the type C they are computed with, for the inner loops below. */
#define OL_RUN 512
template <class T, class C> OL_DEVICE void ol_fetch(C *to, const T *from, int64_t stride, int64_t n) {
#if defined(__F16C__) && !defined(__CUDACC__)
    if constexpr (ol_same<T, ol_half>)
        if (stride == 1) {
            int64_t i = 0;
#if defined(__AVX512F__)
            for (; i + 16 <= n; i += 16)
                _mm512_storeu_ps(to + i, _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from + i))));
#endif
            for (; i + 8 <= n; i += 8)
                _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from + i))));
            for (; i < n; ++i) to[i] = ol_load(from + i);
            return;
        }
#endif
    if (stride == 1)
        for (int64_t i = 0; i < n; ++i) to[i] = static_cast<C>(ol_load(from + i));
    else
        for (int64_t i = 0; i < n; ++i) to[i] = static_cast<C>(ol_load(from + i * stride));
}

/* Reduces a run of any length and stride.  Results of parts of 4096 (512) numbers are joined in Carry, a wider type. */
template <class Carry, class T, class Op>
OL_DEVICE Carry ol_reduce_run(const T *p, int64_t stride, int64_t n, const Op &op) {
    typedef typename Op::number C;
#ifdef __CUDACC__
    Carry total = op.identity();
    for (int64_t i = 0; i < n; ++i) total = op.join(total, static_cast<Carry>(op.map(static_cast<C>(ol_load(p + i * stride)))));
    return total;
#else
    if constexpr (ol_is_float<C>) {
        if constexpr (ol_same<T, C>)
            if (stride == 1) {
                if (n <= 4096) [[likely]]
                    return static_cast<Carry>(ol_lanes<C>(p, n, op));
                Carry total = op.identity();
                for (int64_t i = 0; i < n; i += 4096)
                    total = op.join(total, static_cast<Carry>(ol_lanes<C>(p + i, n - i < 4096 ? n - i : 4096, op)));
                return total;
            }
        Carry total = op.identity();
        C run[OL_RUN];
        for (int64_t i = 0; i < n; i += OL_RUN) {
            const int64_t m = n - i < OL_RUN ? n - i : OL_RUN;
            ol_fetch<T, C>(run, p + i * stride, stride, m);
            total = op.join(total, static_cast<Carry>(ol_lanes<C>(run, m, op)));
        }
        return total;
    } else { /* exact: any order will do */
        Carry total = op.identity();
        if (stride == 1)
            for (int64_t i = 0; i < n; ++i) total = op.join(total, static_cast<Carry>(op.map(static_cast<C>(ol_load(p + i)))));
        else
            for (int64_t i = 0; i < n; ++i)
                total = op.join(total, static_cast<Carry>(op.map(static_cast<C>(ol_load(p + i * stride)))));
        return total;
    }
#endif
}

template <class C> struct ol_carry_of {
    typedef C type;
};
template <> struct ol_carry_of<float> {
    typedef double type;
};

/* Operations.  `number` is what elements are turned into before map; `carry` what long results are joined in;
 * `at` takes an element of result k, for results made side by side. */
template <class C, class Own, class Carry = typename ol_carry_of<C>::type> struct ol_op {
    typedef C number;
    typedef Carry carry;
    static constexpr bool ordered = false;
    OL_DEVICE const Own &own() const { return *static_cast<const Own *>(this); }
    OL_DEVICE C at(C x, int64_t) const { return own().map(x); }
    template <class T> OL_DEVICE Carry run(const T *p, int64_t stride, int64_t n) const {
        return ol_reduce_run<Carry>(p, stride, n, own());
    }
};
template <class C, class Own> struct ol_op_sums : ol_op<C, Own> {
    OL_DEVICE C identity() const { return 0; }
    OL_DEVICE C fill() const { return 0; }
    template <class X> OL_DEVICE X join(X a, X b) const { return a + b; }
};
template <class C> struct ol_op_sum : ol_op_sums<C, ol_op_sum<C>> {
    template <class X> OL_DEVICE X map(X x) const { return x; }
};
template <class C> struct ol_op_nansum : ol_op_sums<C, ol_op_nansum<C>> {
    template <class X> OL_DEVICE X map(X x) const { return x == x ? x : X{}; }
};
template <class C> struct ol_op_squares : ol_op_sums<C, ol_op_squares<C>> {
    template <class X> OL_DEVICE X map(X x) const { return x * x; }
};
template <class C> struct ol_op_absolutes : ol_op_sums<C, ol_op_absolutes<C>> {
    template <class X> OL_DEVICE X map(X x) const { return x < 0 ? -x : x; }
};
template <class C> struct ol_op_deviation : ol_op_sums<C, ol_op_deviation<C>> {
    C center;
    OL_DEVICE C fill() const { return center; }
    template <class X> OL_DEVICE X map(X x) const { return x - center; }
};
template <class C> struct ol_op_deviations : ol_op_sums<C, ol_op_deviations<C>> {
    C center;
    OL_DEVICE C fill() const { return center; }
    template <class X> OL_DEVICE X map(X x) const { return (x - center) * (x - center); }
};
template <class C> struct ol_op_prod : ol_op<C, ol_op_prod<C>> {
    OL_DEVICE C identity() const { return 1; }
    OL_DEVICE C fill() const { return 1; }
    template <class X> OL_DEVICE X map(X x) const { return x; }
    template <class X> OL_DEVICE X join(X a, X b) const { return a * b; }
};
/* NaN wins over everything. */
template <class C, class Own> struct ol_op_largest : ol_op<C, Own, C> {
    static constexpr bool ordered = true;
    template <class X> OL_DEVICE X pick(X a, X b) const { return b > a ? b : a; } /* without NaN */
    OL_DEVICE C identity() const { return ol_lowest<C>(); }
    OL_DEVICE C fill() const { return ol_lowest<C>(); }
    OL_DEVICE bool before(C a, C b) const { return a < b; } /* b is better */
    template <class X> OL_DEVICE X join(X a, X b) const { return ((b > a) | (b != b)) ? b : a; }
};
template <class C, class Own> struct ol_op_smallest : ol_op<C, Own, C> {
    static constexpr bool ordered = true;
    template <class X> OL_DEVICE X pick(X a, X b) const { return b < a ? b : a; }
    OL_DEVICE C identity() const { return ol_highest<C>(); }
    OL_DEVICE C fill() const { return ol_highest<C>(); }
    OL_DEVICE bool before(C a, C b) const { return a > b; }
    template <class X> OL_DEVICE X join(X a, X b) const { return ((b < a) | (b != b)) ? b : a; }
};
template <class C> struct ol_op_max : ol_op_largest<C, ol_op_max<C>> {
    template <class X> OL_DEVICE X map(X x) const { return x; }
};
template <class C> struct ol_op_min : ol_op_smallest<C, ol_op_min<C>> {
    template <class X> OL_DEVICE X map(X x) const { return x; }
};
/* A sum whose map is for numbers only, since it calls a function: a run is mapped before it is added up. */
template <class C, class Own> struct ol_op_each : ol_op_sums<C, Own> {
    template <class T> OL_DEVICE typename ol_carry_of<C>::type run(const T *p, int64_t stride, int64_t n) const {
        typename ol_carry_of<C>::type total = 0;
#ifdef __CUDACC__
        for (int64_t i = 0; i < n; ++i) total += this->own().map(static_cast<C>(ol_load(p + i * stride)));
#else
        C run[OL_RUN];
        for (int64_t i = 0; i < n; i += OL_RUN) {
            const int64_t m = n - i < OL_RUN ? n - i : OL_RUN;
            ol_fetch<T, C>(run, p + i * stride, stride, m);
            for (int64_t k = 0; k < m; ++k) run[k] = this->own().map(run[k]);
            total += ol_lanes<C>(run, m, ol_op_sum<C>{});
        }
#endif
        return total;
    }
};

}  // namespace OL_NAMESPACE
#endif
