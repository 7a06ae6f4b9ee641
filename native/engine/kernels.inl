// The kernels, over the 16 lanes of a simd_*.h. Included once per instruction set; see kernels.h for the numerics.
#include "kernels.h"

// Small loops over arrays of vectors must be unrolled completely, or the compiler keeps the arrays in memory (3x slower).
#define OL_UNROLL _Pragma("GCC unroll 16")

#include "matmul.inl"

namespace {

using namespace outlast::engine;

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

// ---- vectors --------------------------------------------------------------------------------------------------

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
    alignas(64) float products[H][16][16] = {};                  // of 16 positions, to be summed together
    const F16 scale = set1(a.scale);
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
        for (int h = 0; h < H; ++h) store(products[h][i % 16], s[h]);
        if (i % 16 == 15 || i + 1 == a.count)
            for (int h = 0; h < H; ++h) store(scores[h] + i / 16 * 16, mul(sum_each(products[h]), scale));
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
