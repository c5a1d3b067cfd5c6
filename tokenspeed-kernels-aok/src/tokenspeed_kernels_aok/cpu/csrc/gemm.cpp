// gemm: y = x w^T (+ bias) in the order of docs/design/bits.md, rules 1 and 2, and the packing of its weights.
//
// One fp32 accumulator for each output walks K in blocks of 256, in pairs, the odd element first; block sums are added
// left to right. Which rows share a tile, which columns share a thread and which instruction multiplies decide speed
// only: each output's own chain of operations is always the same.
#include <cstdlib>
#include <utility>

#include "kernels.h"
#include "panels.h"
#include "parallel.h"
#include "simd.h"

namespace aok::AOK_NS {
namespace {

constexpr int64_t kBlock = 256;    // elements of K in one chain
constexpr int64_t kRowsMax = 192;  // rows whose totals are kept at hand: 48 KiB

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

constexpr int64_t kStep = 8;   // pairs of K between looks ahead
constexpr int64_t kLine = 64;  // bytes that one prefetch brings

// How a tile asks early for the weights that come next, once every kStep pairs.
//
// A tile that reads its block from memory leaves the streaming to the hardware, which stops at the end of every page: a
// touch of each stream 2 KiB ahead wakes it in time. Where several tiles share a block, memory would idle after the
// first of them: there each tile fetches its share of the next block while it multiplies.
struct Ahead {
    const char* next;      // the next block of weights; null to touch the own streams only
    int64_t panel_bytes;   // from one of its panels to the next
    int64_t line, count;   // the next line to fetch, and how many in a step
    bool near;             // into the first-level cache

    template <int NV, class W>
    AOK_MEMBER void step(const W* w, int64_t w_stride) {
        constexpr int64_t lines = kBlock * kPanel * static_cast<int64_t>(sizeof(W)) / kLine;
        if (!next) {
#pragma GCC unroll 8
            for (int v = 0; v < NV; ++v) __builtin_prefetch(reinterpret_cast<const char*>(w + v * w_stride) + 2048, 0, 2);
            return;
        }
        for (const int64_t end = line + count; line < end; ++line) {
            const char* at = next + line / lines * panel_bytes + line % lines * kLine;
            if (near) {
                __builtin_prefetch(at, 0, 3);
            } else {
                __builtin_prefetch(at, 0, 2);
            }
        }
    }
};

// One block of K for MR rows and NV panels, added to (or, for the first block, stored as) the totals.
template <class Walk, int MR, int NV>
void tile(const typename Walk::X* x, int64_t x_stride, const typename Walk::W* w, int64_t w_stride, int64_t pairs,
          bool first, float* total, Ahead ahead) {
    Vec acc[MR][NV];
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) {
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) acc[m][v] = zero();
    }
    for (int64_t j0 = 0; j0 < pairs; j0 += kStep) {
        ahead.step<NV>(w + j0 * 2 * kPanel, w_stride);
        const int64_t j1 = j0 + kStep < pairs ? j0 + kStep : pairs;
        for (int64_t j = j0; j < j1; ++j) {
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

#if defined(AOK_ISA_avx512f) || defined(AOK_ISA_avx512_bf16)
// Few rows wait for memory, and four panels are four streams for the prefetcher. With more rows a tall tile does enough
// work on each vector of weights to hide its way from memory, and a block of two panels stays in the first-level cache.
using Thin = Shape<6, 4>;
using Tall = Shape<8, 2>;
using Wide = Shape<6, 4>;
#elif defined(AOK_ISA_avx2)
using Thin = Shape<3, 2>;
using Tall = Shape<6, 1>;
using Wide = Tall;
#else
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

template <class T>
AOK_INLINE void finish_row(const float* total, const GemmArgs& a, T* y, int64_t column, int panels) {
    for (int v = 0; v < panels && column < a.n; ++v, column += kPanel) {
        const int64_t n = a.n - column < kPanel ? a.n - column : kPanel;
        Vec sum = load(total + v * kPanel);
        if (a.bias) {
            sum = add(sum, a.weight_dtype == kBFloat16 ? load_bf16(static_cast<const uint16_t*>(a.bias) + column, n)
                                                       : load(static_cast<const float*>(a.bias) + column, n));
        }
        store_rounded(y + column, sum, n);
    }
}

// Rows [begin, end) of one group by the panels from `panel` on.
template <class Walk, class Tiles, bool alone, class T>
AOK_INLINE void multiply(const GemmArgs& a, const typename Walk::X* x, int64_t x_stride, const typename Walk::W* weight,
                         T* y, int64_t panel, int64_t begin, int64_t end) {
    constexpr int64_t width = Tiles::panels * kPanel;
    alignas(64) float totals[kRowsMax * width];
    const int64_t stride = panel_stride(a.k), k = even(a.k), stride_bytes = stride * static_cast<int64_t>(sizeof(*weight));
    const typename Walk::W* w = weight + panel * stride;
    const int64_t rows = end - begin, tiles = (rows + Tiles::rows - 1) / Tiles::rows;
    constexpr int64_t lines = kBlock * width * static_cast<int64_t>(sizeof(*weight)) / kLine;
    for (int64_t k0 = 0; k0 < k; k0 += kBlock) {
        const int64_t pairs = (k - k0 < kBlock ? k - k0 : kBlock) / 2;
        const typename Walk::W* next = k0 + kBlock < k ? w + (k0 + kBlock) * kPanel : w + Tiles::panels * stride;
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t from = rows * t / tiles, to = rows * (t + 1) / tiles;
            const int64_t share = lines / tiles, steps = kBlock / 2 / kStep;
            const Ahead ahead = {alone ? nullptr : reinterpret_cast<const char*>(next), stride_bytes, share * t,
                                 (share + steps - 1) / steps, tiles > 2};
            const auto run = tile_of<Walk, Tiles::panels>(to - from, std::make_integer_sequence<int, Tiles::rows>());
            run(x + (begin + from) * x_stride + k0, x_stride, w + k0 * kPanel, stride, pairs, k0 == 0,
                totals + from * width, ahead);
        }
    }
    if (k == 0) std::memset(totals, 0, static_cast<size_t>(rows * width) * sizeof(float));
    for (int64_t m = begin; m < end; ++m) {
        finish_row(totals + (m - begin) * width, a, y + m * a.y_row_stride, panel * kPanel, Tiles::panels);
    }
}

template <class Walk, class Tiles, bool alone, class T>
void multiply_groups(const GemmArgs& a, const typename Walk::X* x, int64_t x_group_stride, int64_t x_stride) {
    constexpr int64_t width = kPanel * Tiles::panels;
    const int64_t strips = (a.n + width - 1) / width;
    const int64_t parts = (a.m + kRowsMax - 1) / kRowsMax;
    const int64_t threads = threads_for(a.groups * a.m * a.n * a.k, 1 << 18, a.threads);
    parallel_for(a.groups * strips * parts, threads, [&](int64_t item) {
        const int64_t part = item % parts, strip = item / parts % strips, group = item / parts / strips;
        const char* weight = static_cast<const char*>(a.weight) + group * a.weight_group_stride;
        const int64_t begin = part * kRowsMax, end = a.m - begin < kRowsMax ? a.m : begin + kRowsMax;
        multiply<Walk, Tiles, alone>(a, x + group * x_group_stride, x_stride,
                              reinterpret_cast<const typename Walk::W*>(weight),
                              static_cast<T*>(a.y) + group * a.y_group_stride, strip * Tiles::panels, begin, end);
    });
}

template <class Walk, class T>
AOK_INLINE void multiply_all(const GemmArgs& a, const typename Walk::X* x, int64_t x_group_stride, int64_t x_stride) {
    if (a.m <= Thin::rows) {
        multiply_groups<Walk, Thin, true, T>(a, x, x_group_stride, x_stride);
    } else if (a.m <= 2 * Tall::rows) {
        multiply_groups<Walk, Tall, false, T>(a, x, x_group_stride, x_stride);
    } else {
        multiply_groups<Walk, Wide, false, T>(a, x, x_group_stride, x_stride);
    }
}

AOK_INLINE void copy_as(const float* x, float* out, int64_t k) { std::memcpy(out, x, static_cast<size_t>(k) * 4); }
AOK_INLINE void copy_as(const uint16_t* x, uint16_t* out, int64_t k) {
    std::memcpy(out, x, static_cast<size_t>(k) * 2);
}
AOK_INLINE void copy_as(const uint16_t* x, float* out, int64_t k) {
    int64_t i = 0;
    for (; i + kLanes <= k; i += kLanes) store_raw(out + i, load_bf16(x + i));
    for (; i < k; ++i) out[i] = widen(x[i]);
}

// Runs the walk over x itself when it can be read as it is, else over a copy widened to what the walk reads and padded
// with zeros to an even K.
template <class Walk, class T>
void gemm_with(const GemmArgs& a) {
    using X = typename Walk::X;
    if constexpr (sizeof(T) == sizeof(X)) {
        if (a.k % 2 == 0) {
            multiply_all<Walk, T>(a, static_cast<const X*>(a.x), a.x_group_stride, a.x_row_stride);
            return;
        }
    }
    const int64_t k = even(a.k), rows = a.groups * a.m;
    const size_t bytes = static_cast<size_t>(rows * k) * sizeof(X);
    X* copy = static_cast<X*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
    parallel_for(rows, threads_for(rows * k, 1 << 16, a.threads), [&](int64_t row) {
        const T* x = static_cast<const T*>(a.x) + row / a.m * a.x_group_stride + row % a.m * a.x_row_stride;
        copy_as(x, copy + row * k, a.k);
        if (a.k % 2) copy[row * k + a.k] = X{0};
    });
    multiply_all<Walk, T>(a, copy, a.m * k, k);
    std::free(copy);
}

template <class T>
void pack_panels(const PackArgs& a) {
    const T* w = static_cast<const T*>(a.w);
    const int64_t stride = panel_stride(a.k);
    parallel_for(panels_of(a.n), threads_for(a.n * a.k, 1 << 16, a.threads), [&](int64_t panel) {
        T* out = static_cast<T*>(a.packed) + panel * stride;
        if (a.n - panel * kPanel < kPanel || a.k % 2) std::memset(out, 0, static_cast<size_t>(stride) * sizeof(T));
        const int64_t columns = a.n - panel * kPanel < kPanel ? a.n - panel * kPanel : kPanel;
        for (int64_t k = 0; k < a.k; ++k) {
            for (int64_t n = 0; n < columns; ++n) {
                out[panel_offset(out, n, k)] = w[(panel * kPanel + n) * a.w_row_stride + k * a.w_col_stride];
            }
        }
    });
}

}  // namespace

void pack(const PackArgs* a) { a->dtype == kBFloat16 ? pack_panels<uint16_t>(*a) : pack_panels<float>(*a); }

void gemm(const GemmArgs* a) {
    if (a->x_dtype == kBFloat16 && a->weight_dtype == kBFloat16) {
#if defined(AOK_ISA_avx512_bf16)
        gemm_with<DotWalk, uint16_t>(*a);
#else
        gemm_with<FmaWalk<uint16_t>, uint16_t>(*a);
#endif
    } else if (a->x_dtype == kBFloat16) {
        gemm_with<FmaWalk<float>, uint16_t>(*a);
    } else if (a->weight_dtype == kBFloat16) {
        gemm_with<FmaWalk<uint16_t>, float>(*a);
    } else {
        gemm_with<FmaWalk<float>, float>(*a);
    }
}

}  // namespace aok::AOK_NS
