// The two products of attention for a tile of query rows: scores against the keys of some pages, and P V.
//
// A row is one (query, head) pair. Rows share the loads of keys and values; how many share them changes no bit, since
// each output has its own accumulator and its own fixed walk.
#pragma once

#include "kv_layout.h"
#include "simd.h"

namespace aok::AOK_NS {

#if defined(AOK_ISA_avx512f) || defined(AOK_ISA_avx512_bf16)
constexpr int kScoreRows = 6, kScorePages = 4;      // rows x pages: 24 accumulators of 32 registers
constexpr int kValueRows = 6, kValueRegisters = 24;  // rows x vectors of 16 columns
#elif defined(AOK_ISA_avx2)
constexpr int kScoreRows = 6, kScorePages = 1;
constexpr int kValueRows = 3, kValueRegisters = 6;
#else
constexpr int kScoreRows = 2, kScorePages = 1;
constexpr int kValueRows = 2, kValueRegisters = 4;
#endif

constexpr int64_t kBlockRows = 24;    // rows that reuse keys while these are in the first-level cache
constexpr int64_t kChunkKeys = 256;   // part of the bit order: see docs/design/bits.md
constexpr int64_t kChunkPages = kChunkKeys / kPageSlots;
constexpr int64_t kScoreStride = kChunkKeys + 16;  // not a multiple of 4 KiB over any few rows

// Query rows as the score walk wants them: word j of every row side by side. A word is a pair of bf16 for VDPBF16PS, an
// fp32 otherwise.
template <class T>
struct QueryWords {
#if defined(AOK_ISA_avx512_bf16)
    static constexpr bool kPaired = sizeof(T) == 2;
#else
    static constexpr bool kPaired = false;
#endif
    static int64_t words(int64_t d) { return kPaired ? d / 2 : d; }
    static uint32_t word(const T* q, int64_t j) {
        uint32_t bits;
        if constexpr (kPaired || sizeof(T) == 4) {
            std::memcpy(&bits, q + j * static_cast<int64_t>(4 / sizeof(T)), sizeof(bits));
        } else {
            bits = static_cast<uint32_t>(q[j]) << 16;
        }
        return bits;
    }
};

// 32-bit words from one pair of key dimensions to the next.
template <class T>
constexpr int64_t kPairWords = sizeof(T) == 2 ? kPageSlots : 2 * kPageSlots;

// Stores an intermediate as it is; `store` is for outputs and writes one NaN for all.
AOK_INLINE void keep(float* p, const Vec& v) { std::memcpy(p, &v, sizeof(v)); }

AOK_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

AOK_INLINE Vec low_half(VecI words) { return as_float(shl<16>(words)); }
AOK_INLINE Vec high_half(VecI words) { return as_float(andi(words, seti(static_cast<int32_t>(0xffff0000u)))); }

AOK_INLINE VecI load_words(const uint32_t* p) { return loadi(reinterpret_cast<const int32_t*>(p)); }

// Scores of ROWS rows against the 16 keys of each of PAGES pages: s[r][page][slot] = (q . k) * scale.
// `ahead` names memory to prefetch, one address for each page, walked as the keys are.
// A function of its own: inlined among others, its loop would run out of registers.
template <class T, int ROWS, int PAGES, bool AHEAD>
__attribute__((noinline)) void score_pages(const uint32_t* const* keys, const uint32_t* const* ahead, const uint32_t* q,
                                           int64_t q_stride, int64_t d, float scale, float* s) {
    Vec acc[ROWS][PAGES];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int p = 0; p < PAGES; ++p) acc[r][p] = zero();
    }
    for (int64_t j = 0; j < d / 2; ++j) {
        const int64_t at = j * kPairWords<T>;
        if constexpr (AHEAD) {
#pragma GCC unroll 8
            for (int p = 0; p < PAGES; ++p) {
                prefetch(ahead[p] + at);
                if constexpr (sizeof(T) == 4) prefetch(ahead[p] + at + kPageSlots);
            }
        }
        if constexpr (QueryWords<T>::kPaired) {
#if defined(AOK_ISA_avx512_bf16)
            __m512bh k[PAGES];
#pragma GCC unroll 8
            for (int p = 0; p < PAGES; ++p) k[p] = (__m512bh)load_words(keys[p] + at);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const __m512bh pair = (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(q[j * q_stride + r]));
#pragma GCC unroll 8
                for (int p = 0; p < PAGES; ++p) acc[r][p] = _mm512_dpbf16_ps(acc[r][p], k[p], pair);
            }
#endif
        } else {
#pragma GCC unroll 2
            for (int odd = 1; odd >= 0; --odd) {
                Vec k[PAGES];
#pragma GCC unroll 8
                for (int p = 0; p < PAGES; ++p) {
                    if constexpr (sizeof(T) == 4) {
                        k[p] = as_float(load_words(keys[p] + at + odd * kPageSlots));
                    } else {
                        const VecI words = load_words(keys[p] + at);
                        k[p] = odd ? high_half(words) : low_half(words);
                    }
                }
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) {
                    const Vec one = set1(bits_float(q[(2 * j + odd) * q_stride + r]));
#pragma GCC unroll 8
                    for (int p = 0; p < PAGES; ++p) acc[r][p] = fma(one, k[p], acc[r][p]);
                }
            }
        }
    }
    const Vec factor = set1(scale);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int p = 0; p < PAGES; ++p) {
            keep(s + r * kScoreStride + p * kPageSlots, mul(acc[r][p], factor));
        }
    }
}

// The two vectors of one block of columns: [0, half) and [half, 2 half), `half` 16 but in a narrow last block.
template <class T>
AOK_INLINE void load_columns(const T* row, Vec& first, Vec& second);
template <>
AOK_MEMBER void load_columns<uint16_t>(const uint16_t* row, Vec& first, Vec& second) {
    const VecI words = load_words(reinterpret_cast<const uint32_t*>(row));
    first = low_half(words);
    second = high_half(words);
}
template <>
AOK_MEMBER void load_columns<float>(const float* row, Vec& first, Vec& second) {
    first = load(row);
    second = load(row + kLanes);
}

template <class T>
AOK_INLINE void load_columns(const T* row, int64_t half, Vec& first, Vec& second);
template <>
AOK_MEMBER void load_columns<uint16_t>(const uint16_t* row, int64_t half, Vec& first, Vec& second) {
    const VecI words = as_int(load(reinterpret_cast<const float*>(row), half));
    first = low_half(words);
    second = high_half(words);
}
template <>
AOK_MEMBER void load_columns<float>(const float* row, int64_t half, Vec& first, Vec& second) {
    first = load(row, half);
    second = load(row + half, half);
}

// o[r][column] = fma(p[r][key], v[key][column], o) for the keys [begin, end) of a chunk in ascending order, over BLOCKS
// blocks of columns. values[page] points at the first of these columns in the page's first slot; `half` is 16 for whole
// blocks (WHOLE), else BLOCKS is 1. Outputs lie as the blocks are loaded: 32 floats a block.
template <class T, int ROWS, int BLOCKS, bool WHOLE, bool AHEAD>
__attribute__((noinline)) void weigh_values(const T* const* values, const T* const* ahead, int64_t column, int64_t d,
                                            int64_t half, const float* p, int64_t begin, int64_t end, float* o,
                                            int64_t o_stride) {
    Vec acc[ROWS][2 * BLOCKS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < 2 * BLOCKS; ++c) acc[r][c] = load(o + r * o_stride + c * kLanes);
    }
    for (int64_t key = begin; key < end;) {
        const int64_t page = key / kPageSlots, page_end = (page + 1) * kPageSlots;
        const int64_t last = page_end < end ? page_end : end;
        const T* row = values[page] + column + (key - page * kPageSlots) * d;
        const T* row_ahead = AHEAD ? ahead[page] + column + (key - page * kPageSlots) * d : nullptr;
        for (; key < last; ++key, row += d) {
            if constexpr (AHEAD) {
#pragma GCC unroll 8
                for (int c = 0; c < BLOCKS; ++c) {
                    prefetch(row_ahead + c * kColumnBlock);
                    if constexpr (sizeof(T) == 4) prefetch(row_ahead + c * kColumnBlock + kLanes);
                }
                row_ahead += d;
            }
            Vec v[2 * BLOCKS];
#pragma GCC unroll 8
            for (int c = 0; c < BLOCKS; ++c) {
                if constexpr (WHOLE) {
                    load_columns(row + c * kColumnBlock, v[2 * c], v[2 * c + 1]);
                } else {
                    load_columns(row, half, v[2 * c], v[2 * c + 1]);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const Vec weight = set1(p[r * kScoreStride + key]);
#pragma GCC unroll 8
                for (int c = 0; c < 2 * BLOCKS; ++c) acc[r][c] = fma(weight, v[c], acc[r][c]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < 2 * BLOCKS; ++c) keep(o + r * o_stride + c * kLanes, acc[r][c]);
    }
}

}  // namespace aok::AOK_NS
