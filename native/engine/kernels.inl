// The kernels, over the 16 lanes of a simd_*.h. Included once per instruction set; see kernels.h for the numerics.
#include "kernels.h"

namespace {

using namespace outlast::engine;

// Small loops over arrays of vectors must be unrolled completely, or the compiler keeps the arrays in memory (3x slower).
#define OL_UNROLL _Pragma("GCC unroll 16")

// ---- exp ------------------------------------------------------------------------------------------------------

// exp(x): x = n ln 2 + r, |r| <= ln 2 / 2, Taylor to r^7 (truncation 5e-9), relative error below 2e-7.
// 0 below -87.3, NaN stays NaN.
OL_INLINE F16 exp16(F16 x) {
    const F16 low = set1(-87.3f), high = set1(88.0f);
    const F16 magic = set1(12582912.0f);                      // 1.5 * 2^23: adding it rounds to an integer
    const F16 c = max(low, min(high, x));
    const F16 n = sub(add(mul(c, set1(1.44269504f)), magic), magic);
    F16 r = fma(n, set1(-0.693145751953125f), c);             // leading 15 bits of ln 2: the product is exact
    r = fma(n, set1(-1.42860682e-06f), r);
    F16 p = set1(1.0f / 5040);
    p = fma(p, r, set1(1.0f / 720));
    p = fma(p, r, set1(1.0f / 120));
    p = fma(p, r, set1(1.0f / 24));
    p = fma(p, r, set1(1.0f / 6));
    p = fma(p, r, set1(0.5f));
    p = fma(p, r, set1(1.0f));
    p = fma(p, r, set1(1.0f));
    return zero_below(x, low, mul(p, power_of_two(n)));
}

// ---- matrix times tokens --------------------------------------------------------------------------------------

struct Tile {
    const uint8_t *w;           // first group
    size_t stride;              // bytes between groups
    uint32_t columns;
    Activations x;
    float *y;
    size_t ldy;
    bool add;
};

template <int T, int G>
OL_INLINE void store_tile(const Tile &a, const F16 (&acc)[G][T]) {
    OL_UNROLL
    for (int g = 0; g < G; ++g)
        OL_UNROLL
        for (int t = 0; t < T; ++t) {
            float *y = a.y + t * a.ldy + size_t(g) * kGroup;
            store(y, a.add ? add(load(y), acc[g][t]) : acc[g][t]);
        }
}

// Eight columns of Q4_1, recursively so that each nibble's shift is a constant.
template <int T, int G, int I>
OL_INLINE void nibble_columns(const Words (&w)[G], const float *x, size_t ldx, F16 (&s)[G][T]) {
    if constexpr (I < 8) {
        F16 q[G];
        OL_UNROLL
        for (int g = 0; g < G; ++g) q[g] = nibble<I>(w[g]);
        OL_UNROLL
        for (int t = 0; t < T; ++t) {
            const F16 xv = set1(x[t * ldx + I]);
            OL_UNROLL
            for (int g = 0; g < G; ++g) s[g][t] = fma(q[g], xv, s[g][t]);
        }
        nibble_columns<T, G, I + 1>(w, x, ldx, s);
    }
}

template <int T, int G>
static void tile_q4_1(const Tile &a) {
    constexpr size_t kBytes = 4 * kGroup + kBlock * kGroup / 2;
    F16 acc[G][T];
    OL_UNROLL
    for (int g = 0; g < G; ++g)
        OL_UNROLL
        for (int t = 0; t < T; ++t) acc[g][t] = zero();
    const uint8_t *w = a.w;
    for (uint32_t b = 0; b < a.columns / kBlock; ++b, w += kBytes) {
        F16 s[G][T];
        OL_UNROLL
        for (int g = 0; g < G; ++g)
            OL_UNROLL
            for (int t = 0; t < T; ++t) s[g][t] = zero();
        for (uint32_t c = 0; c < 4; ++c) {
            Words words[G];
            OL_UNROLL
            for (int g = 0; g < G; ++g) words[g] = load_words(w + g * a.stride + 4 * kGroup + 4 * kGroup * c);
            nibble_columns<T, G, 0>(words, a.x.scaled + b * kBlock + 8 * c, a.x.ld, s);
        }
        OL_UNROLL
        for (int g = 0; g < G; ++g) {
            const F16 scale = load_half(w + g * a.stride), least = load_half(w + g * a.stride + 2 * kGroup);
            OL_UNROLL
            for (int t = 0; t < T; ++t) {
                acc[g][t] = fma(scale, s[g][t], acc[g][t]);
                acc[g][t] = fma(least, set1(a.x.sums[t * (a.x.ld / kBlock) + b]), acc[g][t]);
            }
        }
    }
    store_tile<T, G>(a, acc);
}

template <int T, int G>
static void tile_q8_0(const Tile &a) {
    constexpr size_t kBytes = 2 * kGroup + kBlock * kGroup;
    F16 acc[G][T];
    OL_UNROLL
    for (int g = 0; g < G; ++g)
        OL_UNROLL
        for (int t = 0; t < T; ++t) acc[g][t] = zero();
    const uint8_t *w = a.w;
    for (uint32_t b = 0; b < a.columns / kBlock; ++b, w += kBytes) {
        F16 s[G][T];
        OL_UNROLL
        for (int g = 0; g < G; ++g)
            OL_UNROLL
            for (int t = 0; t < T; ++t) s[g][t] = zero();
        const float *x = a.x.x + b * kBlock;
#pragma GCC unroll 4
        for (uint32_t k = 0; k < kBlock; ++k) {
            F16 q[G];
            OL_UNROLL
            for (int g = 0; g < G; ++g) q[g] = load_int8(w + g * a.stride + 2 * kGroup + k * kGroup);
            OL_UNROLL
            for (int t = 0; t < T; ++t) {
                const F16 xv = set1(x[t * a.x.ld + k]);
                OL_UNROLL
                for (int g = 0; g < G; ++g) s[g][t] = fma(q[g], xv, s[g][t]);
            }
        }
        OL_UNROLL
        for (int g = 0; g < G; ++g) {
            const F16 scale = load_half(w + g * a.stride);
            OL_UNROLL
            for (int t = 0; t < T; ++t) acc[g][t] = fma(scale, s[g][t], acc[g][t]);
        }
    }
    store_tile<T, G>(a, acc);
}

template <int T, int G>
static void tile_f32(const Tile &a) {
    F16 acc[G][T];
    OL_UNROLL
    for (int g = 0; g < G; ++g)
        OL_UNROLL
        for (int t = 0; t < T; ++t) acc[g][t] = zero();
    for (uint32_t k = 0; k < a.columns; ++k) {
        F16 w[G];
        OL_UNROLL
        for (int g = 0; g < G; ++g)
            w[g] = load(reinterpret_cast<const float *>(a.w + g * a.stride) + size_t(k) * kGroup);
        OL_UNROLL
        for (int t = 0; t < T; ++t) {
            const F16 xv = set1(a.x.x[t * a.x.ld + k]);
            OL_UNROLL
            for (int g = 0; g < G; ++g) acc[g][t] = fma(w[g], xv, acc[g][t]);
        }
    }
    store_tile<T, G>(a, acc);
}

template <int T, int G>
OL_INLINE void run_tile(Type type, const Tile &a) {
    switch (type) {
        case Type::q4_1: tile_q4_1<T, G>(a); break;
        case Type::q8_0: tile_q8_0<T, G>(a); break;
        case Type::f32: tile_f32<T, G>(a); break;
    }
}

// Calls run_tile<tokens, G> for the run-time number of tokens (1..kTile); G = flight(tokens) when `wide`, else 1.
template <int T>
OL_INLINE void pick_tile(uint32_t tokens, bool wide, Type type, const Tile &a) {
    if constexpr (T > 0) {
        if (tokens == uint32_t(T)) {
            if (wide) run_tile<T, flight(T)>(type, a);
            else run_tile<T, 1>(type, a);
        } else {
            pick_tile<T - 1>(tokens, wide, type, a);
        }
    }
}

// Groups in the outer loop: their weights stay in the first-level cache while the tokens pass.
static void matmul_block(const Matrix &m, uint32_t first, uint32_t last, const Activations &x, uint32_t tokens, float *y,
                         size_t ldy, bool add_to) {
    const uint32_t widest = uint32_t(flight(tokens < uint32_t(kTile) ? int(tokens) : kTile));
    for (uint32_t g = first; g < last;) {
        const uint32_t step = g + widest <= last ? widest : 1;
        for (uint32_t t = 0; t < tokens;) {
            const uint32_t n = tokens - t < uint32_t(kTile) ? tokens - t : uint32_t(kTile);
            const Activations tile{x.x + t * x.ld, x.scaled + t * x.ld, x.sums + t * (x.ld / kBlock), x.ld};
            Tile a{m.data + g * m.group_stride, m.group_stride, m.columns, tile,
                   y + t * ldy + size_t(g) * kGroup,  ldy,            add_to};
            // The remainder tile of a long list may want more groups in flight than this pass has: go one by one then.
            const uint32_t wants = uint32_t(flight(int(n)));
            if (step == wants) pick_tile<kTile>(n, true, m.type, a);
            else
                for (uint32_t i = 0; i < step; ++i, a.w += m.group_stride, a.y += kGroup)
                    pick_tile<kTile>(n, false, m.type, a);
            t += n;
        }
        g += step;
    }
}

// Blocks of tokens whose activations fit the second-level cache beside the weights in flight (64 x 1536 floats: 400 KB).
constexpr uint32_t kTokenBlock = 64;

static void matmul(const Matrix &m, uint32_t first, uint32_t last, const Activations &x, uint32_t tokens, float *y,
                   size_t ldy, bool add_to) {
    for (uint32_t t = 0; t < tokens; t += kTokenBlock) {
        const Activations block{x.x + t * x.ld, x.scaled + t * x.ld, x.sums + t * (x.ld / kBlock), x.ld};
        matmul_block(m, first, last, block, tokens - t < kTokenBlock ? tokens - t : kTokenBlock, y + t * ldy, ldy, add_to);
    }
}

// ---- vectors --------------------------------------------------------------------------------------------------

static void prepare(const float *x, uint32_t n, float *scaled, float *sums) {
    alignas(64) float pattern[16];
    for (int i = 0; i < 16; ++i) pattern[i] = kNibbleScale[i % 8];
    const F16 scale = load(pattern);
    for (uint32_t b = 0; b < n / kBlock; ++b) {
        const F16 low = load(x + b * kBlock), high = load(x + b * kBlock + 16);
        store(scaled + b * kBlock, mul(low, scale));
        store(scaled + b * kBlock + 16, mul(high, scale));
        sums[b] = sum_lanes(add(low, high));
    }
}

static void rms_norm(const float *x, const float *weight, float epsilon, uint32_t n, float *y) {
    F16 squares = zero();
    for (uint32_t i = 0; i < n; i += 16) {
        const F16 v = load(x + i);
        squares = fma(v, v, squares);
    }
    const float mean = sum_lanes(squares) / float(n);
    const F16 scale = set1(1.0f / __builtin_sqrtf(mean + epsilon));      // one instruction, correctly rounded
    for (uint32_t i = 0; i < n; i += 16) store(y + i, mul(mul(load(x + i), scale), load(weight + i)));
}

static void silu_mul(float *gate, const float *up, uint32_t n) {
    const F16 one = set1(1.0f);
    for (uint32_t i = 0; i < n; i += 16) {
        const F16 g = load(gate + i);
        store(gate + i, mul(div(g, add(one, exp16(sub(zero(), g)))), load(up + i)));
    }
}

static float max_of(const float *x, uint32_t n) {
    F16 best = load(x);
    for (uint32_t i = 16; i < n; i += 16) best = max(best, load(x + i));
    return max_lanes(best);
}

static void exp_chunks(const float *x, uint32_t n, float shift, float temperature, float *out, double *sums) {
    const F16 s = set1(shift), t = set1(temperature);
    for (uint32_t c = 0; c * kSumChunk < n; ++c) {
        const uint32_t end = n - c * kSumChunk < kSumChunk ? n : (c + 1) * kSumChunk;
        F16 sum = zero();
        for (uint32_t i = c * kSumChunk; i < end; i += 16) {
            const F16 p = exp16(div(sub(load(x + i), s), t));
            if (out != nullptr) store(out + i, p);
            sum = add(sum, p);
        }
        sums[c] = double(sum_lanes(sum));
    }
}

// ---- attention ------------------------------------------------------------------------------------------------

constexpr int kHeadsAtOnce = 4;
// Rows of one head lie too far apart for the hardware to see the pattern: fetch them this many positions ahead.
constexpr int kAhead = 12;

// out[h] = sum over positions of scores[h][position] * v[position], W vectors from element `from` on.
template <int H, int W>
OL_INLINE void weigh(const Attend &a, const uint8_t *const *rows, const float *scores, int from, float *out) {
    F16 o[H][W];
    OL_UNROLL
    for (int h = 0; h < H; ++h)
        OL_UNROLL
        for (int c = 0; c < W; ++c) o[h][c] = zero();
    const ptrdiff_t to_v = a.v - a.k;
    for (uint32_t i = 0; i < a.count; ++i) {
        const float *row = reinterpret_cast<const float *>(rows[i] + to_v) + from;
        OL_UNROLL
        for (int c = 0; c < W; ++c) fetch(rows[i + kAhead] + to_v + (from + 16 * c) * sizeof(float));
        F16 v[W];
        OL_UNROLL
        for (int c = 0; c < W; ++c) v[c] = load(row + 16 * c);
        OL_UNROLL
        for (int h = 0; h < H; ++h) {
            const F16 p = set1(scores[h * kSegment + i]);
            OL_UNROLL
            for (int c = 0; c < W; ++c) o[h][c] = fma(p, v[c], o[h][c]);
        }
    }
    OL_UNROLL
    for (int h = 0; h < H; ++h)
        OL_UNROLL
        for (int c = 0; c < W; ++c) store(out + h * a.out_stride + 16 * c, o[h][c]);
}

// Scores, softmax and weighted values for H query heads over one segment. C = head_dim / 16 when known, else 0.
template <int H, int C>
static void attend_heads(const Attend &a, const uint8_t *const *rows, const float *q, float *out) {
    const int chunks = C > 0 ? C : int(a.head_dim / 16);
    alignas(64) float scores[H][kSegment];
    for (uint32_t i = 0; i < a.count; ++i) {
        const float *k = reinterpret_cast<const float *>(rows[i]);
        F16 s[H];
        OL_UNROLL
        for (int h = 0; h < H; ++h) s[h] = zero();
        for (int c = 0; c < chunks; ++c) {
            fetch(rows[i + kAhead] + 16 * c * sizeof(float));
            const F16 kv = load(k + 16 * c);
            OL_UNROLL
            for (int h = 0; h < H; ++h) s[h] = fma(load(q + h * a.head_dim + 16 * c), kv, s[h]);
        }
        OL_UNROLL
        for (int h = 0; h < H; ++h) scores[h][i] = sum_lanes(s[h]) * a.scale;
    }
    const uint32_t filled = (a.count + 15) / 16 * 16;
    for (int h = 0; h < H; ++h) {
        for (uint32_t i = a.count; i < filled; ++i) scores[h][i] = -__builtin_inff();
        const float most = max_of(scores[h], filled);
        const F16 shift = set1(most);
        F16 sum = zero();
        for (uint32_t i = 0; i < filled; i += 16) {
            const F16 p = exp16(sub(load(scores[h] + i), shift));
            store(scores[h] + i, p);
            sum = add(sum, p);
        }
        float *o = out + h * a.out_stride;
        o[0] = most;
        o[1] = sum_lanes(sum);
    }
    // Four vectors of the result at a time: 4 H accumulators.
    for (int c = 0; c < chunks; c += 4) {
        float *o = out + kPartialHeader + 16 * c;
        switch (chunks - c) {
            case 1: weigh<H, 1>(a, rows, scores[0], 16 * c, o); break;
            case 2: weigh<H, 2>(a, rows, scores[0], 16 * c, o); break;
            case 3: weigh<H, 3>(a, rows, scores[0], 16 * c, o); break;
            default: weigh<H, 4>(a, rows, scores[0], 16 * c, o); break;
        }
    }
}

template <int H>
OL_INLINE void attend_width(const Attend &a, const uint8_t *const *rows, const float *q, float *out) {
    if (a.head_dim == 64) attend_heads<H, 4>(a, rows, q, out);
    else attend_heads<H, 0>(a, rows, q, out);
}

static void attend(const Attend &a) {
    const uint8_t *rows[kSegment + kAhead];
    for (uint32_t i = 0, within = a.first % a.block_tokens, block = a.first / a.block_tokens; i < a.count; ++block) {
        const uint8_t *row = a.k + a.table[block] * a.block_bytes + within * a.row_bytes;
        for (; within < a.block_tokens && i < a.count; ++within, ++i, row += a.row_bytes) rows[i] = row;
        within = 0;
    }
    for (int i = 0; i < kAhead; ++i) rows[a.count + i] = rows[a.count - 1];
    for (uint32_t h = 0; h < a.heads; h += kHeadsAtOnce) {
        const float *q = a.q + size_t(h) * a.head_dim;
        float *out = a.out + h * a.out_stride;
        switch (a.heads - h) {
            case 1: attend_width<1>(a, rows, q, out); break;
            case 2: attend_width<2>(a, rows, q, out); break;
            case 3: attend_width<3>(a, rows, q, out); break;
            default: attend_width<kHeadsAtOnce>(a, rows, q, out); break;
        }
    }
}

static void merge(float *state, const float *segment, uint32_t head_dim) {
    const float most = state[0] > segment[0] ? state[0] : segment[0];
    const F16 a = exp16(set1(state[0] - most)), b = exp16(set1(segment[0] - most));
    state[0] = most;
    state[1] = lane0(fma(set1(state[1]), a, mul(set1(segment[1]), b)));
    for (uint32_t i = kPartialHeader; i < kPartialHeader + head_dim; i += 16)
        store(state + i, fma(load(state + i), a, mul(load(segment + i), b)));
}

static void finish(const float *state, uint32_t head_dim, float *out) {
    const F16 sum = set1(state[1]);
    for (uint32_t i = 0; i < head_dim; i += 16) store(out + i, div(load(state + kPartialHeader + i), sum));
}

}  // namespace

namespace outlast::engine {

const Kernels &OL_TABLE() {
    static constexpr Kernels table{OL_NAME,  matmul,   prepare, rms_norm, attend,
                                   merge,    finish,   silu_mul,   max_of,   exp_chunks};
    return table;
}

}  // namespace outlast::engine
