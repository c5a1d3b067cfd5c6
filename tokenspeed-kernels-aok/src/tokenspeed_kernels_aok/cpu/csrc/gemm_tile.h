// The inner loop of gemm: walks over pairs of k, the tile of accumulators, and what it asks of the caches.
#pragma once

#include <utility>

#include "memory.h"
#include "panels.h"
#include "simd.h"

namespace aok::AOK_NS {

constexpr int64_t kBlock = 256;  // elements of K in one chain

// A walk multiplies one pair of k for one row by NV vectors of weights. `phases` is 2 when the two products need an
// instruction each, odd element first.
#if defined(AOK_ISA_avx512_bf16)
// VDPBF16PS is defined as these two fused multiply-adds in this order, denormals flushed, rounded to nearest.
struct DotWalk {
    using X = uint16_t;
    using W = uint16_t;
    using Weights = VecI;
    using Pair = VecI;
    static constexpr int phases = 1;
    static AOK_MEMBER Weights weights(const W* w, int) { return _mm512_loadu_si512(w); }
    static AOK_MEMBER Pair pair(const X* x, int) {
        int32_t both;
        std::memcpy(&both, x, sizeof(both));
        return seti(both);
    }
    static AOK_MEMBER Vec accumulate(Vec acc, Pair x, Weights w) {
        return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(w));
    }
};
#endif

template <class WT>
struct FmaWalk {
    using X = float;
    using W = WT;
    using Weights = Vec;
    using Pair = Vec;
    static constexpr int phases = 2;
    static AOK_MEMBER Weights weights(const uint16_t* w, int phase) {
        const VecI both = loadi(reinterpret_cast<const int32_t*>(w));
        return as_float(phase == 0 ? andi(both, seti(static_cast<int32_t>(0xffff0000u))) : shl<16>(both));
    }
    static AOK_MEMBER Weights weights(const float* w, int phase) { return load(w + (phase == 0 ? kPanel : 0)); }
    static AOK_MEMBER Pair pair(const X* x, int phase) { return set1(x[phase == 0 ? 1 : 0]); }
    static AOK_MEMBER Vec accumulate(Vec acc, Pair x, Weights w) { return fma(x, w, acc); }
};

constexpr int64_t kStep = 8;   // pairs of K between looks ahead, sixteen in a block
constexpr int64_t kLine = 64;  // bytes that one prefetch brings

// How tiles ask early for the weights that come next, once every kStep pairs; found by measurement.
//
// The first tile of a block reads it from memory, and the hardware's streaming stops at the end of every page: some lines
// of each stream, a little ahead, keep it going. Where several tiles share a block, memory would idle after the first of
// them: there each tile fetches its share of the next block while it multiplies, until there are so many that it is no
// matter.
#if defined(__AVX512F__)
constexpr int64_t kTouchLines = 4, kTouchBytes = 1024, kTilesAhead = 4, kTilesEnough = 16;
constexpr int kTouchLevel = 2;  // of __builtin_prefetch: 3 is the first-level cache, 2 the second
#else
constexpr int64_t kTouchLines = 8, kTouchBytes = 2048, kTilesAhead = 2, kTilesEnough = 16;
constexpr int kTouchLevel = 3;
#endif

struct Ahead {
    const char* next = nullptr;   // the next block of weights, when it is to be fetched
    int64_t panel_bytes = 0;      // from one of its panels to the next
    int64_t line = 0, count = 0;  // the next line to fetch, and how many in a step
    bool touch = false;           // keep the own streams going

    template <int NV, class W>
    AOK_MEMBER void step(const W* w, int64_t w_stride) {
        constexpr int64_t lines = kBlock * kPanel * static_cast<int64_t>(sizeof(W)) / kLine;
        if (touch) {
#pragma GCC unroll 8
            for (int v = 0; v < NV; ++v) {
                const char* ahead = reinterpret_cast<const char*>(w + v * w_stride) + kTouchBytes;
#pragma GCC unroll 8
                for (int l = 0; l < kTouchLines; ++l) __builtin_prefetch(ahead + l * kLine, 0, kTouchLevel);
            }
        }
        for (const int64_t end = line + count; line < end; ++line) {
            __builtin_prefetch(next + line / lines * panel_bytes + line % lines * kLine, 0, 3);
        }
    }
};

// One block of K for MR rows and NV panels, added to (or, for the first block, stored as) the totals.
template <class Walk, int MR, int NV>
static void tile(const typename Walk::X* x, int64_t x_stride, const typename Walk::W* w, int64_t w_stride, int64_t pairs,
          bool first, float* total, Ahead ahead) {
    Vec acc[MR][NV];
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) acc[m][v] = zero();
    }
    for (int64_t j0 = 0; j0 < pairs; j0 += kStep) {
        ahead.step<NV>(w + j0 * 2 * kPanel, w_stride);
        for (int64_t j = j0; j < smaller(j0 + kStep, pairs); ++j) {
#pragma GCC unroll 2
            for (int phase = 0; phase < Walk::phases; ++phase) {
                typename Walk::Weights weights[NV];
#pragma GCC unroll 8
                for (int v = 0; v < NV; ++v) weights[v] = Walk::weights(w + v * w_stride + j * 2 * kPanel, phase);
#pragma GCC unroll 16
                for (int m = 0; m < MR; ++m) {
                    const typename Walk::Pair both = Walk::pair(x + m * x_stride + 2 * j, phase);
#pragma GCC unroll 8
                    for (int v = 0; v < NV; ++v) acc[m][v] = Walk::accumulate(acc[m][v], both, weights[v]);
                }
            }
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) {
            float* at = total + (m * NV + v) * kPanel;
            store_raw(at, first ? acc[m][v] : add(load(at), acc[m][v]));
        }
    }
}

// The shape of a tile: rows of x (at most) and panels of weights whose accumulators fit the registers.
template <int R, int P>
struct Shape {
    static constexpr int rows = R, panels = P;
};

// One row waits for memory, and more panels are more streams for the prefetcher; the more rows, the more work on each
// vector of weights, and the fewer panels are left registers for.
#if defined(__AVX512F__)
using Lone = Shape<1, 4>;
using Thin = Shape<6, 4>;
using Tall = Shape<8, 2>;
using Wide = Shape<6, 4>;
#elif defined(__AVX2__)
using Lone = Shape<1, 4>;
using Thin = Shape<3, 2>;
using Tall = Shape<6, 1>;
using Wide = Tall;
#else
using Lone = Shape<1, 1>;
using Thin = Shape<2, 1>;
using Tall = Thin;
using Wide = Thin;
#endif

template <class Walk>
using Tile = void (*)(const typename Walk::X*, int64_t, const typename Walk::W*, int64_t, int64_t, bool, float*,
                      Ahead);

template <class Walk, int NV, int... rows>
AOK_INLINE Tile<Walk> tile_of(int64_t wanted, std::integer_sequence<int, rows...>) {
    static constexpr Tile<Walk> tiles[] = {tile<Walk, rows + 1, NV>...};
    return tiles[wanted - 1];
}

}  // namespace aok::AOK_NS
