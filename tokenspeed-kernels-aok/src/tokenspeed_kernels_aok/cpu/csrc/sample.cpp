// sampling.sample: argmax, or Gumbel-max over the tokens that top-k, top-p and min-p keep.
#include "kernels.h"
#include "parallel.h"
#include "philox.h"
#include "select.h"
#include "vocabulary.h"

namespace aok::AOK_NS {
namespace {

constexpr int64_t kRowGrain = 1 << 15;  // vocabulary entries that take about ten microseconds

// Tokens that take part in the draw.
struct Kept {
    Bound bound;
    float log_min_p;

    // Of the n tokens id .. id + n - 1 with these z.
    AOK_MEMBER Mask of(Vec z, float most, int64_t id, int64_t n) const {
        const Mask above = lt(set1(bound.value), z);
        const int64_t last = bound.last_tie - id;
        const int64_t ties = last >= kLanes ? kLanes : (last < 0 ? 0 : last + 1);
        const Mask tie = mask_and(eq(z, set1(bound.value)), first_lanes(ties));
        const Mask likely = le(set1(log_min_p), sub(z, set1(most)));
        return mask_and(mask_and(mask_or(above, tie), likely), first_lanes(n));
    }
};

struct Best {
    float score;
    int64_t id;

    void offer(float other, int64_t other_id) {
        if (other > score || (other == score && other_id < id)) {
            score = other;
            id = other_id;
        }
    }
};

// Lanes in which z + gumbel(u) may reach `best`; a lane that is left out cannot, by a wide margin.
//
// -log(u) > 1 - u, so gumbel(u) < -log(1 - u): reaching best needs 1 - u < exp(z - best). The power of two compared
// with is at least 4 * exp(z - best), which leaves 1.38 for rounding. That is plenty while a unit in the last place of
// z is below 1/2: kMostExact.
AOK_INLINE Mask may_win(Vec u, Vec z, float best) {
    const Vec shifted = fma(sub(set1(best), z), set1(0x1.715476p0f), set1(kRoundShift));
    const Vec bound = as_float(subi(seti((127 + 3) << 23), shl<23>(as_int(shifted))));
    return le(sub(set1(1.0f), u), bound);
}
constexpr float kMostExact = 0x1p20f;

// The kept token with the largest z + noise, ties to the lowest id. `top`, the token with the largest z, is kept.
template <class Load>
int64_t draw(const Load& load, int64_t v, float most, int64_t top, const Kept& kept, const NoiseStream& stream) {
    VecI words[4];
    stream.words(top / kNoiseTokens * kNoiseTokens, words);
    float noise[kLanes];
    store(noise, gumbel(uniform(words[top % kNoiseTokens / kLanes])));
    Best best{most + noise[top % kLanes], top};
    const bool exact = most < kMostExact && most > -kMostExact;
    for (int64_t start = 0; start < v; start += kNoiseTokens) {
        Vec z[4];
        Mask in[4];
        bool none = true;
        for (int k = 0; k < 4; ++k) {
            const int64_t id = start + k * kLanes;
            const int64_t n = v - id < 0 ? 0 : (v - id < kLanes ? v - id : kLanes);
            z[k] = n == kLanes ? load(id) : load(n == 0 ? 0 : id, n);
            // Rounding is monotonic: a token that not even the largest noise lifts to the best so far cannot win.
            in[k] = mask_and(kept.of(z[k], most, id, n), le(set1(best.score), add(z[k], set1(kMostNoise))));
            none = none && !any(in[k]);
        }
        if (none) continue;
        stream.words(start, words);
        for (int k = 0; k < 4; ++k) {
            const Vec u = uniform(words[k]);
            if (exact) in[k] = mask_and(in[k], may_win(u, z[k], best.score));
            uint32_t hits = mask_bits(in[k]);
            if (hits == 0) continue;
            float scores[kLanes];
            store(scores, add(z[k], gumbel(u)));
            for (; hits != 0; hits &= hits - 1) {
                const int lane = __builtin_ctz(hits);
                best.offer(scores[lane], start + k * kLanes + lane);
            }
        }
    }
    return best.id;
}

float log_one(float x) {
    float lanes[kLanes];
    store(lanes, log(set1(x)));
    return lanes[0];
}

template <class T>
int64_t sample_row(const SampleArgs& a, int64_t i, Selector<T>& selector) {
    const int64_t v = a.vocabulary;
    const T* logits = static_cast<const T*>(a.logits) + i * a.row_stride;
    const Maximum largest = row_maximum(logits, v);
    const ScaledRow<T> row(logits, a.temperature[i]);
    const float most = row.at(largest.index) + 0.0f;  // +0 rather than -0
    if (!(largest.value - largest.value == 0.0f && most - most == 0.0f)) return -1;  // NaN, or not finite
    if (a.temperature[i] == 0.0f) return largest.index;
    return row.visit([&](const auto& load) {
        // Division may have made another token as good.
        const int64_t top = first_equal(load, 0, v, most);
        if (a.top_k[i] == 1) return top;
        const bool filtered = (a.top_k[i] > 0 && a.top_k[i] < v) || a.top_p[i] < 1.0f;
        const Kept kept{filtered ? selector.find(row, v, most, a.top_k[i], a.top_p[i]) : kNoBound, log_one(a.min_p[i])};
        return draw(load, v, most, top, kept, NoiseStream(a.seeds[i], a.positions[i]));
    });
}

template <class T>
void sample_rows(const SampleArgs& a) {
    parallel_tasks(a.rows, threads_for(a.rows * a.vocabulary, kRowGrain, a.threads), [&](const Tasks& take) {
        Selector<T> selector;
        for (int64_t i = take(); i < a.rows; i = take()) a.out[i] = a.vocabulary > 0 ? sample_row(a, i, selector) : -1;
    });
}

}  // namespace

void sample(const SampleArgs* args) {
    args->dtype == kBFloat16 ? sample_rows<uint16_t>(*args) : sample_rows<float>(*args);
}

}  // namespace aok::AOK_NS
