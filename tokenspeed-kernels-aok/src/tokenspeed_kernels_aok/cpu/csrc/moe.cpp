// route and experts: the choice of experts, and their weighted sum (docs/design/bits.md, rules 9 and 10).
//
// Every projection of an expert goes through the kernel `gemm`, strip of columns by strip of columns, so a row's bits are
// those of gemm.linear whatever other rows chose the same expert. An expert that nobody chose is not read.
#include "kernels.h"
#include "math.h"
#include "memory.h"
#include "panels.h"
#include "parallel.h"
#include "simd.h"

namespace aok::AOK_NS {
namespace {

constexpr int64_t kSumLanes = 64;

// A float as an integer of the same order: equal zeros are equal, NaN is above everything.
AOK_INLINE int32_t order_key(float value) {
    if (value != value) return INT32_MAX;
    const int32_t bits = static_cast<int32_t>(float_bits(value + 0.0f));
    return bits < 0 ? static_cast<int32_t>(0x80000000u - static_cast<uint32_t>(bits)) : bits;
}

// The best of what was offered, best first; of equal keys the one that was offered first.
struct Best {
    int32_t* keys;
    int32_t* ids;
    int64_t capacity, count = 0;

    AOK_MEMBER void offer(int32_t key, int64_t id) {
        if (count == capacity && key <= keys[count - 1]) return;
        int64_t at = count < capacity ? count++ : capacity - 1;
        for (; at > 0 && keys[at - 1] < key; --at) {
            keys[at] = keys[at - 1];
            ids[at] = ids[at - 1];
        }
        keys[at] = key;
        ids[at] = static_cast<int32_t>(id);
    }
};

// Space for one token, padded to whole vectors.
struct RouteSpace {
    Array<float> logits, scores, choice;
    Array<int32_t> keys, group_keys, group_ids;
    Array<char> kept;

    explicit RouteSpace(const RouteArgs& a)
        : logits(round_up(a.experts, kSumLanes)),
          scores(round_up(a.experts, kSumLanes)),
          choice(round_up(a.experts, kSumLanes)),
          keys(a.top_k),
          group_keys(a.groups),
          group_ids(a.groups),
          kept(a.groups) {}
};

// exp(x - max) into `scores`, and their sum in 64 lanes, folded by halves.
AOK_INLINE float exponentials(const float* x, float* scores, int64_t n, float most) {
    Vec lanes[4] = {zero(), zero(), zero(), zero()};
    for (int64_t i = 0; i < n; i += kLanes) {
        const int64_t count = smaller(n - i, kLanes);
        const Vec e = select(first_lanes(count), exp_nonpositive(sub(load(x + i, count), set1(most))), zero());
        store_raw(scores + i, e);
        lanes[i / kLanes % 4] = add(lanes[i / kLanes % 4], e);
    }
    return fold(add(add(lanes[0], lanes[2]), add(lanes[1], lanes[3])));
}

// The largest element; NaN when there is one.
AOK_INLINE float maximum(const float* x, int64_t n) {
    int64_t best = 0;
    for (int64_t i = 1; i < n; ++i) {
        if (order_key(x[i]) > order_key(x[best])) best = i;
    }
    return x[best];
}

AOK_INLINE float quotient(float a, float b) {
    alignas(64) float lane[kLanes];
    store(lane, div(set1(a), set1(b)));
    return lane[0];
}

AOK_INLINE void softmax(const float* x, float* scores, int64_t n) {
    const Vec total = set1(exponentials(x, scores, n, maximum(x, n)));
    for (int64_t i = 0; i < n; i += kLanes) store(scores + i, div(load(scores + i), total));
}

AOK_INLINE void sigmoid(const float* x, float* scores, int64_t n) {
    for (int64_t i = 0; i < n; i += kLanes) {
        const Vec e = exp(neg(load(x + i, smaller(n - i, kLanes))));
        store(scores + i, div(set1(1.0f), add(set1(1.0f), e)));
    }
}

// Marks the groups whose two best experts add up to most.
AOK_INLINE void keep_groups(const RouteArgs& a, const RouteSpace& space) {
    const int64_t size = a.experts / a.groups;
    Best best{space.group_keys.data(), space.group_ids.data(), a.top_groups};
    for (int64_t g = 0; g < a.groups; ++g) {
        int32_t keys[2], ids[2];
        Best two{keys, ids, 2};
        for (int64_t e = g * size; e < (g + 1) * size; ++e) two.offer(order_key(space.choice[e]), e);
        best.offer(order_key(space.choice[ids[0]] + space.choice[ids[1]]), g);
        space.kept[g] = 0;
    }
    for (int64_t i = 0; i < best.count; ++i) space.kept[best.ids[i]] = 1;
}

// Weights of the chosen, whose scores are given: over their sum in slot order, times the scale.
AOK_INLINE void finish_weights(const RouteArgs& a, float* weights) {
    if (a.normalise) {
        float total = 0.0f;
        for (int64_t j = 0; j < a.top_k; ++j) total += weights[j];
        total += 1e-20f;
        for (int64_t j = 0; j < a.top_k; ++j) weights[j] = quotient(weights[j], total);
    }
    const float scale = static_cast<float>(a.scale);
    for (int64_t j = 0; j < a.top_k; ++j) {
        const float weight = weights[j] * scale;
        weights[j] = weight == weight ? weight : bits_float(kCanonicalNaN);
    }
}

template <class T>
AOK_INLINE void route_token(const RouteArgs& a, const RouteSpace& space, int64_t token) {
    const T* row = static_cast<const T*>(a.logits) + token * a.row_stride;
    float* logits = space.logits.data();
    float* scores = space.scores.data();
    const float* choice = scores;
    for (int64_t i = 0; i < a.experts; i += kLanes) {
        const int64_t n = smaller(a.experts - i, kLanes);
        store_raw(logits + i, load_as_float(row + i, n));
    }
    float* weights = a.weights + token * a.top_k;
    Best best{space.keys.data(), a.ids + token * a.top_k, a.top_k};
    if (a.fused) {
        for (int64_t e = 0; e < a.experts; ++e) best.offer(order_key(logits[e]), e);
        if (a.normalise) {
            for (int64_t j = 0; j < a.top_k; ++j) space.choice[j] = logits[best.ids[j]];
            exponentials(space.choice.data(), scores, a.top_k, space.choice[0]);
            for (int64_t j = 0; j < a.top_k; ++j) weights[j] = scores[j];
        } else {
            softmax(logits, scores, a.experts);
            for (int64_t j = 0; j < a.top_k; ++j) weights[j] = scores[best.ids[j]];
        }
        return finish_weights(a, weights);
    }
    a.sigmoid ? sigmoid(logits, scores, a.experts) : softmax(logits, scores, a.experts);
    if (a.bias) {
        for (int64_t i = 0; i < a.experts; i += kLanes) {
            const int64_t n = smaller(a.experts - i, kLanes);
            store(space.choice.data() + i, add(load(scores + i), load(a.bias + i, n)));
        }
        choice = space.choice.data();
    } else if (a.groups > 1) {
        std::memcpy(space.choice.data(), scores, static_cast<size_t>(a.experts) * sizeof(float));
    }
    if (a.groups > 1) keep_groups(a, space);
    const int64_t size = a.experts / a.groups;
    for (int64_t e = 0; e < a.experts; ++e) {
        if (a.groups == 1 || space.kept[e / size]) best.offer(order_key(choice[e]), e);
    }
    for (int64_t j = 0; j < a.top_k; ++j) weights[j] = scores[best.ids[j]];
    finish_weights(a, weights);
}

template <class T>
void route_tokens(const RouteArgs& a) {
    constexpr int64_t share = 8;  // tokens that share the space of one task
    const int64_t threads = threads_for(a.tokens * a.experts, 1 << 12, a.threads);
    parallel_for(ceil_div(a.tokens, share), threads, [&](int64_t part) {
        const RouteSpace space(a);
        for (int64_t t = part * share; t < smaller(a.tokens, (part + 1) * share); ++t) route_token<T>(a, space, t);
    });
}

// The rows of x sorted by the expert they go to: row `begin[e] + i` of expert e is slot `source[begin[e] + i]`, which is
// token * top_k + j; `place` is the inverse, and -1 for a slot that has no expert.
struct Assignment {
    Array<int64_t> begin, source, place, used;
    int64_t rows = 0, used_count = 0;

    explicit Assignment(const ExpertsArgs& a)
        : source(a.tokens * a.top_k), place(a.tokens * a.top_k), used(smaller(a.experts, a.tokens * a.top_k)) {
        begin.allocate_zeroed(a.experts + 1);
        const int64_t slots = a.tokens * a.top_k;
        for (int64_t s = 0; s < slots; ++s) {
            if (a.ids[s] < a.experts) ++begin[a.ids[s] + 1];
        }
        for (int64_t e = 0; e < a.experts; ++e) {
            if (begin[e + 1]) used[used_count++] = e;
            begin[e + 1] += begin[e];
        }
        rows = begin[a.experts];
        Array<int64_t> next(a.experts);
        std::memcpy(next.data(), begin.data(), static_cast<size_t>(a.experts) * sizeof(int64_t));
        for (int64_t s = 0; s < slots; ++s) {
            place[s] = a.ids[s] < a.experts ? next[a.ids[s]]++ : -1;
            if (place[s] >= 0) source[place[s]] = s;
        }
    }
};

// Columns of a task, of `columns` in all: wide strips keep memory streaming, narrow ones keep every thread busy.
AOK_INLINE int64_t strip_width(int64_t columns, int64_t threads) {
    constexpr int64_t least = 128, most = 512, tasks_per_thread = 4;
    return smaller(larger(columns / (threads * tasks_per_thread) / least * least, least), most);
}

// y[row, :] = x[row, :] times the transpose of the weight of the row's expert: a task for each strip of columns of each
// expert that has rows.
void project(const ExpertsArgs& a, const Assignment& assigned, const void* x, const void* weight, int64_t expert_bytes,
             int64_t n, int64_t k, void* y) {
    const int64_t x_size = a.x_dtype == kBFloat16 ? 2 : 4, weight_size = a.weight_dtype == kBFloat16 ? 2 : 4;
    const int64_t threads = threads_for(assigned.rows * n * k, 1 << 18, a.threads);
    const int64_t strip = strip_width(assigned.used_count * n, threads);
    const int64_t strips = ceil_div(n, strip);
    parallel_tasks(assigned.used_count * strips, threads, [&](const auto& take) {
        for (int64_t task = take(); task < assigned.used_count * strips; task = take()) {
            const int64_t expert = assigned.used[task / strips], column = task % strips * strip;
            const int64_t first = assigned.begin[expert], rows = assigned.begin[expert + 1] - first;
            const GemmArgs call = {
                static_cast<const char*>(x) + first * k * x_size,
                static_cast<const char*>(weight) + expert * expert_bytes +
                    column / kPanel * panel_stride(k) * weight_size,
                nullptr,
                static_cast<char*>(y) + (first * n + column) * x_size,
                1, rows, k, smaller(n - column, strip),
                0, k, 0, n, 0,
                a.x_dtype, a.weight_dtype, 1,
            };
            gemm(&call);
        }
    });
}

// out = sum over the slots in their order, from +0: total + (weight * output), each product and each sum rounded.
template <class T>
void combine(const ExpertsArgs& a, const Assignment& assigned, const T* outputs) {
    parallel_for(a.tokens, threads_for(a.tokens * a.top_k * a.hidden, 1 << 15, a.threads), [&](int64_t t) {
        const T* own = static_cast<const T*>(a.x) + t * a.x_row_stride;
        T* out = static_cast<T*>(a.out) + t * a.hidden;
        for (int64_t i = 0; i < a.hidden; i += kLanes) {
            const int64_t n = smaller(a.hidden - i, kLanes);
            Vec total = zero();
            for (int64_t s = t * a.top_k; s < (t + 1) * a.top_k; ++s) {
                const T* y = assigned.place[s] < 0 ? own : outputs + assigned.place[s] * a.hidden;
                total = add(total, mul(set1(a.weights[s]), load_as_float(y + i, n)));
            }
            store_rounded(out + i, total, n);
        }
    });
}

template <class T>
void run_experts(const ExpertsArgs& a) {
    const Assignment assigned(a);
    const Array<T> x(assigned.rows * a.hidden), gate_up(assigned.rows * 2 * a.intermediate);
    const Array<T> middle(assigned.rows * a.intermediate), outputs(assigned.rows * a.hidden);
    parallel_for(assigned.rows, threads_for(assigned.rows * a.hidden, 1 << 17, a.threads), [&](int64_t row) {
        const T* from = static_cast<const T*>(a.x) + assigned.source[row] / a.top_k * a.x_row_stride;
        std::memcpy(x.data() + row * a.hidden, from, static_cast<size_t>(a.hidden) * sizeof(T));
    });
    project(a, assigned, x.data(), a.gate_up, a.gate_up_bytes, 2 * a.intermediate, a.hidden, gate_up.data());
    const SiluArgs act = {gate_up.data(), middle.data(), assigned.rows, a.intermediate, 2 * a.intermediate, a.x_dtype,
                          a.threads};
    silu_and_mul(&act);
    project(a, assigned, middle.data(), a.down, a.down_bytes, a.hidden, a.intermediate, outputs.data());
    combine(a, assigned, outputs.data());
}

}  // namespace

void route(const RouteArgs* a) { a->dtype == kBFloat16 ? route_tokens<uint16_t>(*a) : route_tokens<float>(*a); }

void experts(const ExpertsArgs* a) {
    a->x_dtype == kBFloat16 ? run_experts<uint16_t>(*a) : run_experts<float>(*a);
}

}  // namespace aok::AOK_NS
