// Sparse attention: index_scores, index_topk and sparse_attention (docs/design/bits.md, rules 12 to 14).
#include "kernels.h"
#include "latent_attention.h"
#include "radix.h"

namespace aok::AOK_NS {
namespace {

// Columns of a row of scores that one task computes.
constexpr int64_t kScored = 256;
constexpr int64_t kPagesScored = kScored / kPageSlots;

// The sequence of each query, or -1 behind the last of them.
template <class Args>
void find_sequences(const Args& a, Array<int32_t>& sequences) {
    sequences.allocate(a.tokens);
    for (int64_t t = 0; t < a.tokens; ++t) sequences[t] = -1;
    for (int64_t b = 0; b < a.sequences; ++b) {
        for (int64_t t = a.query_starts[b]; t < a.query_starts[b + 1]; ++t) sequences[t] = static_cast<int32_t>(b);
    }
}

// Space of one thread for the scores of a query: a group of 16 heads at a time.
struct ScoreSpace {
    Array<float> query, products, sums;
    explicit ScoreSpace(int64_t words) : query(words * kLanes), products(kScored * kLanes), sums(kScored * kLanes) {}
};

// Scores of positions [first, first + count) for query t of sequence b; the query sees them all.
template <class T>
void score_span(const IndexScoresArgs& a, int64_t t, int64_t b, int64_t first, int64_t count, const ScoreSpace& space,
                float* out) {
    const T* pages[kPagesScored];
    const int64_t span = ceil_div(count, kPageSlots);
    for (int64_t p = 0; p < span; ++p) pages[p] = page_of<T>(a, b, first / kPageSlots + p);
    for (int64_t i = 0; i < span * kPageSlots; ++i) store_raw(space.sums.data() + i * kLanes, zero());
    const Vec scale = set1(static_cast<float>(a.scale));
    for (int64_t head = 0; head < a.heads; head += kLanes) {
        const int64_t heads = smaller(kLanes, a.heads - head);
        const T* query = static_cast<const T*>(a.q) + t * a.q_token_stride;
        load_rows<T>([&](int64_t r) { return query + (head + smaller(r, heads - 1)) * a.q_head_stride; }, a.width,
                     space.query.data());
        const Vec weight = load(a.weights + t * a.weight_row_stride + head, heads);
        const Mask real = first_lanes(heads);
        for (int64_t i = 0; i < span * kPageSlots; i += kKeys) {
            const T* keys = pages[i / kPageSlots] + i % kPageSlots * a.width;
            score_keys<T>(space.query.data(), [&](int s) { return keys + s * a.width; }, a.width, scale,
                          space.products.data());
            for (int s = 0; s < kKeys; ++s) {
                const Vec product = load(space.products.data() + s * kLanes);
                const Vec positive = select(lt(product, zero()), zero(), product);
                float* sum = space.sums.data() + (i + s) * kLanes;
                // A lane without a head keeps its +0, whatever the key holds.
                store_raw(sum, select(real, fma(weight, positive, load(sum)), load(sum)));
            }
        }
    }
    for (int64_t i = 0; i < count; ++i) {
        const float sum = fold(load(space.sums.data() + i * kLanes));
        out[i] = sum != sum ? bits_float(kCanonicalNaN) : sum;
    }
}

template <class T>
void score(const IndexScoresArgs& a) {
    Array<int32_t> sequences;
    find_sequences(a, sequences);
    const int64_t spans = ceil_div(a.columns, kScored);
    parallel_tasks(a.tokens * spans, a.threads, [&](const auto& take) {
        const ScoreSpace space(Words<T>::count(a.width));
        for (int64_t i = take(); i < a.tokens * spans; i = take()) {
            const int64_t t = i / spans, first = i % spans * kScored, b = sequences[t];
            const int64_t seen = b < 0 ? 0 : a.context_lens[b] - a.query_starts[b + 1] + t + 1;
            const int64_t end = smaller(a.columns, first + kScored), last = larger(first, smaller(seen, end));
            float* out = a.scores + t * a.columns;
            if (last > first) score_span<T>(a, t, b, first, last - first, space, out + first);
            for (int64_t column = last; column < end; ++column) out[column] = -kInfinity;
        }
    });
}

// A float as an integer that is smaller the better it is: NaN first, then falling values; equal zeros are equal.
AOK_INLINE uint32_t rank_key(float value) {
    if (value != value) return 0;
    const uint32_t bits = float_bits(value + 0.0f);
    return (bits & 0x80000000u) != 0 ? bits : 0x7fffffffu - bits;
}

struct ChoiceSpace {
    Array<uint32_t> keys, best_keys, other_keys;
    Array<int32_t> other;
    ChoiceSpace(int64_t columns, int64_t k) : keys(columns), best_keys(k), other_keys(k), other(k) {}
};

void choose(const IndexTopkArgs& a, int64_t t, const ChoiceSpace& space) {
    const float* scores = a.scores + t * a.row_stride;
    int32_t* best = a.indices + t * a.top_k;
    const int64_t n = smaller(larger(a.positions[t] + 1, 0), a.columns);
    for (int64_t i = 0; i < n; ++i) space.keys[i] = rank_key(scores[i]);
    Kth bound{UINT32_MAX, n};
    if (n > a.top_k) bound = kth_smallest(space.keys.data(), n, a.top_k);
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t key = space.keys[i];
        if (key < bound.key || (key == bound.key && bound.ties-- > 0)) {
            space.best_keys[count] = key;
            best[count++] = static_cast<int32_t>(i);
        }
    }
    radix_sort(space.best_keys.data(), best, space.other_keys.data(), space.other.data(), count, 32);
    for (int64_t i = count; i < a.top_k; ++i) best[i] = -1;
}

// A query is a unit; it meets the entries that were selected for it, in the order of a list.
template <class T>
class Selections {
public:
    using Args = SparseAttentionArgs;
    struct Chunk {
        const T* entries[kChunk];
        AOK_MEMBER const T* at(int64_t page, int64_t slot) const { return entries[page * kPageSlots + slot]; }
    };

    explicit Selections(const Args& args) : a_(args), list_(args.tokens * args.selected), counts_(args.tokens) {
        find_sequences(a_, sequences_);
        parallel_tasks(a_.tokens, threads_for(a_.tokens * a_.selected, 1 << 12, a_.threads), [&](const auto& take) {
            const Array<uint32_t> space(a_.selected);
            for (int64_t t = take(); t < a_.tokens; t = take()) list(t, space);
        });
    }
    const Args& args() const { return a_; }
    int64_t units() const { return a_.query_starts[a_.sequences]; }
    int64_t first_query(int64_t t) const { return t; }
    int64_t queries(int64_t) const { return 1; }
    int64_t visible(int64_t t, int64_t) const { return counts_[t]; }

    void load(int64_t t, int64_t c, int64_t count, Chunk& chunk) const {
        const uint32_t* positions = list_.data() + t * a_.selected + c * kChunk;
        for (int64_t i = 0; i < count; ++i) {
            chunk.entries[i] = page_of<T>(a_, sequences_[t], positions[i] / kPageSlots) + positions[i] % kPageSlots * a_.width;
        }
        for (int64_t i = count; i < round_up(count, kPageSlots); ++i) chunk.entries[i] = chunk.entries[count - 1];
    }

private:
    void list(int64_t t, const Array<uint32_t>& space) const {
        const int32_t* indices = a_.indices + t * a_.index_row_stride;
        uint32_t* positions = list_.data() + t * a_.selected;
        const int64_t length = sequences_[t] < 0 ? 0 : a_.context_lens[sequences_[t]];
        int64_t count = 0;
        for (; count < a_.selected && indices[count] >= 0 && length > 0; ++count) {
            if (indices[count] >= length) {
                __atomic_store_n(a_.invalid, 1, __ATOMIC_RELAXED);
                count = 0;
                break;
            }
            positions[count] = static_cast<uint32_t>(indices[count]);
        }
        counts_[t] = count;
        int bits = kDigitBits;
        while (bits < 32 && length >> bits != 0) bits += kDigitBits;
        if (a_.sorted) radix_sort(positions, nullptr, space.data(), nullptr, count, bits);
    }

    const Args& a_;
    const Array<uint32_t> list_;
    const Array<int64_t> counts_;
    Array<int32_t> sequences_;
};

template <class T>
void attend(const SparseAttentionArgs& a) {
    const int64_t row = a.heads * a.latent, used = a.query_starts[a.sequences];
    std::memset(static_cast<T*>(a.out) + used * row, 0, static_cast<size_t>((a.tokens - used) * row) * sizeof(T));
    const Selections<T> selections(a);
    LatentAttention<T, Selections<T>>(selections).run();
}

}  // namespace

void index_scores(const IndexScoresArgs* a) {
    if (!sequences_fit(*a)) {
        *a->invalid = 1;
        return;
    }
    a->dtype == kBFloat16 ? score<uint16_t>(*a) : score<float>(*a);
}

void index_topk(const IndexTopkArgs* args) {
    const IndexTopkArgs& a = *args;
    parallel_tasks(a.tokens, threads_for(a.tokens * a.columns, 1 << 11, a.threads), [&](const auto& take) {
        const ChoiceSpace space(a.columns, a.top_k);
        for (int64_t t = take(); t < a.tokens; t = take()) choose(a, t, space);
    });
}

void sparse_attention(const SparseAttentionArgs* a) {
    if (!sequences_fit(*a)) {
        *a->invalid = 1;
        return;
    }
    a->dtype == kBFloat16 ? attend<uint16_t>(*a) : attend<float>(*a);
}

}  // namespace aok::AOK_NS
