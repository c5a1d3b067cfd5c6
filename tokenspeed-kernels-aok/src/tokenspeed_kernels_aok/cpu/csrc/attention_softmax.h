// The softmax of one chunk: scores to weights, their maximum and their sum, for some rows.
#pragma once

#include "attention_tile.h"
#include "math.h"
#include "memory.h"

namespace aok::AOK_NS {

// Rows of a block and the keys [begin, end) of a chunk that they see.
struct BlockSpans {
    int64_t begin[kBlockRows], end[kBlockRows];
};

AOK_INLINE float fma_one(float a, float b, float c) {
    float lanes[kLanes];
    store(lanes, fma(set1(a), set1(b), set1(c)));
    return lanes[0];
}

// The largest lane; no lane is NaN.
AOK_INLINE float fold_max(Vec a) {
#if defined(AOK_ISA_avx512f) || defined(AOK_ISA_avx512_bf16)
    return _mm512_reduce_max_ps(a);
#else
    float lanes[kLanes];
    store(lanes, a);
    float most = lanes[0];
    for (float lane : lanes) most = lane > most ? lane : most;
    return most;
#endif
}

// Calls f(integer constant N) for N = n, 1 <= n <= MAX.
template <int N>
struct Constant {
    static constexpr int value = N;
};
template <int MAX, class F>
AOK_INLINE void with_constant(int64_t n, const F& f) {
    if constexpr (MAX > 1) {
        if (n < MAX) return with_constant<MAX - 1>(n, f);
    }
    f(Constant<MAX>{});
}

// Scores of the keys [first, begin) and [end, last), whole vectors in all, become -infinity.
AOK_INLINE void hide(float* s, int64_t first, int64_t begin, int64_t end, int64_t last) {
    for (int64_t i = first; i < begin; i += kLanes) {
        keep(s + i, select(first_lanes(smaller(begin - i, kLanes)), set1(-kInfinity), load(s + i)));
    }
    for (int64_t i = end / kLanes * kLanes; i < last; i += kLanes) {
        keep(s + i, select(first_lanes(larger(end - i, 0)), load(s + i), set1(-kInfinity)));
    }
}

// Scores of ROWS rows to p = exp2(score - maximum), +0 for keys that a row does not see, and the sum of p. A NaN score
// leaves the maximum alone and makes the sum NaN.
template <int ROWS>
__attribute__((noinline)) void soften(float* s, const int64_t* begin, const int64_t* end, float* maximum, float* sum) {
    const int64_t first = begin[0] / kLanes * kLanes, last = round_up(end[ROWS - 1], kLanes);
    Vec most[ROWS], lanes[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        most[r] = set1(-kInfinity);
        hide(s + r * kScoreStride, first, begin[r], end[r], last);
    }
    for (int64_t i = first; i < last; i += kLanes) {
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) most[r] = max(load(s + r * kScoreStride + i), most[r]);
    }
    Vec base[ROWS];
    for (int r = 0; r < ROWS; ++r) {
        maximum[r] = fold_max(most[r]);
        base[r] = set1(maximum[r] == -kInfinity ? 0.0f : maximum[r]);
        lanes[r] = zero();
    }
    for (int64_t i = first; i < last; i += kLanes) {
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
            float* const at = s + r * kScoreStride + i;
            const Vec p = exp2_nonpositive(sub(load(at), base[r]));
            keep(at, p);
            lanes[r] = add(lanes[r], p);
        }
    }
    for (int r = 0; r < ROWS; ++r) sum[r] = fold(lanes[r]);
}

// The same for the rows [begin, end) of a block.
AOK_INLINE void soften_block(float* s, const BlockSpans& spans, int64_t begin, int64_t end, float* maximum,
                             float* sum) {
    constexpr int kTogether = 4;  // rows whose chains of operations overlap
    for (int64_t row = begin; row < end;) {
        const int64_t rows = smaller(end - row, kTogether);
        with_constant<kTogether>(rows, [&](auto n) {
            soften<n.value>(s + row * kScoreStride, spans.begin + row, spans.end + row, maximum + row, sum + row);
        });
        row += rows;
    }
}

}  // namespace aok::AOK_NS
