/* The loops of pointwise operators: ol_map applies a function element by element, ol_copy moves elements as they are.
 *
 * Calls whose operands are all dense and of the kernel's own type run one vectorised loop over memory.  All others go
 * through it in blocks: inputs that are strided, broadcast or of another element type are gathered into small buffers,
 * the same loop runs over those, and the result is scattered.  So a function is compiled once per compute type, and its
 * result does not depend on where the operands lie.
 *
 * An output may be exactly the memory of an input (in-place); any other overlap is the planner's to avoid.
 */
#ifndef OUTLAST_OPS_POINTWISE_H
#define OUTLAST_OPS_POINTWISE_H
#include "outlast/args_pointwise.h"
#include "outlast/ops/math.h"
#include "outlast/ops/types.h"

/* Iterations of the loop that follows do not depend on each other.  With -fopenmp-simd (OL_SIMD says so) GCC also turns
 * nested conditions into selects, without which it gives many of these loops up. */
#if defined(__F16C__) && !defined(__CUDACC__)
#include <immintrin.h>
#endif

#if defined(OL_SIMD)
#define OL_INDEPENDENT _Pragma("omp simd")
#elif defined(__clang__)
#define OL_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__) && !defined(__CUDACC__)
#define OL_INDEPENDENT _Pragma("GCC ivdep")
#else
#define OL_INDEPENDENT
#endif

namespace OL_NAMESPACE {

/* 2 kB per buffer of floats: five operands stay in the first-level cache. */
constexpr int64_t ol_map_block = 512;

template <class P> struct ol_pointee_of;
template <class T> struct ol_pointee_of<T *> { typedef T type; };
template <class P> using ol_pointee = typename ol_pointee_of<P>::type;

template <class T> struct ol_number_of;
#define OL_NUMBER(T, number)                                                                                           \
    template <> struct ol_number_of<T> {                                                                               \
        static constexpr uint8_t value = number;                                                                       \
    };
OL_NUMBER(bool, OL_BOOL)
OL_NUMBER(uint8_t, OL_U8)
OL_NUMBER(int8_t, OL_I8)
OL_NUMBER(int16_t, OL_I16)
OL_NUMBER(int32_t, OL_I32)
OL_NUMBER(int64_t, OL_I64)
OL_NUMBER(ol_half, OL_F16)
OL_NUMBER(ol_bfloat, OL_BF16)
OL_NUMBER(float, OL_F32)
OL_NUMBER(double, OL_F64)
#undef OL_NUMBER

/* Calls f with a null pointer to the element type `dtype`. */
template <class F> OL_DEVICE void ol_with_type(uint32_t dtype, F f) {
    switch (dtype) {
    case OL_BOOL: return f(static_cast<bool *>(nullptr));
    case OL_U8: return f(static_cast<uint8_t *>(nullptr));
    case OL_I8: return f(static_cast<int8_t *>(nullptr));
    case OL_I16: return f(static_cast<int16_t *>(nullptr));
    case OL_I32: return f(static_cast<int32_t *>(nullptr));
    case OL_I64: return f(static_cast<int64_t *>(nullptr));
    case OL_F16: return f(static_cast<ol_half *>(nullptr));
    case OL_BF16: return f(static_cast<ol_bfloat *>(nullptr));
    case OL_F32: return f(static_cast<float *>(nullptr));
    default: return f(static_cast<double *>(nullptr));
    }
}
OL_DEVICE int64_t ol_bytes_of(uint32_t dtype) {
    return dtype <= OL_I8 ? 1 : dtype == OL_I16 || dtype == OL_F16 || dtype == OL_BF16 ? 2 : dtype == OL_I32 || dtype == OL_F32 ? 4 : 8;
}

/* Conversion of a computed value to an element type, as PyTorch converts on x86: through int64 to uint8, through int32
 * to the shorter signed types, so that what is out of range comes out the same. */
template <class T, class C> struct ol_convert_to {
    static OL_DEVICE ol_compute<T> from(C value) { return static_cast<ol_compute<T>>(value); }
};
template <class C> struct ol_convert_to<bool, C> {
    static OL_DEVICE bool from(C value) { return value != C(0); }
};
#define OL_CONVERT_THROUGH(T, C, Between)                                                                              \
    template <> struct ol_convert_to<T, C> {                                                                           \
        static OL_DEVICE T from(C value) { return static_cast<T>(ol_truncated<Between>(value)); }                      \
    };
OL_CONVERT_THROUGH(uint8_t, float, int64_t)
OL_CONVERT_THROUGH(uint8_t, double, int64_t)
OL_CONVERT_THROUGH(int8_t, float, int32_t)
OL_CONVERT_THROUGH(int8_t, double, int32_t)
OL_CONVERT_THROUGH(int16_t, float, int32_t)
OL_CONVERT_THROUGH(int16_t, double, int32_t)
OL_CONVERT_THROUGH(int32_t, float, int32_t)
OL_CONVERT_THROUGH(int32_t, double, int32_t)
OL_CONVERT_THROUGH(int64_t, float, int64_t)
OL_CONVERT_THROUGH(int64_t, double, int64_t)
#undef OL_CONVERT_THROUGH

/* For generated operators: a value as it would come back from memory of type T, and as the compute type C. */
template <class T> struct ol_rounding {
    template <class C> static OL_DEVICE T of(C value) { return ol_convert_to<T, C>::from(value); }
};
template <> struct ol_rounding<ol_half> {
    template <class C> static OL_DEVICE float of(C value) {
        return ol_half_to_float(ol_float_to_half(static_cast<float>(value)));
    }
};
template <> struct ol_rounding<ol_bfloat> {
    template <class C> static OL_DEVICE float of(C value) {
        return ol_bfloat_to_float(ol_float_to_bfloat(static_cast<float>(value)));
    }
};
template <class T, class C> OL_DEVICE ol_compute<T> ol_rounded(C value) { return ol_rounding<T>::of(value); }
template <class C, class V> OL_DEVICE C ol_as(V value) { return ol_convert_to<C, V>::from(value); }

template <class C> OL_DEVICE C ol_load_as(const void *p, uint32_t dtype) {
    C value{};
    ol_with_type(dtype, [&](auto *type) {
        using T = ol_pointee<decltype(type)>;
        value = ol_convert_to<C, ol_compute<T>>::from(ol_load(static_cast<const T *>(p)));
    });
    return value;
}
/* A parameter is one element. */
template <class C> OL_DEVICE C ol_parameter(const ol_map_args *a, int operand) {
    const void *p = reinterpret_cast<const void *>(a->data[operand]);
    if (a->dtype[operand] == ol_number_of<C>::value) return *static_cast<const C *>(p);
    return ol_load_as<C>(p, a->dtype[operand]);
}

template <int... K> struct ol_ints {};
template <int N> struct ol_operands;
template <> struct ol_operands<0> { typedef ol_ints<> list; };
template <> struct ol_operands<1> { typedef ol_ints<1> list; };
template <> struct ol_operands<2> { typedef ol_ints<1, 2> list; };
template <> struct ol_operands<3> { typedef ol_ints<1, 2, 3> list; };
template <> struct ol_operands<4> { typedef ol_ints<1, 2, 3, 4> list; };

#ifdef __CUDACC__

template <class O, class... I, class F, int... K>
OL_DEVICE int32_t ol_map_device(const ol_map_args *a, ol_dim3 block, ol_dim3 grid, F f, ol_ints<K...>) {
    int64_t total = a->n;
    for (int d = 0; d < a->outer; ++d) total *= a->size[d];
    const ol_share w = ol_share_of(total, block, grid);
    for (int64_t i = w.begin; i < w.end; i += w.step) {
        int64_t at[OL_MAP_OPERANDS], rest = i / a->n;
        for (int k = 0; k < OL_MAP_OPERANDS; ++k) at[k] = (i % a->n) * a->inner[k];
        for (int d = 0; d < a->outer; ++d) {
            for (int k = 0; k < OL_MAP_OPERANDS; ++k) at[k] += (rest % a->size[d]) * a->stride[k * OL_MAP_OUTER + d];
            rest /= a->size[d];
        }
        const O value = f(ol_load_as<I>(
            reinterpret_cast<const char *>(a->data[K]) + at[K] * ol_bytes_of(a->dtype[K]), a->dtype[K])...);
        ol_with_type(a->dtype[0], [&](auto *type) {
            using T = ol_pointee<decltype(type)>;
            ol_store(reinterpret_cast<T *>(a->data[0]) + at[0], ol_convert_to<T, O>::from(value));
        });
    }
    return OL_OK;
}
template <class O, class... I, class F>
OL_DEVICE int32_t ol_map(const ol_map_args *a, ol_dim3 block, ol_dim3 grid, F f) {
    return ol_map_device<O, I...>(a, block, grid, f, typename ol_operands<sizeof...(I)>::list{});
}
template <class T> OL_DEVICE int32_t ol_copy(const ol_map_args *a, ol_dim3 block, ol_dim3 grid) {
    if (a->dtype[0] == OL_F64) return ol_map<double, double>(a, block, grid, [](double x) { return x; });
    if (a->dtype[0] >= OL_F16) return ol_map<float, float>(a, block, grid, [](float x) { return x; });
    return ol_map<int64_t, int64_t>(a, block, grid, [](int64_t x) { return x; });
}

#else

/* Walks the elements of one operand in the order of iteration. */
struct ol_walk {
    const ol_map_args *a;
    char *row;           /* element 0 of the present row */
    int64_t done;        /* elements of the row that are behind us */
    int32_t operand;
    uint32_t dtype;
    int64_t index[OL_MAP_OUTER];
};
inline void ol_walk_start(ol_walk &w, const ol_map_args *a, int operand, int64_t first) {
    w.a = a;
    w.operand = operand;
    w.dtype = a->dtype[operand];
    w.row = reinterpret_cast<char *>(a->data[operand]);
    w.done = 0;
    for (int d = 0; d < a->outer; ++d) w.index[d] = 0;
    if (first == 0) return;
    w.done = first % a->n;
    int64_t rest = first / a->n, at = 0;
    for (int d = 0; d < a->outer; ++d) {
        w.index[d] = rest % a->size[d];
        at += w.index[d] * a->stride[operand * OL_MAP_OUTER + d];
        rest /= a->size[d];
    }
    w.row += at * ol_bytes_of(w.dtype);
}
/* To the start of the next row. */
template <int64_t Bytes> inline void ol_walk_next(ol_walk &w) {
    const int64_t *stride = w.a->stride + w.operand * OL_MAP_OUTER;
    w.done = 0;
    for (int d = 0; d < w.a->outer; ++d) {
        w.row += stride[d] * Bytes;
        if (++w.index[d] < w.a->size[d]) return;
        w.row -= w.a->size[d] * stride[d] * Bytes;
        w.index[d] = 0;
    }
}
/* Calls run(pointer to the first element, stride, count, elements before) for the next `count` elements. */
template <class T, class F> OL_DEVICE void ol_walk_on(ol_walk &w, int64_t count, F run) {
    const int64_t n = w.a->n, stride = w.a->inner[w.operand];
    for (int64_t before = 0; before < count;) {
        const int64_t here = n - w.done < count - before ? n - w.done : count - before;
        run(reinterpret_cast<T *>(w.row) + w.done * stride, stride, here, before);
        before += here;
        w.done += here;
        if (w.done == n) ol_walk_next<sizeof(T)>(w);
    }
}

/* A run of elements, converted.  float16 has instructions of its own, which give the same bits as ops/types.h. */
template <class C, class T> OL_DEVICE void ol_load_run(C *to, const T *from, int64_t n) {
    OL_INDEPENDENT for (int64_t i = 0; i < n; ++i) to[i] = ol_convert_to<C, ol_compute<T>>::from(ol_load(from + i));
}
template <class T, class C> OL_DEVICE void ol_store_run(T *to, const C *from, int64_t n) {
    OL_INDEPENDENT for (int64_t i = 0; i < n; ++i) ol_store(to + i, ol_convert_to<T, C>::from(from[i]));
}
#if defined(__F16C__)
template <> OL_DEVICE void ol_load_run<float, ol_half>(float *to, const ol_half *from, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from + i))));
    for (; i < n; ++i) to[i] = ol_load(from + i);
}
template <> OL_DEVICE void ol_store_run<ol_half, float>(ol_half *to, const float *from, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < n; ++i) ol_store(to + i, from[i]);
}
#endif

template <class C> __attribute__((noinline)) void ol_gather(ol_walk &w, C *to, int64_t count) {
    ol_with_type(w.dtype, [&](auto *type) {
        using T = ol_pointee<decltype(type)>;
        ol_walk_on<T>(w, count, [&](const T *from, int64_t stride, int64_t n, int64_t before) {
            C *at = to + before;
            if (stride == 1) {
                ol_load_run<C, T>(at, from, n);
            } else if (stride == 0) {
                const C value = ol_convert_to<C, ol_compute<T>>::from(ol_load(from));
                OL_INDEPENDENT for (int64_t i = 0; i < n; ++i) at[i] = value;
            } else {
                for (int64_t i = 0; i < n; ++i)
                    at[i] = ol_convert_to<C, ol_compute<T>>::from(ol_load(from + i * stride));
            }
        });
    });
}
template <class C> __attribute__((noinline)) void ol_scatter(ol_walk &w, const C *from, int64_t count) {
    ol_with_type(w.dtype, [&](auto *type) {
        using T = ol_pointee<decltype(type)>;
        ol_walk_on<T>(w, count, [&](T *to, int64_t stride, int64_t n, int64_t before) {
            const C *at = from + before;
            if (stride == 1) {
                ol_store_run<T, C>(to, at, n);
            } else {
                for (int64_t i = 0; i < n; ++i) ol_store(to + i * stride, ol_convert_to<T, C>::from(at[i]));
            }
        });
    });
}

template <class O, class X, class Y, class F>
OL_DEVICE int32_t ol_map_last_one(const ol_map_args *a, ol_dim3 block, ol_dim3 grid, F f) {
    int64_t begin = 0, n = a->n;
    if (grid.x != 1) {
        const ol_share w = ol_share_of(n, block, grid);
        begin = w.begin;
        n = w.end - w.begin;
    }
    O *out = reinterpret_cast<O *>(a->data[0]) + begin;
    const X *x = reinterpret_cast<const X *>(a->data[1]) + begin;
    const Y y = ol_parameter<Y>(a, 2);
    OL_INDEPENDENT for (int64_t i = 0; i < n; ++i) out[i] = f(ol_load(x + i), y);
    return OL_OK;
}

/* The blockwise path: where the next block's operands lie.  Shared by all functions; buffers hold the compute types. */
struct ol_blocks {
    const void *in[OL_MAP_OPERANDS];
    void *out;
    int64_t n;          /* elements of this block */
    const ol_map_args *a;
    const uint8_t *types; /* the kernel's own element type of each operand */
    int64_t done, count;
    int32_t operands;
    bool whole; /* all operands are plain: one block does */
    bool same[OL_MAP_OPERANDS];  /* one element throughout: its buffer is filled once */
    bool plain[OL_MAP_OPERANDS]; /* read or written in place */
    ol_walk walk[OL_MAP_OPERANDS];
    alignas(64) char buffer[OL_MAP_OPERANDS][ol_map_block * 8];
};
/* Whether the operand's elements follow each other in the order of iteration. */
inline bool ol_is_plain(const ol_map_args *a, int k, uint8_t type) {
    if (a->dtype[k] != type || (a->n != 1 && a->inner[k] != 1)) return false;
    int64_t expected = a->n;
    for (int d = 0; d < a->outer; ++d) {
        if (a->stride[k * OL_MAP_OUTER + d] != expected) return false;
        expected *= a->size[d];
    }
    return true;
}
/* Calls f with a null pointer to one of the compute types. */
template <class F> OL_DEVICE void ol_with_compute(uint8_t type, F f) {
    switch (type) {
    case OL_BOOL: return f(static_cast<bool *>(nullptr));
    case OL_I64: return f(static_cast<int64_t *>(nullptr));
    case OL_F32: return f(static_cast<float *>(nullptr));
    default: return f(static_cast<double *>(nullptr));
    }
}
/* Stores what was computed and prepares the next block (the first one, as long as `out` is null); false after the last. */
__attribute__((noinline)) inline bool ol_blocks_next(ol_blocks &s) {
    if (s.out != nullptr && !s.plain[0])
        ol_with_compute(s.types[0], [&](auto *type) {
            using C = ol_pointee<decltype(type)>;
            ol_scatter<C>(s.walk[0], static_cast<const C *>(s.out), s.n);
        });
    const int64_t width = ol_bytes_of(s.types[0]);
    if (s.plain[0] && s.out != nullptr) s.out = static_cast<char *>(s.out) + s.n * width;
    if (s.out == nullptr) s.out = s.plain[0] ? s.walk[0].row : s.buffer[0];
    else s.done += s.n;
    if (s.done == s.count) return false;
    const int64_t before = s.done == 0 ? 0 : s.n, n = s.count - s.done;
    s.n = n < ol_map_block || s.whole ? n : ol_map_block;
    for (int k = 1; k < s.operands; ++k) {
        if (s.plain[k]) s.in[k] = static_cast<const char *>(s.in[k]) + before * ol_bytes_of(s.types[k]);
        if (s.plain[k] || s.same[k]) continue;
        ol_with_compute(s.types[k], [&](auto *type) {
            using C = ol_pointee<decltype(type)>;
            ol_gather<C>(s.walk[k], reinterpret_cast<C *>(s.buffer[k]), s.n);
        });
    }
    return true;
}
__attribute__((noinline)) inline bool ol_blocks_start(ol_blocks &s, const ol_map_args *a, ol_dim3 block, ol_dim3 grid, const uint8_t *types, int operands) {
    int64_t total = a->n;
    for (int d = 0; d < a->outer; ++d) total *= a->size[d];
    const ol_share w = ol_share_of(total, block, grid);
    s.a = a;
    s.types = types;
    s.operands = operands;
    s.done = s.n = 0;
    s.count = w.end - w.begin;
    s.out = nullptr;
    s.whole = true;
    for (int k = 0; k < operands; ++k) {
        s.plain[k] = ol_is_plain(a, k, types[k]);
        s.whole = s.whole && s.plain[k];
        s.same[k] = a->inner[k] == 0;
        for (int d = 0; d < a->outer; ++d) s.same[k] = s.same[k] && a->stride[k * OL_MAP_OUTER + d] == 0;
        s.in[k] = s.buffer[k];
        if (s.plain[k]) {
            s.walk[k].row = reinterpret_cast<char *>(a->data[k]) + w.begin * ol_bytes_of(types[k]);
            s.in[k] = s.walk[k].row;
            continue;
        }
        ol_walk_start(s.walk[k], a, k, s.same[k] && k > 0 ? 0 : w.begin);
        if (k > 0 && s.same[k])
            ol_with_compute(types[k], [&](auto *type) {
                using C = ol_pointee<decltype(type)>;
                const C value = ol_load_as<C>(s.walk[k].row, s.walk[k].dtype);
                const int64_t n = s.count < ol_map_block ? s.count : ol_map_block;
                C *to = reinterpret_cast<C *>(s.buffer[k]);
                for (int64_t i = 0; i < n; ++i) to[i] = value;
            });
    }
    return ol_blocks_next(s);
}

/* The loop of one function: `closure` is its lambda, `in` the data inputs.  Not inlined, so that it is compiled once. */
typedef void (*ol_map_loop)(void *out, int64_t n, const void *const *in, const void *closure);
template <class O, class F, class... I, int... K>
OL_DEVICE void ol_map_each(void *out, int64_t n, const void *const *in, const F &f, ol_ints<K...>) {
    [&f](O *to, int64_t n, const I *...from) __attribute__((always_inline)) {
        OL_INDEPENDENT for (int64_t i = 0; i < n; ++i) to[i] = f(ol_load(from + i)...);
    }(static_cast<O *>(out), n, static_cast<const I *>(in[K - 1])...);
}
template <class O, class F, class... I>
__attribute__((noinline)) void ol_map_dense(void *out, int64_t n, const void *const *in, const void *closure) {
    ol_map_each<O, F, I...>(out, n, in, *static_cast<const F *>(closure), typename ol_operands<sizeof...(I)>::list{});
}
__attribute__((noinline)) inline int32_t ol_map_blocks(const ol_map_args *a, ol_dim3 block, ol_dim3 grid, const uint8_t *types,
                                                       int operands, ol_map_loop run, const void *closure) {
    ol_blocks s;
    for (bool more = ol_blocks_start(s, a, block, grid, types, operands); more; more = ol_blocks_next(s))
        run(s.out, s.n, s.in + 1, closure);
    return OL_OK;
}
template <class O, class... I, class F>
OL_DEVICE int32_t ol_map(const ol_map_args *a, ol_dim3 block, ol_dim3 grid, F f) {
    static constexpr uint8_t types[] = {ol_number_of<O>::value, ol_number_of<I>::value...};
    if (a->form == OL_MAP_DENSE && grid.x == 1) {
        ol_map_dense<O, F, I...>(reinterpret_cast<void *>(a->data[0]), a->n, reinterpret_cast<const void *const *>(a->data + 1), &f);
        return OL_OK;
    }
    if constexpr (sizeof...(I) == 2)
        if (a->form == OL_MAP_LAST_ONE) return ol_map_last_one<O, I...>(a, block, grid, f);
    return ol_map_blocks(a, block, grid, types, sizeof...(I) + 1, ol_map_dense<O, F, I...>, &f);
}

/* Moves elements of T's size as they are, in runs where both sides have them. */
template <class T> OL_DEVICE int32_t ol_copy(const ol_map_args *a, ol_dim3 block, ol_dim3 grid) {
    int64_t rows = 1;
    for (int d = 0; d < a->outer; ++d) rows *= a->size[d];
    T *out = reinterpret_cast<T *>(a->data[0]);
    const T *in = reinterpret_cast<const T *>(a->data[1]);
    int64_t n = a->n, first = 0;
    if (grid.x != 1) { /* parts share out the rows, or the elements of a single row */
        const ol_share w = ol_share_of(a->outer == 0 ? n : rows, block, grid);
        if (a->outer == 0) {
            out += w.begin * a->inner[0];
            in += w.begin * a->inner[1];
            n = w.end - w.begin;
        } else {
            first = w.begin;
            rows = w.end - w.begin;
        }
    }
    int64_t index[OL_MAP_OUTER], rest = first;
    for (int d = 0; d < a->outer; ++d) {
        index[d] = 0;
        if (first == 0) continue;
        index[d] = rest % a->size[d];
        rest /= a->size[d];
        out += index[d] * a->stride[d];
        in += index[d] * a->stride[OL_MAP_OUTER + d];
    }
    const int64_t to = a->inner[0], from = a->inner[1];
    for (; rows > 0; --rows) {
        if (to == 1 && from == 1) {
            memcpy(out, in, static_cast<size_t>(n) * sizeof(T)); /* exactly the same place is harmless */
        } else if (to == 1 && from == 0) {
            const T value = n > 0 ? *in : T{};
            OL_INDEPENDENT for (int64_t i = 0; i < n; ++i) out[i] = value;
        } else {
            OL_INDEPENDENT for (int64_t i = 0; i < n; ++i) out[i * to] = in[i * from];
        }
        for (int d = 0; d < a->outer; ++d) {
            out += a->stride[d];
            in += a->stride[OL_MAP_OUTER + d];
            if (++index[d] < a->size[d]) break;
            out -= a->size[d] * a->stride[d];
            in -= a->size[d] * a->stride[OL_MAP_OUTER + d];
            index[d] = 0;
        }
    }
    return OL_OK;
}
#endif

}  // namespace OL_NAMESPACE
#endif
