// Matrix times tokens, and the quantization of activations. Part of kernels.inl; see kernels.h for the numerics.
#include <type_traits>

namespace {

using namespace outlast::engine;

// Units of kLanes rows in a group; `half` says which.
constexpr int kUnits = int(kGroup) / kLanes;

// ---- weights: where the bytes of a block lie, and what they mean -------------------------------------------------
//
// A block of 32 columns has kParts parts with a scale each. w = scale * (q - kOffset) + least, q unsigned; quad<K> gives q
// of columns 4 K to 4 K + 3. kEight: q may be larger than 15.

OL_INLINE Ints nibble_quads(const uint8_t *data, int half, int chunk, bool high) {
    const Ints w = load_quads(data + chunk * 4 * kGroup + half * 4 * kLanes);
    return high ? high_nibbles(w) : low_nibbles(w);
}

struct Q40 {
    static constexpr int kParts = 1, kOffset = 8;
    static constexpr bool kLeast = false, kEight = false;
    static constexpr Place place(uint32_t b) { return place_pairs(b, kNibbles); }
    template <int K>
    OL_INLINE Ints quad(const uint8_t *data, int half) { return nibble_quads(data, half, K / 2, K % 2); }
    OL_INLINE Lanes scale(const uint8_t *s, uint32_t, int, int half) { return lanes_half(s + 2 * kLanes * half); }
    OL_INLINE Lanes least(const uint8_t *s, uint32_t, int) { return lanes_half(s); }
};

struct Q41 : Q40 {
    static constexpr int kOffset = 0;
    static constexpr bool kLeast = true;
    static constexpr Place place(uint32_t b) { return place_q4_1(b); }
    OL_INLINE Lanes least(const uint8_t *s, uint32_t, int half) { return lanes_half(s + outlast::engine::kHalves + 2 * kLanes * half); }
};

struct Q80 : Q40 {
    static constexpr int kOffset = 128;
    static constexpr bool kEight = true;
    static constexpr Place place(uint32_t b) { return place_pairs(b, kBytes); }
    template <int K>
    OL_INLINE Ints quad(const uint8_t *data, int half) { return load_quads(data + K * 4 * kGroup + half * 4 * kLanes); }
};

struct Q4K : Q40 {
    static constexpr int kOffset = 0;
    static constexpr bool kLeast = true;
    static constexpr Place place(uint32_t b) { return place_q4_k(b); }
    // A half times six bits is exact.
    OL_INLINE Lanes scale(const uint8_t *s, uint32_t b, int, int half) {
        return mul(lanes_half(s + 2 * kLanes * half), lanes_u8(s + 2 * outlast::engine::kHalves + b % 8 * kGroup + kLanes * half));
    }
    OL_INLINE Lanes least(const uint8_t *s, uint32_t b, int half) {
        const Lanes m = lanes_u8(s + 2 * outlast::engine::kHalves + (8 + b % 8) * kGroup + kLanes * half);
        return mul(mul(lanes_half(s + outlast::engine::kHalves + 2 * kLanes * half), m), lanes_set1(-1.0f));
    }
};

struct Q6K : Q40 {
    static constexpr int kParts = 2, kOffset = 32;
    static constexpr bool kEight = true;
    static constexpr Place place(uint32_t b) { return place_q6_k(b); }
    template <int K>
    OL_INLINE Ints quad(const uint8_t *data, int half) {
        const Ints crumbs = load_quads(data + kNibbles + K / 4 * 4 * kGroup + half * 4 * kLanes);
        return either(nibble_quads(data, half, K / 2, K % 2), crumbs_high<K % 4>(crumbs));
    }
    OL_INLINE Lanes scale(const uint8_t *s, uint32_t b, int part, int half) {
        const Lanes sub = lanes_s8(s + 2 * outlast::engine::kHalves + (b % 8 * 2 + part) * kGroup + kLanes * half);
        return mul(lanes_half(s + 2 * kLanes * half), sub);
    }
};

struct F32 {
    static constexpr size_t kSize = 4;
    OL_INLINE Lanes column(const uint8_t *p) { return lanes_load(reinterpret_cast<const float *>(p)); }
};
struct F16Weights {
    static constexpr size_t kSize = 2;
    OL_INLINE Lanes column(const uint8_t *p) { return lanes_half(p); }
};
struct Bf16Weights {
    static constexpr size_t kSize = 2;
    OL_INLINE Lanes column(const uint8_t *p) { return lanes_bf16(p); }
};

// ---- tiles: T tokens times U units of kLanes rows -----------------------------------------------------------------

struct Tile {
    const uint8_t *w;           // first group
    size_t stride;              // bytes between groups
    uint32_t columns;
    int half;                   // first unit's place in its group
    Activations x;
    float *y;
    size_t ldy;
    bool add;

    const uint8_t *group(int u) const { return w + size_t((half + u) / kUnits) * stride; }
    int half_of(int u) const { return (half + u) % kUnits; }
};

template <int T, int U>
OL_INLINE void store_tile(const Tile &a, const Lanes (&acc)[U][T]) {
    OL_UNROLL
    for (int u = 0; u < U; ++u)
        OL_UNROLL
        for (int t = 0; t < T; ++t) {
            float *y = a.y + t * a.ldy + u * kLanes;
            lanes_store(y, a.add ? add(lanes_load(y), acc[u][t]) : acc[u][t]);
        }
}

OL_INLINE int32_t quad_at(const int8_t *p) {
    int32_t quad;
    __builtin_memcpy(&quad, p, 4);
    return quad;
}

// Quads K to END - 1 of a block, recursively so that each one's shift is a constant. `q`: quad 0 of the first token.
template <class W, class D, int T, int P, int U, int K, int END>
OL_INLINE void dot_quads(const Tile &a, const uint8_t *const (&data)[U], const int8_t *q, D (&d)[U][T][P]) {
    if constexpr (K < END) {
        Ints w[U];
        OL_UNROLL
        for (int u = 0; u < U; ++u) w[u] = W::template quad<K>(data[u], a.half_of(u));
        OL_UNROLL
        for (int t = 0; t < T; ++t)
            OL_UNROLL
            for (int p = 0; p < P; ++p) {
                const int32_t x = quad_at(q + t * a.x.ld * P + p * kBlock + 4 * K);
                OL_UNROLL
                for (int u = 0; u < U; ++u) d[u][t][p] = dot_add(d[u][t][p], w[u], x);
            }
        dot_quads<W, D, T, P, U, K + 1, END>(a, data, q, d);
    }
}

template <class W, int T, int P, int U, int PART>
OL_INLINE void dot_part(const Tile &a, uint32_t b, const uint8_t *const (&data)[U], const uint8_t *const (&scales)[U],
                        Lanes (&acc)[U][T]) {
    if constexpr (PART < W::kParts) {
        using D = std::conditional_t<W::kEight, Dot8, Dot>;
        constexpr int kQuads = 8 / W::kParts;
        D d[U][T][P];
        OL_UNROLL
        for (int u = 0; u < U; ++u)
            OL_UNROLL
            for (int t = 0; t < T; ++t)
                OL_UNROLL
                for (int p = 0; p < P; ++p) d[u][t][p] = dot_zero(static_cast<D *>(nullptr));
        dot_quads<W, D, T, P, U, PART * kQuads, (PART + 1) * kQuads>(a, data, a.x.q + size_t{b} * P * kBlock, d);
        OL_UNROLL
        for (int u = 0; u < U; ++u) {
            const Lanes scale = W::scale(scales[u], b, PART, a.half_of(u));
            OL_UNROLL
            for (int t = 0; t < T; ++t) {
                Ints sum = dot_sum(d[u][t][0]);
                if constexpr (P == 2) sum = add(shift_left<8>(sum), dot_sum(d[u][t][1]));
                if constexpr (W::kOffset > 0) {
                    const int32_t *totals = a.x.totals + t * (a.x.ld / 16) + 2 * b;
                    const int32_t total = W::kParts == 2 ? totals[PART] : totals[0] + totals[1];
                    sum = add(sum, ints_set1(-W::kOffset * total));
                }
                const Lanes both = mul(scale, lanes_set1(a.x.scales[t * (a.x.ld / kBlock) + b]));
                acc[u][t] = fma(both, to_float(sum), acc[u][t]);
            }
        }
        dot_part<W, T, P, U, PART + 1>(a, b, data, scales, acc);
    }
}

template <class W, int T, int U>
OL_INLINE void add_least(const Tile &a, uint32_t b, const uint8_t *const (&scales)[U], Lanes (&acc)[U][T]) {
    if constexpr (W::kLeast) {
        OL_UNROLL
        for (int u = 0; u < U; ++u) {
            const Lanes least = W::least(scales[u], b, a.half_of(u));
            OL_UNROLL
            for (int t = 0; t < T; ++t)
                acc[u][t] = fma(least, lanes_set1(a.x.sums[t * (a.x.ld / kBlock) + b]), acc[u][t]);
        }
    }
}

template <class W, int T, int P, int U>
static void tile_planes(const Tile &a) {
    Lanes acc[U][T];
    OL_UNROLL
    for (int u = 0; u < U; ++u)
        OL_UNROLL
        for (int t = 0; t < T; ++t) acc[u][t] = lanes_set1(0.0f);
    for (uint32_t b = 0; b < a.columns / kBlock; ++b) {
        const Place place = W::place(b);
        const uint8_t *data[U], *scales[U];
        OL_UNROLL
        for (int u = 0; u < U; ++u) {
            data[u] = a.group(u) + place.data;
            scales[u] = a.group(u) + place.scales;
        }
        dot_part<W, T, P, U, 0>(a, b, data, scales, acc);
        add_least<W, T, U>(a, b, scales, acc);
    }
    store_tile<T, U>(a, acc);
}

// The same in float: columns K of a part, in order.
template <class W, int T, int U, int K, int END>
OL_INLINE void float_columns(const Tile &a, const uint8_t *const (&data)[U], const float *x, Lanes (&s)[U][T]) {
    if constexpr (K < END) {
        Lanes q[U];
        OL_UNROLL
        for (int u = 0; u < U; ++u)
            q[u] = to_float(add(byte_of<K % 4>(W::template quad<K / 4>(data[u], a.half_of(u))), ints_set1(-W::kOffset)));
        OL_UNROLL
        for (int t = 0; t < T; ++t) {
            const Lanes xv = lanes_set1(x[t * a.x.ld + K]);
            OL_UNROLL
            for (int u = 0; u < U; ++u) s[u][t] = fma(q[u], xv, s[u][t]);
        }
        float_columns<W, T, U, K + 1, END>(a, data, x, s);
    }
}

template <class W, int T, int U, int PART>
OL_INLINE void float_part(const Tile &a, uint32_t b, const uint8_t *const (&data)[U], const uint8_t *const (&scales)[U],
                          Lanes (&acc)[U][T]) {
    if constexpr (PART < W::kParts) {
        constexpr int kColumns = int(kBlock) / W::kParts;
        Lanes s[U][T];
        OL_UNROLL
        for (int u = 0; u < U; ++u)
            OL_UNROLL
            for (int t = 0; t < T; ++t) s[u][t] = lanes_set1(0.0f);
        float_columns<W, T, U, PART * kColumns, (PART + 1) * kColumns>(a, data, a.x.x + b * kBlock, s);
        OL_UNROLL
        for (int u = 0; u < U; ++u) {
            const Lanes scale = W::scale(scales[u], b, PART, a.half_of(u));
            OL_UNROLL
            for (int t = 0; t < T; ++t) acc[u][t] = fma(scale, s[u][t], acc[u][t]);
        }
        float_part<W, T, U, PART + 1>(a, b, data, scales, acc);
    }
}

template <class W, int T, int U>
static void tile_float(const Tile &a) {
    Lanes acc[U][T];
    OL_UNROLL
    for (int u = 0; u < U; ++u)
        OL_UNROLL
        for (int t = 0; t < T; ++t) acc[u][t] = lanes_set1(0.0f);
    for (uint32_t b = 0; b < a.columns / kBlock; ++b) {
        const Place place = W::place(b);
        const uint8_t *data[U], *scales[U];
        OL_UNROLL
        for (int u = 0; u < U; ++u) {
            data[u] = a.group(u) + place.data;
            scales[u] = a.group(u) + place.scales;
        }
        float_part<W, T, U, 0>(a, b, data, scales, acc);
        add_least<W, T, U>(a, b, scales, acc);
    }
    store_tile<T, U>(a, acc);
}

// Weights that are floats themselves.
template <class W, int T, int U>
static void tile_plain(const Tile &a) {
    Lanes acc[U][T];
    OL_UNROLL
    for (int u = 0; u < U; ++u)
        OL_UNROLL
        for (int t = 0; t < T; ++t) acc[u][t] = lanes_set1(0.0f);
    for (uint32_t k = 0; k < a.columns; ++k) {
        Lanes w[U];
        OL_UNROLL
        for (int u = 0; u < U; ++u)
            w[u] = W::column(a.group(u) + (size_t{k} * kGroup + a.half_of(u) * kLanes) * W::kSize);
        OL_UNROLL
        for (int t = 0; t < T; ++t) {
            const Lanes xv = lanes_set1(a.x.x[t * a.x.ld + k]);
            OL_UNROLL
            for (int u = 0; u < U; ++u) acc[u][t] = fma(w[u], xv, acc[u][t]);
        }
    }
    store_tile<T, U>(a, acc);
}

// ---- which tile ---------------------------------------------------------------------------------------------------

template <class W, int T, int U>
OL_INLINE void tile_quantized(Compute mode, const Tile &a) {
    if (mode == Compute::int8x2) tile_planes<W, T, 2, U>(a);
    else if (mode == Compute::int8) tile_planes<W, T, 1, U>(a);
    else tile_float<W, T, U>(a);
}

template <int T, int U>
static void run_tile(Compute mode, Type type, const Tile &a) {
    switch (type) {
        case Type::f32: tile_plain<F32, T, U>(a); break;
        case Type::f16: tile_plain<F16Weights, T, U>(a); break;
        case Type::bf16: tile_plain<Bf16Weights, T, U>(a); break;
        case Type::q4_0: tile_quantized<Q40, T, U>(mode, a); break;
        case Type::q4_1: tile_quantized<Q41, T, U>(mode, a); break;
        case Type::q8_0: tile_quantized<Q80, T, U>(mode, a); break;
        case Type::q4_k: tile_quantized<Q4K, T, U>(mode, a); break;
        case Type::q6_k: tile_quantized<Q6K, T, U>(mode, a); break;
    }
}

// run_tile<T, flight(T)> or run_tile<T, 1> for T = `tokens`, a power of two up to kTile.
template <int T>
OL_INLINE void pick_tile(uint32_t tokens, bool wide, Compute mode, Type type, const Tile &a) {
    if constexpr (T > 0) {
        if (tokens == uint32_t(T)) {
            if (wide) run_tile<T, flight(T)>(mode, type, a);
            else run_tile<T, 1>(mode, type, a);
        } else {
            pick_tile<T / 2>(tokens, wide, mode, type, a);
        }
    }
}

// Largest power of two up to n and kTile.
OL_INLINE uint32_t tile_tokens(uint32_t n) {
    uint32_t t = kTile;
    while (t > n) t /= 2;
    return t;
}

OL_INLINE Activations from_token(const Activations &x, Compute mode, size_t t) {
    const size_t blocks = t * (x.ld / kBlock), planes = size_t(mode);
    return {x.x + t * x.ld, x.sums + blocks, x.ld, x.q + blocks * planes * kBlock, x.scales + blocks, x.totals + 2 * blocks};
}

// Units of rows in the outer loop: their weights stay in the first-level cache while the tokens pass.
static void matmul_block(Compute mode, const Matrix &m, uint32_t first, uint32_t last, const Activations &x,
                         uint32_t tokens, float *y, size_t ldy, bool add_to) {
    const uint32_t widest = uint32_t(flight(int(tile_tokens(tokens)))), end = last * kUnits;
    for (uint32_t u = first * kUnits; u < end;) {
        const uint32_t step = u + widest <= end ? widest : 1;
        const uint8_t *w = m.data + u / kUnits * m.group_stride;
        for (uint32_t t = 0; t < tokens;) {
            const uint32_t n = tile_tokens(tokens - t);
            Tile a{w, m.group_stride, m.columns, int(u % kUnits), from_token(x, mode, t),
                   y + t * ldy + size_t(u) * kLanes, ldy, add_to};
            // The last tiles of a list want more units in flight than this pass has: go one by one then.
            if (step == uint32_t(flight(int(n)))) pick_tile<kTile>(n, true, mode, m.type, a);
            else
                for (uint32_t i = 0; i < step; ++i, ++a.half, a.y += kLanes) pick_tile<kTile>(n, false, mode, m.type, a);
            t += n;
        }
        u += step;
    }
}

// Blocks of tokens whose activations fit the second-level cache beside the weights in flight (64 x 1536 floats: 400 KB).
constexpr uint32_t kTokenBlock = 64;

static void matmul(Compute mode, const Matrix &m, uint32_t first, uint32_t last, const Activations &x, uint32_t tokens,
                   float *y, size_t ldy, bool add_to) {
    for (uint32_t t = 0; t < tokens; t += kTokenBlock)
        matmul_block(mode, m, first, last, from_token(x, mode, t), tokens - t < kTokenBlock ? tokens - t : kTokenBlock,
                     y + t * ldy, ldy, add_to);
}

// ---- activations --------------------------------------------------------------------------------------------------

// x[0..31] / scale to the nearest integer, ties to even; the scale. 0 where all are smaller than 1e-30.
template <int MOST>
OL_INLINE float quantize(const float *x, int32_t (&out)[kBlock]) {
    const F16 a = load(x), b = load(x + 16), none = zero();
    const float most = max_lanes(max(max(a, sub(none, a)), max(b, sub(none, b))));
    const float check = sum_lanes(add(mul(a, none), mul(b, none)));     // NaN if anything is not finite
    const bool small = !(most >= 1e-30f);
    const F16 inverse = set1(small ? 0.0f : float(MOST) / most), limit = set1(float(MOST)), least = set1(-float(MOST));
    const F16 magic = set1(12582912.0f);                        // 1.5 * 2^23: adding it rounds to an integer
    alignas(64) float rounded[kBlock];
    store(rounded, add(max(least, min(mul(a, inverse), limit)), magic));
    store(rounded + 16, add(max(least, min(mul(b, inverse), limit)), magic));
    __builtin_memcpy(out, rounded, sizeof rounded);
    for (uint32_t i = 0; i < kBlock; ++i) out[i] -= 0x4b400000;
    return (small ? 0.0f : most / float(MOST)) + check;
}

OL_INLINE void totals_of(const int32_t (&v)[kBlock], int32_t *totals) {
    for (uint32_t h = 0; h < 2; ++h) {
        int32_t sum = 0;
        for (uint32_t i = 0; i < 16; ++i) sum += v[16 * h + i];
        totals[h] = sum;
    }
}

static void prepare(Compute mode, const float *x, uint32_t n, const Quantized &to) {
    for (uint32_t b = 0; b < n / kBlock; ++b, x += kBlock) {
        if (mode == Compute::f32) {
            to.sums[b] = sum_lanes(add(load(x), load(x + 16)));
            continue;
        }
        alignas(64) int32_t v[kBlock];
        if (mode == Compute::int8) {
            to.scales[b] = quantize<127>(x, v);
            int8_t *q = to.q + b * kBlock;
            for (uint32_t i = 0; i < kBlock; ++i) q[i] = int8_t(v[i]);
        } else {
            to.scales[b] = quantize<127 * 256 + 127>(x, v);
            int8_t *q = to.q + b * 2 * kBlock;
            for (uint32_t i = 0; i < kBlock; ++i) {
                q[i] = int8_t((v[i] + 128) >> 8);
                q[kBlock + i] = int8_t(v[i]);                   // the rest, -128 to 127
            }
        }
        totals_of(v, to.totals + 2 * b);
        to.sums[b] = to.scales[b] * float(to.totals[2 * b] + to.totals[2 * b + 1]);
    }
}

}  // namespace
