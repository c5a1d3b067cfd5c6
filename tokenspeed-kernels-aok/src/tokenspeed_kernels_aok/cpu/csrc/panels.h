// How gemm weights lie in memory after packing: panels of 16 columns (rows of w), so that a vector holds one step of k
// for 16 outputs.
//
//   bf16   [panel][pair of k][16] uint32: low half w[n][2j], high half w[n][2j + 1]
//   fp32   [panel][k][16] float
//
// K is padded with +0 to an even number, N with zero columns to a multiple of 64 (a tile of four panels). The layout is the same for every instruction
// set, and packing moves values without changing them.
#pragma once

#include "simd.h"

namespace aok::AOK_NS {

constexpr int64_t kPanel = 16;

AOK_INLINE int64_t even(int64_t k) { return (k + 1) & ~int64_t{1}; }
AOK_INLINE int64_t panels_of(int64_t n) { return (n + 63) / 64 * 4; }

// Elements from one panel to the next.
AOK_INLINE int64_t panel_stride(int64_t k) { return even(k) * kPanel; }

// Where element k of column n lies in its panel.
AOK_INLINE int64_t panel_offset(const uint16_t*, int64_t n, int64_t k) { return (k / 2 * kPanel + n) * 2 + k % 2; }
AOK_INLINE int64_t panel_offset(const float*, int64_t n, int64_t k) { return k * kPanel + n; }

// Row `row` of the original weight.
template <class T>
AOK_INLINE void unpack_row(const void* packed, T* out, int64_t row, int64_t k) {
    const T* panel = static_cast<const T*>(packed) + row / kPanel * panel_stride(k);
    for (int64_t i = 0; i < k; ++i) out[i] = panel[panel_offset(panel, row % kPanel, i)];
}

}  // namespace aok::AOK_NS
