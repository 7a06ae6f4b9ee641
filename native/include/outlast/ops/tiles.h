/* Tiles of matrix products that stay in registers, for matmul.h and attention.h.  Host only.
 *
 * A dot tile serves operands that are both contiguous along the summed dimension, such as x W^T with a row-major W: it
 * adds products into 16 lanes (8 of double), product k into lane k % 16, and folds the lanes 8+8, 4+4, 2+2, 1+1.
 * An outer tile serves a second operand that is contiguous along the columns: product k is added to one of two sums,
 * of even and of odd k, and these are added at the end.  In both the order is a matter of k alone: neither the size of
 * the matrix, nor the place in it, nor the width of the vector unit changes a bit (where there is a fused multiply-add).
 */
#ifndef OUTLAST_OPS_TILES_H
#define OUTLAST_OPS_TILES_H
#include "outlast/ops/lanes.h"

#ifndef __CUDACC__
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
#define OL_UNROLL _Pragma("GCC unroll 16")
#define OL_RARE inline __attribute__((noinline)) /* one copy, so that the build stays short */

namespace OL_NAMESPACE {

template <class C> OL_DEVICE ol_wide<C> ol_fill(C value) { return value - ol_wide<C>{}; /* exact for -0 too */ }

/* a * b + c, rounded once where the target can. */
template <class C> OL_DEVICE ol_wide<C> ol_tile_fma(ol_wide<C> a, ol_wide<C> b, ol_wide<C> c) {
#if defined(__AVX512F__)
    if constexpr (ol_same<C, float>) return (ol_wide<C>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
    else return (ol_wide<C>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__AVX2__) && defined(__FMA__)
    if constexpr (ol_same<C, float>) return (ol_wide<C>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
    else return (ol_wide<C>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(__aarch64__)
    if constexpr (ol_same<C, float>) return (ol_wide<C>)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
    else return (ol_wide<C>)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#else
    return a * b + c;
#endif
}

/* A vector of elements, in the type they are computed with.  `ol_tile_part` reads the first n and sets the rest
 * to 0; n is 0 ... width.  `ol_tile_put` writes the first n. */
template <class T> OL_DEVICE ol_wide<ol_compute<T>> ol_tile_load(const T *p) {
    typedef ol_compute<T> C;
    if constexpr (ol_same<T, C>) return ol_wide_load(p);
    else if constexpr (ol_same<T, ol_bfloat>) {
        ol_vector<uint16_t, ol_width<C>> bits;
        memcpy(&bits, p, sizeof bits);
        return (ol_wide<C>)(__builtin_convertvector(bits, ol_vector<uint32_t, ol_width<C>>) << 16);
    } else {
#if defined(__AVX512F__)
        return (ol_wide<C>)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
#elif defined(__AVX2__) && defined(__F16C__)
        return (ol_wide<C>)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
#else
        C x[ol_width<C>];
        for (int i = 0; i < ol_width<C>; ++i) x[i] = ol_load(p + i);
        return ol_wide_load(x);
#endif
    }
}
template <class T> OL_RARE ol_wide<ol_compute<T>> ol_tile_some(const T *p, int n) {
    T some[ol_width<ol_compute<T>>] = {};
    for (int i = 0; i < n; ++i) some[i] = p[i];
    return ol_tile_load(some);
}
template <class T> OL_DEVICE ol_wide<ol_compute<T>> ol_tile_part(const T *p, int n) {
    typedef ol_compute<T> C;
    if constexpr (ol_same<T, C>) return ol_wide_part<C>(p, n, 0);
    else {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
        const __m256i bits = _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), p);
        if constexpr (ol_same<T, ol_half>) return (ol_wide<C>)_mm512_cvtph_ps(bits);
        else return (ol_wide<C>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
#else
        return n == ol_width<C> ? ol_tile_load(p) : ol_tile_some(p, n);
#endif
    }
}
template <class T> OL_DEVICE void ol_tile_store(T *p, ol_wide<ol_compute<T>> v) {
    typedef ol_compute<T> C;
    if constexpr (ol_same<T, C>) memcpy(p, &v, sizeof v);
    else {
#if defined(__AVX512F__)
        if constexpr (ol_same<T, ol_half>)
            return _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__) && defined(__F16C__)
        if constexpr (ol_same<T, ol_half>)
            return _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#endif
        C x[ol_width<C>];
        memcpy(x, &v, sizeof v);
        for (int i = 0; i < ol_width<C>; ++i) ol_store(p + i, x[i]);
    }
}
template <class T> OL_RARE void ol_tile_store_some(T *p, ol_wide<ol_compute<T>> v, int n) {
    T some[ol_width<ol_compute<T>>];
    ol_tile_store(some, v);
    for (int i = 0; i < n; ++i) p[i] = some[i];
}
template <class T> OL_DEVICE void ol_tile_put(T *p, ol_wide<ol_compute<T>> v, int n) {
    if (n == ol_width<ol_compute<T>>) [[likely]] return ol_tile_store(p, v);
#if defined(__AVX512F__)
    if constexpr (ol_same<T, float>) return _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), (__m512)v);
    if constexpr (ol_same<T, double>) return _mm512_mask_storeu_pd(p, static_cast<__mmask8>((1u << n) - 1), (__m512d)v);
#endif
    ol_tile_store_some(p, v, n);
}

/* --- W vectors of W lanes each, folded into one vector of W sums
 *
 * A stage takes vectors that hold segments of w lanes and makes vectors of twice as many segments of w/2 lanes: lower
 * halves of all segments plus upper halves of all segments.  Where segments span 16-byte blocks, those of p come before
 * those of q; within blocks they are put side by side, since that is what one shuffle instruction does. */
template <class C, int w> constexpr int ol_tree_lane(int i, int second) {
    constexpr int width = ol_width<C>, block = 16 / sizeof(C);
    int from_q, lane; /* lower + upper for p, upper + lower for q: the first summands are then a blend, which is cheaper */
    if (w > block) {
        const int segment = i / (w / 2);
        from_q = segment >= width / w;
        lane = segment % (width / w) * w + (second ^ from_q) * (w / 2) + i % (w / 2);
    } else {
        const int segment = i % block / (w / 2);
        from_q = segment >= block / w;
        lane = i / block * block + segment % (block / w) * w + (second ^ from_q) * (w / 2) + i % (w / 2);
    }
    return from_q * width + lane;
}
template <class C, int w> constexpr bool ol_tree_blends() { /* are the first summands in their own lanes? */
    for (int i = 0; i < ol_width<C>; ++i)
        if (ol_tree_lane<C, w>(i, 0) % ol_width<C> != i) return false;
    return true;
}
template <class C, int w> constexpr unsigned ol_tree_mask() { /* lanes that come from q */
    unsigned mask = 0;
    for (int i = 0; i < ol_width<C>; ++i) mask |= static_cast<unsigned>(ol_tree_lane<C, w>(i, 0) >= ol_width<C>) << i;
    return mask;
}
template <class C, int w, int... i>
OL_DEVICE ol_wide<C> ol_tree_stage(ol_wide<C> p, ol_wide<C> q, std::integer_sequence<int, i...>) {
    const ol_wide<C> second = __builtin_shufflevector(p, q, ol_tree_lane<C, w>(i, 1)...);
#if defined(__AVX512F__) /* left to itself, the compiler blends with the one unit that shuffles */
    if constexpr (ol_tree_blends<C, w>()) {
        if constexpr (ol_same<C, float>)
            return (ol_wide<C>)_mm512_mask_blend_ps(ol_tree_mask<C, w>(), (__m512)p, (__m512)q) + second;
        else return (ol_wide<C>)_mm512_mask_blend_pd(ol_tree_mask<C, w>(), (__m512d)p, (__m512d)q) + second;
    }
#endif
    return __builtin_shufflevector(p, q, ol_tree_lane<C, w>(i, 0)...) + second;
}
template <class C, int vectors> OL_DEVICE ol_wide<C> ol_tree(ol_wide<C> *v) {
    if constexpr (vectors == 1) return v[0];
    else {
        OL_UNROLL
        for (int i = 0; i < vectors / 2; ++i)
            v[i] = ol_tree_stage<C, vectors>(v[2 * i], v[2 * i + 1], std::make_integer_sequence<int, ol_width<C>>{});
        return ol_tree<C, vectors / 2>(v);
    }
}
/* Which vector has to hold the summands of result j. */
template <class C> constexpr int ol_tree_place(int j) {
    constexpr int block = 16 / sizeof(C);
    return j % block * (ol_width<C> / block) + j / block;
}

/* --- dot tile: R rows of a times C columns of b, R * C = one vector, result r * C + c in lane r * C + c
 *
 * Rows at a + r * a_row, columns at b + c * b_column, `depth` elements each.  With `clamped`, columns from `columns` on do
 * not exist: the last one stands in for them. */
template <class T, int R, bool clamped>
OL_DEVICE ol_wide<ol_compute<T>> ol_dot_tile(const T *a, int64_t a_row, const T *b, int64_t b_column, int64_t depth,
                                             int columns = 0) {
    typedef ol_compute<T> C;
    constexpr int width = ol_width<C>, lanes = 64 / sizeof(C), vectors = lanes / width, cols = width / R;
    /* as many sums at once as the registers hold */
    constexpr int most = OL_VECTOR_BYTES == 64 ? 16 : (OL_VECTOR_BYTES == 32 ? 4 : 2);
    constexpr int at_once = most / R < 1 ? 1 : (most / R > cols ? cols : most / R);
    int64_t column[cols];
    if constexpr (clamped) {
        OL_UNROLL
        for (int c = 0; c < cols; ++c) column[c] = (c < columns ? c : columns - 1) * b_column;
    }
    ol_wide<C> folded[width];
    OL_UNROLL
    for (int first = 0; first < cols; first += at_once) {
        ol_wide<C> sum[R][at_once][vectors] = {};
        const auto add = [&](int64_t k, auto load) __attribute__((always_inline)) {
            OL_UNROLL
            for (int v = 0; v < vectors; ++v) {
                ol_wide<C> x[R];
                OL_UNROLL
                for (int r = 0; r < R; ++r) x[r] = load(a + r * a_row + k, v);
                OL_UNROLL
                for (int c = 0; c < at_once; ++c) {
                    const ol_wide<C> y = load(b + (clamped ? column[first + c] : (first + c) * b_column) + k, v);
                    OL_UNROLL
                    for (int r = 0; r < R; ++r) sum[r][c][v] = ol_tile_fma<C>(x[r], y, sum[r][c][v]);
                }
            }
        };
        int64_t k = 0;
        for (; k + lanes <= depth; k += lanes) add(k, [](const T *p, int v) __attribute__((always_inline)) { return ol_tile_load(p + v * width); });
        if (k < depth) {
            const int left = static_cast<int>(depth - k);
            add(k, [left](const T *p, int v) __attribute__((always_inline)) {
                const int here = left - v * width;
                return here >= width ? ol_tile_load(p + v * width) : ol_tile_part(p + v * width, here > 0 ? here : 0);
            });
        }
        OL_UNROLL
        for (int r = 0; r < R; ++r) {
            OL_UNROLL
            for (int c = 0; c < at_once; ++c) {
                OL_UNROLL
                for (int half = vectors / 2; half > 0; half /= 2) {
                    OL_UNROLL
                    for (int v = 0; v < half; ++v) sum[r][c][v] += sum[r][c][v + half];
                }
                folded[ol_tree_place<C>(r * cols + first + c)] = sum[r][c][0];
            }
        }
    }
    return ol_tree<C, width>(folded);
}

/* One dot product in the same order, for products that have only one result. */
template <class T> OL_DEVICE ol_compute<T> ol_dot_one(const T *a, const T *b, int64_t depth) {
    typedef ol_compute<T> C;
    constexpr int width = ol_width<C>, lanes = 64 / sizeof(C), vectors = lanes / width;
    ol_wide<C> sum[vectors] = {};
    int64_t k = 0;
    for (; k + lanes <= depth; k += lanes) {
        OL_UNROLL
        for (int v = 0; v < vectors; ++v)
            sum[v] = ol_tile_fma<C>(ol_tile_load(a + k + v * width), ol_tile_load(b + k + v * width), sum[v]);
    }
    OL_UNROLL
    for (int v = 0; v < vectors; ++v) {
        const int64_t here = depth - k - v * width;
        if (here >= width) sum[v] = ol_tile_fma<C>(ol_tile_load(a + k + v * width), ol_tile_load(b + k + v * width), sum[v]);
        else if (here > 0) {
            const int n = static_cast<int>(here);
            sum[v] = ol_tile_fma<C>(ol_tile_part(a + k + v * width, n), ol_tile_part(b + k + v * width, n), sum[v]);
        }
    }
    OL_UNROLL
    for (int half = vectors / 2; half > 0; half /= 2) {
        OL_UNROLL
        for (int v = 0; v < half; ++v) sum[v] += sum[v + half];
    }
    return ol_fold<C, width>(sum[0], ol_op_sum<C>{});
}

/* --- outer tile: R rows of a times V vectors of columns of b
 *
 * a[r, k] at a + r * a_row + k * a_k, the columns of b at b + k * b_k.  `partial` (V = 1 only): just
 * `part` columns. */
template <class A, class T, int R, int V, bool partial>
OL_DEVICE void ol_outer_tile(const A *a, int64_t a_row, int64_t a_k, const T *b, int64_t b_k, int64_t depth, int part,
                             ol_wide<ol_compute<T>> (&out)[R][V]) {
    typedef ol_compute<T> C;
    constexpr int width = ol_width<C>;
    ol_wide<C> sum[2][R][V] = {};
    const auto add = [&](int64_t k, int odd) __attribute__((always_inline)) {
        ol_wide<C> y[V];
        OL_UNROLL
        for (int v = 0; v < V; ++v) y[v] = partial ? ol_tile_part(b + k * b_k, part) : ol_tile_load(b + k * b_k + v * width);
        OL_UNROLL
        for (int r = 0; r < R; ++r) {
            const ol_wide<C> x = ol_fill(static_cast<C>(ol_load(a + r * a_row + k * a_k)));
            OL_UNROLL
            for (int v = 0; v < V; ++v) sum[odd][r][v] = ol_tile_fma<C>(x, y[v], sum[odd][r][v]);
        }
    };
    int64_t k = 0;
    for (; k + 2 <= depth; k += 2) {
        add(k, 0);
        add(k + 1, 1);
    }
    if (k < depth) add(k, 0);
    OL_UNROLL
    for (int r = 0; r < R; ++r) {
        OL_UNROLL
        for (int v = 0; v < V; ++v) out[r][v] = sum[0][r][v] + sum[1][r][v];
    }
}

}  // namespace OL_NAMESPACE
#endif
#endif
