// The kept set of top-k and top-p without a sort: a count of every distinct value, read from the largest down.
//
// Tokens are ordered by falling z, ties by rising id, and a filter keeps a prefix of that order. The kept set is thus a
// bound: a value, and how many of the tokens that have exactly this value are in. Weights are integers, so their sums
// do not depend on the order in which they are added (docs/design/bits.md).
//
// A row of bf16 logits has at most 65,536 distinct values, and division by the temperature keeps their order: one count
// by value is exact. fp32 values are counted by the upper half of their bits first, then, only inside the bucket that
// holds the bound, by the lower half.
#pragma once

#include "memory.h"
#include "vocabulary.h"

namespace aok::AOK_NS {

// Tokens with z > value are kept, and of those with z == value the ones up to token id `last_tie`.
struct Bound {
    float value;
    int64_t last_tie;
};

constexpr Bound kNoBound = {-kInfinity, INT64_MAX};
constexpr int64_t kBuckets = 1 << 16;
constexpr int64_t kBanks = 4;  // counters of a bucket, side by side, so that equal values in a row do not wait

// A 32-bit key that orders floats as their values do; the value is not NaN. -0 and denormals are like +0.
AOK_INLINE VecI order_key(Vec z) {
    const VecI bits = as_int(add(z, zero()));
    return xori(bits, ori(sar<31>(bits), seti(INT32_MIN)));
}
AOK_INLINE float key_value(uint32_t key) { return bits_float((key & 0x80000000u) != 0 ? key ^ 0x80000000u : ~key); }

// exp(z - most) in units of 2^-40, rounded to nearest even.
AOK_INLINE void weigh(Vec z, float most, uint64_t* weights) {
    float p[kLanes];
    store(p, exp_nonpositive(sub(z, set1(most))));
    for (int i = 0; i < kLanes; ++i) {
        // Adding 1.5 * 2^52 rounds to an integer, which the low bits of the sum then hold.
        const double sum = static_cast<double>(p[i]) * 0x1p40 + 0x1.8p52;
        uint64_t bits;
        std::memcpy(&bits, &sum, sizeof(bits));
        weights[i] = bits - 0x4338000000000000u;
    }
}

// Distinct values (or buckets of values) in falling order, with how many tokens each has and what these weigh together.
struct Classes {
    void allocate() {
        z.allocate(kBuckets);
        count.allocate(kBuckets);
        weight.allocate(kBuckets + kLanes);
    }
    int64_t size = 0;
    Array<float> z;
    Array<uint32_t> count;
    Array<uint64_t> weight;
};

// Where a prefix of the order ends: inside class `index`, with `taken` of its tokens; what comes before that class.
struct Prefix {
    int64_t index;
    int64_t taken;
    int64_t count_before;
    uint64_t weight_before;
};

// The scratch of one thread, taken when it is first needed, and the search. Counters are all zero between rows.
template <class T>
class Selector {
public:
    // The bound of top-k (0: none) and then top-p (1 or more: none) for the v logits of a row whose largest z is
    // `most`, a finite number. No logit is NaN.
    Bound find(const ScaledRow<T>& row, int64_t v, float most, int64_t top_k, float top_p) {
        if (!counts_.allocated()) allocate();
        const bool limited = top_k > 0 && top_k < v;
        count_buckets(row, v, most);
        uint64_t total = 0;
        const Classes* exact = &coarse_;
        Prefix end{};
        int64_t refined = -1;
        if (limited) {
            const Prefix at = walk_count(coarse_, {}, top_k);
            exact = refine(row, v, most, at.index);
            refined = at.index;
            end = walk_count(*exact, before(at, *exact), top_k);
            total = end.weight_before + unit_weight(*exact, end.index) * static_cast<uint64_t>(end.taken);
        } else {
            for (int64_t i = 0; i < coarse_.size; ++i) total += coarse_.weight[i];
        }
        if (top_p < 1.0f) {
            const double goal = static_cast<double>(top_p) * static_cast<double>(total);
            const Prefix at = walk_weight(coarse_, {}, goal);
            if (at.index != refined) exact = refine(row, v, most, at.index);
            end = walk_weight(*exact, before(at, *exact), goal);
        }
        return {exact->z[end.index], nth_tie(row, v, exact->z[end.index], end.taken, exact->count[end.index])};
    }

private:
    void allocate() {
        counts_.allocate_zeroed(kBuckets * kBanks);
        weights_.allocate_zeroed(kBuckets);
        fine_counts_.allocate_zeroed(kBuckets);
        coarse_.allocate();
        fine_.allocate();
    }

    // The state in front of the first class of `exact`: of the whole list, or of what bucket `at` was refined into.
    Prefix before(const Prefix& at, const Classes& exact) const { return &exact == &coarse_ ? Prefix{} : at; }

    static uint64_t unit_weight(const Classes& c, int64_t i) { return c.weight[i] / c.count[i]; }

    // The class in which the k-th token lies.
    static Prefix walk_count(const Classes& c, Prefix at, int64_t k) {
        for (at.index = 0; at.count_before + c.count[at.index] < k; ++at.index) {
            at.count_before += c.count[at.index];
            at.weight_before += c.weight[at.index];
        }
        at.taken = k - at.count_before;
        return at;
    }

    // The class in which the cumulative weight reaches `goal`, and the number of its tokens that this takes.
    static Prefix walk_weight(const Classes& c, Prefix at, double goal) {
        for (at.index = 0; at.index + 1 < c.size; ++at.index) {
            if (static_cast<double>(at.weight_before + c.weight[at.index]) >= goal) break;
            at.count_before += c.count[at.index];
            at.weight_before += c.weight[at.index];
        }
        const uint64_t unit = unit_weight(c, at.index);
        int64_t low = 1, high = c.count[at.index];
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            const bool reached = static_cast<double>(at.weight_before + unit * static_cast<uint64_t>(middle)) >= goal;
            (reached ? high : low) = reached ? middle : middle + 1;
        }
        at.taken = low;
        return at;
    }

    static constexpr bool kExact = sizeof(T) == 2;

    // What was counted, so that only buckets which may hold something are read: values lie in [least, most], and those
    // that are not zero in no smaller magnitude than `nearest`.
    struct Extent {
        float least, most, nearest;
    };

    void count_buckets(const ScaledRow<T>& row, int64_t v, float most) {
        Extent extent;
        if constexpr (kExact) {
            extent = count([&](int64_t i, auto... n) { return load_as_float(row.logits() + i, n...); }, v, most);
        } else {
            extent = row.visit([&](const auto& load) { return count(load, v, most); });
        }
        coarse_.size = 0;
        if (extent.most > 0) drain_coarse(bucket_of(extent.most), bucket_of(extent.nearest));
        drain_coarse(bucket_of(0.0f), bucket_of(0.0f));
        if (extent.least < 0) drain_coarse(bucket_of(-extent.nearest), bucket_of(extent.least));
        if constexpr (kExact) finish_exact(row, most, coarse_);
    }

    template <class Load>
    Extent count(const Load& load, int64_t v, float most) {
        constexpr int64_t kStep = 256;  // addresses first, then the counting, so that neither waits for the other
        alignas(64) static constexpr int32_t kBankOfLane[kLanes] = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3};
        uint32_t* const counts = counts_.data();
        uint64_t* const weights = weights_.data();
        const float first = smallest_lane(select(first_lanes(1), load(0, 1), set1(kInfinity)));
        Vec least = set1(kInfinity), highest = set1(-kInfinity), nearest = set1(kInfinity);
        alignas(64) int32_t at[kStep];
        alignas(64) uint64_t heavy[kExact ? 1 : kStep];
        for (int64_t start = 0; start < v; start += kStep) {
            const int64_t size = smaller(v - start, kStep);
            for (int64_t i = 0; i < size; i += kLanes) {
                const int64_t n = smaller(size - i, kLanes);
                // Lanes past the end repeat the first value, which is counted anyway.
                const Vec z = n == kLanes ? load(start + i) : select(first_lanes(n), load(start + i, n), set1(first));
                least = min(z, least);
                highest = max(z, highest);
                nearest = min(select(eq(z, zero()), set1(kInfinity), abs(z)), nearest);
                storei(at + i, addi(shl<2>(shr<16>(order_key(z))), loadi(kBankOfLane)));
                if constexpr (!kExact) weigh(z, most, heavy + i);
            }
            for (int64_t i = 0; i < size; ++i) ++counts[at[i]];
            if constexpr (!kExact) {
                for (int64_t i = 0; i < size; ++i) weights[static_cast<uint32_t>(at[i]) / kBanks] += heavy[i];
            }
        }
        return {smallest_lane(least), largest_lane(highest), smallest_lane(nearest)};
    }

    static int64_t bucket_of(float z) {
        int32_t keys[kLanes];
        storei(keys, shr<16>(order_key(set1(z))));
        return keys[0];
    }

    // Moves the counters of the buckets first, first - 1, ..., last into the coarse classes, leaving them zero. A
    // bucket stands for the value in it that has no low bits: of a negative value the key is the complement.
    void drain_coarse(int64_t first, int64_t last) {
        for (int64_t bucket = first; bucket >= last; --bucket) {
            uint32_t* const banks = counts_.data() + bucket * kBanks;
            const uint32_t count = banks[0] + banks[1] + banks[2] + banks[3];
            if (count == 0) continue;
            const uint32_t low = bucket < kBuckets / 2 ? 0xffffu : 0u;
            coarse_.z[coarse_.size] = key_value(static_cast<uint32_t>(bucket) << 16 | low);
            coarse_.count[coarse_.size] = count;
            coarse_.weight[coarse_.size] = weights_[bucket];
            std::memset(banks, 0, kBanks * sizeof(uint32_t));
            weights_[bucket] = 0;
            ++coarse_.size;
        }
    }

    // bf16: logits to z, values that division made equal into one class, and weights.
    void finish_exact(const ScaledRow<T>& row, float most, Classes& c) const {
        for (int64_t i = 0; i < c.size; i += kLanes) {
            const int64_t n = smaller(c.size - i, kLanes);
            store(c.z.data() + i, row.scale(load(c.z.data() + i, n)), n);
        }
        int64_t size = 0;
        for (int64_t i = 0; i < c.size; ++i) {
            if (size > 0 && c.z[size - 1] == c.z[i]) {
                c.count[size - 1] += c.count[i];
            } else {
                c.z[size] = c.z[i];
                c.count[size++] = c.count[i];
            }
        }
        c.size = size;
        weigh_classes(most, c);
    }

    static void weigh_classes(float most, Classes& c) {
        for (int64_t i = 0; i < c.size; i += kLanes) {
            weigh(load(c.z.data() + i, smaller(c.size - i, kLanes)), most, c.weight.data() + i);
        }
        for (int64_t i = 0; i < c.size; ++i) c.weight[i] *= c.count[i];
    }

    // The distinct values inside bucket `index` of the coarse classes.
    const Classes* refine(const ScaledRow<T>& row, int64_t v, float most, int64_t index) {
        if constexpr (kExact) return &coarse_;
        const int64_t bucket = bucket_of(coarse_.z[index]);
        row.visit([&](const auto& load) {
            for (int64_t i = 0; i < v; i += kLanes) {
                const int64_t n = smaller(v - i, kLanes);
                const VecI keys = order_key(n == kLanes ? load(i) : load(i, n));
                const Mask inside = eqi(shr<16>(keys), seti(static_cast<int32_t>(bucket)));
                uint32_t hits = mask_bits(mask_and(inside, first_lanes(n)));
                if (hits == 0) continue;
                int32_t lanes[kLanes];
                storei(lanes, andi(keys, seti(0xffff)));
                for (; hits != 0; hits &= hits - 1) ++fine_counts_[lanes[__builtin_ctz(hits)]];
            }
        });
        fine_.size = 0;
        for (int64_t low = kBuckets - 1; low >= 0; --low) {
            if (fine_counts_[low] == 0) continue;
            fine_.z[fine_.size] = key_value(static_cast<uint32_t>(bucket) << 16 | static_cast<uint32_t>(low));
            fine_.count[fine_.size++] = fine_counts_[low];
            fine_counts_[low] = 0;
        }
        weigh_classes(most, fine_);
        return &fine_;
    }

    // The id of the n-th token, by ascending id, whose z is `value`; of `count` such tokens.
    static int64_t nth_tie(const ScaledRow<T>& row, int64_t v, float value, int64_t n, int64_t count) {
        if (n == count) return INT64_MAX;
        return row.visit([&](const auto& load) {
            for (int64_t i = 0; i < v; i += kLanes) {
                const int64_t lanes = smaller(v - i, kLanes);
                const Vec z = lanes == kLanes ? load(i) : load(i, lanes);
                uint32_t hits = mask_bits(mask_and(eq(z, set1(value)), first_lanes(lanes)));
                for (; hits != 0; hits &= hits - 1) {
                    if (--n == 0) return i + __builtin_ctz(hits);
                }
            }
            return INT64_MAX;
        });
    }

    Array<uint32_t> counts_, fine_counts_;
    Array<uint64_t> weights_;
    Classes coarse_, fine_;
};

}  // namespace aok::AOK_NS
