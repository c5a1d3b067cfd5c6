// The KV layout `aok_pairs`: what is inside a page [16 slots, kv heads, d] of the key and of the value cache.
//
// Keys of one head are a block of d * 16 elements in which the slot is the lane: 16 scores need no horizontal sum.
//     bf16   [d/2][16 slots][2]      a 32-bit word holds dimensions 2j (low half) and 2j + 1
//     fp32   [d][16 slots]
// Values of one head are [16 slots][d] with columns in blocks of 32 (the last may be narrower, of even width w):
//     bf16   word l of a block holds columns l (low half) and w/2 + l
//     fp32   natural order
// A block of either kind is thus two vectors, columns [0, w/2) and [w/2, w). Heads follow one another.
#pragma once

#include "simd.h"

namespace aok::AOK_NS {

constexpr int64_t kPageSlots = 16;
constexpr int64_t kColumnBlock = 32;

}  // namespace aok::AOK_NS
