// Sorting of small integers without libraries: what the standard ones would compile could be linked in a version that the
// CPU does not have.
#pragma once

#include "memory.h"

namespace aok::AOK_NS {

constexpr int kDigitBits = 8;
constexpr int64_t kDigits = 1 << kDigitBits;

AOK_INLINE int64_t digit_of(uint32_t key, int shift) { return key >> shift & (kDigits - 1); }

// Sorts n keys in ascending order, and values (may be null) with them; equal keys keep their order. Bits of the keys from
// `bits` on are zero. The other two arrays are space; the result is where the keys were.
AOK_INLINE void radix_sort(uint32_t* keys, int32_t* values, uint32_t* other_keys, int32_t* other_values, int64_t n, int bits) {
    uint32_t* from_keys = keys;
    int32_t* from_values = values;
    for (int shift = 0; shift < bits; shift += kDigitBits) {
        int64_t starts[kDigits] = {};
        for (int64_t i = 0; i < n; ++i) ++starts[digit_of(from_keys[i], shift)];
        int64_t total = 0;
        for (int64_t d = 0; d < kDigits; ++d) {
            const int64_t count = starts[d];
            starts[d] = total;
            total += count;
        }
        for (int64_t i = 0; i < n; ++i) {
            const int64_t to = starts[digit_of(from_keys[i], shift)]++;
            other_keys[to] = from_keys[i];
            if (values != nullptr) other_values[to] = from_values[i];
        }
        uint32_t* const swapped_keys = from_keys;
        int32_t* const swapped_values = from_values;
        from_keys = other_keys;
        from_values = other_values;
        other_keys = swapped_keys;
        other_values = swapped_values;
    }
    if (from_keys != keys) {
        std::memcpy(keys, from_keys, static_cast<size_t>(n) * sizeof(uint32_t));
        if (values != nullptr) std::memcpy(values, from_values, static_cast<size_t>(n) * sizeof(int32_t));
    }
}

// The k-th smallest of n keys (k from 1), and how many of the k are equal to it.
struct Kth {
    uint32_t key;
    int64_t ties;
};
AOK_INLINE Kth kth_smallest(const uint32_t* keys, int64_t n, int64_t k) {
    uint32_t found = 0, known = 0;  // the digits found so far, and a mask of them
    for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
        int64_t counts[kDigits] = {};
        for (int64_t i = 0; i < n; ++i) {
            if ((keys[i] & known) == found) ++counts[digit_of(keys[i], shift)];
        }
        int64_t digit = 0;
        for (; counts[digit] < k; ++digit) k -= counts[digit];
        found |= static_cast<uint32_t>(digit) << shift;
        known |= static_cast<uint32_t>(kDigits - 1) << shift;
    }
    return {found, k};
}

}  // namespace aok::AOK_NS
