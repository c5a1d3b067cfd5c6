// gemm: y = x w^T (+ bias) in the order of docs/design/bits.md, rules 1 and 2, and the packing of its weights.
//
// One fp32 accumulator for each output walks K in blocks of 256, in pairs, the odd element first; block sums are added
// left to right. Which rows share a tile, which columns share a thread and which instruction multiplies decide speed
// only: each output's own chain of operations is always the same.
#include "gemm_tile.h"
#include "kernels.h"
#include "memory.h"
#include "panels.h"
#include "parallel.h"
#include "simd.h"

namespace aok::AOK_NS {
namespace {

constexpr int64_t kRowsMax = 192;  // rows whose totals are kept at hand: 48 KiB

AOK_INLINE Vec load_bias(const GemmArgs& a, int64_t column, int64_t n) {
    return a.weight_dtype == kBFloat16 ? load_bf16(static_cast<const uint16_t*>(a.bias) + column, n)
                                       : load(static_cast<const float*>(a.bias) + column, n);
}

template <class T>
AOK_INLINE void finish_row(const float* total, const GemmArgs& a, T* y, int64_t column, int panels) {
    for (int v = 0; v < panels && column < a.n; ++v, column += kPanel) {
        const int64_t n = smaller(a.n - column, kPanel);
        Vec sum = load(total + v * kPanel);
        if (a.bias) sum = add(sum, load_bias(a, column, n));
        if (n == kPanel) {
            store_rounded(y + column, sum);
        } else {
            store_rounded(y + column, sum, n);
        }
    }
}

// Rows [begin, end) of one group by the panels from `panel` on.
template <class Walk, class Tiles, class T>
AOK_INLINE void multiply(const GemmArgs& a, const typename Walk::X* x, int64_t x_stride, const typename Walk::W* weight,
                         T* y, int64_t panel, int64_t begin, int64_t end) {
    constexpr int64_t width = Tiles::panels * kPanel;
    alignas(64) float totals[kRowsMax * width];
    const int64_t stride = panel_stride(a.k), k = even(a.k), stride_bytes = stride * static_cast<int64_t>(sizeof(*weight));
    const typename Walk::W* w = weight + panel * stride;
    const int64_t rows = end - begin, tiles = ceil_div(rows, Tiles::rows);
    constexpr int64_t lines = kBlock * width * static_cast<int64_t>(sizeof(typename Walk::W)) / kLine;
    for (int64_t k0 = 0; k0 < k; k0 += kBlock) {
        const int64_t pairs = smaller(k - k0, kBlock) / 2;
        const typename Walk::W* next = k0 + kBlock < k ? w + (k0 + kBlock) * kPanel : w + Tiles::panels * stride;
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t from = rows * t / tiles, to = rows * (t + 1) / tiles;
            Ahead ahead;
            if (tiles < kTilesAhead || tiles >= kTilesEnough) {
                ahead.touch = t == 0;
            } else {
                ahead = {reinterpret_cast<const char*>(next), stride_bytes, lines * t / tiles, (lines / tiles + 15) / 16};
            }
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

template <class Walk, class Tiles, class T>
void multiply_groups(const GemmArgs& a, const typename Walk::X* x, int64_t x_group_stride, int64_t x_stride) {
    constexpr int64_t width = kPanel * Tiles::panels;
    const int64_t strips = ceil_div(a.n, width);
    const int64_t parts = ceil_div(a.m, kRowsMax);
    const int64_t threads = threads_for(a.groups * a.m * a.n * a.k, 1 << 18, a.threads);
    parallel_for(a.groups * strips * parts, threads, [&](int64_t item) {
        const int64_t part = item % parts, strip = item / parts % strips, group = item / parts / strips;
        const char* weight = static_cast<const char*>(a.weight) + group * a.weight_group_stride;
        const int64_t begin = part * kRowsMax, end = smaller(begin + kRowsMax, a.m);
        multiply<Walk, Tiles>(a, x + group * x_group_stride, x_stride,
                              reinterpret_cast<const typename Walk::W*>(weight),
                              static_cast<T*>(a.y) + group * a.y_group_stride, strip * Tiles::panels, begin, end);
    });
}

template <class Walk, class T>
AOK_INLINE void multiply_all(const GemmArgs& a, const typename Walk::X* x, int64_t x_group_stride, int64_t x_stride) {
    if (a.m == 1) {
        multiply_groups<Walk, Lone, T>(a, x, x_group_stride, x_stride);
    } else if (a.m <= Thin::rows) {
        multiply_groups<Walk, Thin, T>(a, x, x_group_stride, x_stride);
    } else if (a.m <= Tall::rows) {
        multiply_groups<Walk, Tall, T>(a, x, x_group_stride, x_stride);
    } else {
        multiply_groups<Walk, Wide, T>(a, x, x_group_stride, x_stride);
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
    const Array<X> copy(rows * k);
    parallel_for(rows, threads_for(rows * k, 1 << 16, a.threads), [&](int64_t row) {
        const T* x = static_cast<const T*>(a.x) + row / a.m * a.x_group_stride + row % a.m * a.x_row_stride;
        copy_as(x, copy.data() + row * k, a.k);
        if (a.k % 2) copy[row * k + a.k] = X{0};
    });
    multiply_all<Walk, T>(a, copy.data(), a.m * k, k);
}

// The panel of `columns` rows of w, element by element: for any strides, partial panels and an odd K.
template <class T>
AOK_INLINE void pack_slowly(const PackArgs& a, const T* w, T* out, int64_t columns) {
    std::memset(out, 0, static_cast<size_t>(panel_stride(a.k)) * sizeof(T));
    for (int64_t k = 0; k < a.k; ++k) {
        for (int64_t n = 0; n < columns; ++n) {
            out[panel_offset(out, n, k)] = w[n * a.w_row_stride + k * a.w_col_stride];
        }
    }
}

// A whole panel in units of four bytes: a pair of bf16, or one fp32.
template <class T>
AOK_INLINE void pack_words(const PackArgs& a, const T* w, T* out) {
    constexpr int64_t per_word = 4 / static_cast<int64_t>(sizeof(T));
    for (int64_t k = 0; k < a.k; k += per_word) {
#pragma GCC unroll 16
        for (int64_t n = 0; n < kPanel; ++n) {
            std::memcpy(out + k * kPanel + n * per_word, w + n * a.w_row_stride + k, 4);
        }
    }
}

template <class T>
void pack_panels(const PackArgs& a) {
    parallel_for(panels_of(a.n), threads_for(a.n * a.k, 1 << 16, a.threads), [&](int64_t panel) {
        const T* w = static_cast<const T*>(a.w) + panel * kPanel * a.w_row_stride;
        T* out = static_cast<T*>(a.packed) + panel * panel_stride(a.k);
        const int64_t columns = smaller(a.n - panel * kPanel, kPanel);
        if (columns == kPanel && a.k % 2 == 0 && a.w_col_stride == 1) {
            pack_words(a, w, out);
        } else {
            pack_slowly(a, w, out, larger(columns, 0));
        }
    });
}

}  // namespace

void pack(const PackArgs* a) {
    if (a->n == 0 || a->k == 0) return;  // nothing, perhaps at no address
    a->dtype == kBFloat16 ? pack_panels<uint16_t>(*a) : pack_panels<float>(*a);
}

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
