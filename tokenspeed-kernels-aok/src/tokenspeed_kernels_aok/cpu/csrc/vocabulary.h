// What the sampling kernels share: rows of logits over temperature, their maximum, and block sums of exponentials.
#pragma once

#include "math.h"
#include "simd.h"

namespace aok::AOK_NS {

// Blocks of a sum of exponentials and its lanes: part of the bit order, see docs/design/bits.md.
constexpr int64_t kSumBlock = 4096;
constexpr int64_t kSumLanes = 64;

// One row of logits divided by its temperature: z = logit / temperature, IEEE division, 0 counts as 1.
template <class T>
class ScaledRow {
public:
    ScaledRow(const T* logits, float temperature)
        : logits_(logits), divisor_(set1(temperature == 0.0f ? 1.0f : temperature)),
          plain_(temperature == 0.0f || temperature == 1.0f) {}

    // f(load) with a loader of z that is compiled without the division when it changes nothing.
    template <class F>
    AOK_MEMBER auto visit(const F& f) const {
        if (plain_) return f([this](int64_t i, auto... n) { return load_as_float(logits_ + i, n...); });
        return f([this](int64_t i, auto... n) { return div(load_as_float(logits_ + i, n...), divisor_); });
    }

    Vec scale(Vec logits) const { return plain_ ? logits : div(logits, divisor_); }

    float at(int64_t i) const {
        float lanes[kLanes];
        store(lanes, div(load_as_float(logits_ + i, 1), divisor_), 1);
        return lanes[0];
    }

    const T* logits() const { return logits_; }

private:
    const T* logits_;
    const Vec divisor_;
    const bool plain_;
};

AOK_INLINE float largest_lane(Vec a) {
    float lanes[kLanes];
    store(lanes, a);
    float most = lanes[0];
    for (float lane : lanes) most = lane > most ? lane : most;
    return most;
}

AOK_INLINE float smallest_lane(Vec a) { return -largest_lane(neg(a)); }

// The first i in [begin, n) with load(i) equal to `value`, which is there.
template <class Load>
AOK_INLINE int64_t first_equal(const Load& load, int64_t begin, int64_t n, float value) {
    for (int64_t i = begin; i < n; i += kLanes) {
        const int64_t lanes = n - i < kLanes ? n - i : kLanes;
        const Vec z = lanes == kLanes ? load(i) : load(i, lanes);
        const Mask hit = mask_and(eq(z, set1(value)), first_lanes(lanes));
        if (any(hit)) return i + __builtin_ctz(mask_bits(hit));
    }
    return begin;
}

struct Maximum {
    float value;    // NaN when any element is
    int64_t index;  // the first element that is equal to it; 0 for NaN
};

// Largest of the n logits of a row. Division by a positive temperature keeps the order, so it happens afterwards.
template <class T>
AOK_INLINE Maximum row_maximum(const T* logits, int64_t n) {
    constexpr int64_t kBlock = 4096;
    float most = -kInfinity;
    int64_t where = 0;
    for (int64_t start = 0; start < n; start += kBlock) {
        const int64_t end = start + kBlock < n ? start + kBlock : n;
        Vec a[4] = {set1(-kInfinity), set1(-kInfinity), set1(-kInfinity), set1(-kInfinity)};
        Mask nan = first_lanes(0);
        int64_t i = start;
        for (; i + kSumLanes <= end; i += kSumLanes) {
            Vec v[4];
            for (int k = 0; k < 4; ++k) v[k] = load_as_float(logits + i + k * kLanes);
            for (int k = 0; k < 4; ++k) nan = mask_or(nan, unordered(v[k]));
            for (int k = 0; k < 4; ++k) a[k] = max(v[k], a[k]);
        }
        for (; i < end; i += kLanes) {
            const int64_t count = end - i < kLanes ? end - i : kLanes;
            const Vec v = select(first_lanes(count), load_as_float(logits + i, count), set1(-kInfinity));
            nan = mask_or(nan, unordered(v));
            a[0] = max(v, a[0]);
        }
        if (any(nan)) return {bits_float(kCanonicalNaN), 0};
        const float block = largest_lane(max(max(a[0], a[1]), max(a[2], a[3])));
        if (block > most) {
            most = block;
            where = start;
        }
    }
    const auto load = [logits](int64_t i, auto... count) { return load_as_float(logits + i, count...); };
    return {most, first_equal(load, where, n, most)};
}

// Sum of exponential(z - most) over the entries [begin, end) in blocks of 4,096 from `begin`: 64 lanes and the halving
// tree in a block, blocks left to right.
template <class Load, class Exp>
AOK_INLINE float sum_exp(const Load& z, int64_t begin, int64_t end, float most, const Exp& exponential) {
    const Vec base = set1(most);
    float total = 0.0f;
    for (int64_t start = begin; start < end; start += kSumBlock) {
        const int64_t stop = start + kSumBlock < end ? start + kSumBlock : end;
        Vec lanes[4] = {zero(), zero(), zero(), zero()};
        int64_t i = start;
        for (; i + kSumLanes <= stop; i += kSumLanes) {
            for (int k = 0; k < 4; ++k) lanes[k] = add(lanes[k], exponential(sub(z(i + k * kLanes), base)));
        }
        for (int k = 0; i < stop; i += kLanes, ++k) {
            const int64_t count = stop - i < kLanes ? stop - i : kLanes;
            const Vec p = exponential(sub(z(i, count), base));
            lanes[k] = select(first_lanes(count), add(lanes[k], p), lanes[k]);
        }
        const float block = fold(add(add(lanes[0], lanes[2]), add(lanes[1], lanes[3])));
        total = start == begin ? block : total + block;
    }
    return total;
}

}  // namespace aok::AOK_NS
