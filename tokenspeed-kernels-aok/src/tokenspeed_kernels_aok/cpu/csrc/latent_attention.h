// Attention over compressed entries that all heads share (docs/design/bits.md, rules 11 and 14).
//
// The order of additions is that of attention.paged with one key/value head whose values are the first columns of its keys.
// Here the lanes of a vector are 16 rows, a row being one (query, head) pair: every sum of a row stays in its lane, keys
// are broadcast from the cache as they lie, and one pass over an entry serves all heads.
#pragma once

#include "key_scores.h"
#include "math.h"
#include "memory.h"
#include "parallel.h"
#include "simd.h"

namespace aok::AOK_NS {

constexpr int64_t kChunk = 256;  // part of the bit order
constexpr int64_t kPagesOfChunk = kChunk / kPageSlots;

// Rows x vectors of columns of a tile of values.
#if defined(AOK_ISA_avx512f) || defined(AOK_ISA_avx512_bf16)
constexpr int kRows = 6, kColumns = 4;
#elif defined(AOK_ISA_avx2)
constexpr int kRows = 3, kColumns = 2;
#else
constexpr int kRows = 2, kColumns = 1;
#endif

// Up to 16 rows of one unit, and the chunks that they see.
struct Block {
    int64_t unit, first_row, rows, chunks;
    int64_t partial;  // where the results of its chunks begin, in chunks
};

// What is kept of the chunks so far, or of one chunk: rows are lanes.
struct State {
    float* maximum;  // [16]
    float* sum;      // [16]
    float* output;   // [16][padded latent]
};

// What is done to the output of each row when a chunk joins the state.
struct Join {
    alignas(64) float old_factor[kLanes], new_factor[kLanes];
    bool first[kLanes];
};

// Attention of units of queries over entries in chunks of 256. `Source` knows which entries a query meets:
//
//   units(), first_query(u), queries(u)   groups of queries that meet the same entries, each perhaps only the first of them
//   visible(u, i)                         how many of them query i of unit u meets, rising with i
//   Chunk, load(u, c, count, chunk)       the addresses of the first `count` entries of chunk c; after them any others
template <class T, class Source>
class LatentAttention {
public:
    explicit LatentAttention(const Source& source)
        : source_(source),
          a_(source.args()),
          padded_(round_up(a_.latent, kLanes)),
          scale_(static_cast<float>(a_.scale * 1.4426950408889634)) {
        for (int64_t u = 0; u < source_.units(); ++u) block_count_ += ceil_div(rows_of(u), kLanes);
        blocks_.allocate(block_count_);
        int64_t next = 0;
        for (int64_t u = 0; u < source_.units(); ++u) {
            for (int64_t row = round_up(rows_of(u), kLanes) - kLanes; row >= 0; row -= kLanes) {
                const int64_t rows = smaller(kLanes, rows_of(u) - row);
                const int64_t chunks = ceil_div(source_.visible(u, (row + rows - 1) / a_.heads), kChunk);
                blocks_[next++] = {u, row, rows, chunks, chunk_count_};
                chunk_count_ += chunks;
            }
        }
    }

    void run() {
        // With few blocks the chunks are shared out, and folded afterwards by the same operations in the same order.
        if (a_.threads > 1 && block_count_ < 4 * a_.threads && chunk_count_ > block_count_) {
            run_chunks();
        } else {
            parallel_tasks(block_count_, a_.threads, [&](const auto& take) {
                Array<float> query(Words<T>::count(a_.width) * kLanes), scores(kChunk * kLanes), memory(state_floats());
                const State state = state_at(memory.data());
                for (int64_t i = take(); i < block_count_; i = take()) {
                    const Block& block = blocks_[i];
                    bool started[kLanes] = {};
                    load_query(block, query.data());
                    for (int64_t c = 0; c < block.chunks; ++c) {
                        compute(block, c, query.data(), scores.data(), state, started);
                    }
                    write(block, state);
                }
            });
        }
    }

private:
    using Chunk = typename Source::Chunk;

    int64_t rows_of(int64_t u) const { return source_.queries(u) * a_.heads; }
    int64_t state_floats() const { return kLanes * (padded_ + 2); }
    State state_at(float* p) const { return {p, p + kLanes, p + 2 * kLanes}; }

    void run_chunks() {
        const Array<float> partial(chunk_count_ * state_floats());
        Array<int64_t> block_of(chunk_count_);
        for (int64_t i = 0; i < block_count_; ++i) {
            for (int64_t c = 0; c < blocks_[i].chunks; ++c) block_of[blocks_[i].partial + c] = i;
        }
        parallel_tasks(chunk_count_, a_.threads, [&](const auto& take) {
            Array<float> query(Words<T>::count(a_.width) * kLanes), scores(kChunk * kLanes);
            int64_t loaded = -1;
            for (int64_t i = take(); i < chunk_count_; i = take()) {
                const Block& block = blocks_[block_of[i]];
                if (loaded != block_of[i]) load_query(block, query.data());
                loaded = block_of[i];
                bool started[kLanes] = {};
                compute(block, i - block.partial, query.data(), scores.data(), state_at(partial.data() + i * state_floats()),
                        started);
            }
        });
        parallel_for(block_count_, a_.threads, [&](int64_t i) {
            const Block& block = blocks_[i];
            const State state = state_at(partial.data() + block.partial * state_floats());
            bool started[kLanes];
            for (int64_t r = 0; r < kLanes; ++r) started[r] = r < block.rows && seen(block, r, 0) > 0;
            for (int64_t c = 1; c < block.chunks; ++c) {
                const State chunk = state_at(partial.data() + (block.partial + c) * state_floats());
                Join join;
                join_sums(block, c, load(chunk.maximum), load(chunk.sum), state, started, join);
                for (int64_t r = 0; r < block.rows; ++r) {
                    if (seen(block, r, c) == 0) continue;
                    for (int64_t i0 = r * padded_; i0 < (r + 1) * padded_; i0 += kLanes) {
                        join_output(load(chunk.output + i0), state.output + i0, join, r);
                    }
                }
            }
            write(block, state);
        });
    }

    // Keys of chunk c that row r sees: the first so many.
    int64_t seen(const Block& block, int64_t r, int64_t c) const {
        const int64_t end = source_.visible(block.unit, (block.first_row + r) / a_.heads) - c * kChunk;
        return end < 0 ? 0 : smaller(end, kChunk);
    }

    const T* query_row(const Block& block, int64_t r) const {
        const int64_t row = block.first_row + r;
        const int64_t token = source_.first_query(block.unit) + row / a_.heads;
        return static_cast<const T*>(a_.q) + token * a_.q_token_stride + row % a_.heads * a_.q_head_stride;
    }

    void load_query(const Block& block, float* query) const {
        load_rows<T>([&](int64_t r) { return query_row(block, smaller(r, block.rows - 1)); }, a_.width, query);
    }

    // One chunk of a block, joined to the state.
    void compute(const Block& block, int64_t c, const float* query, float* scores, const State& state, bool* started) const {
        alignas(64) float limits[kLanes] = {};
        int64_t most = 0;
        for (int64_t r = 0; r < block.rows; ++r) {
            const int64_t count = seen(block, r, c);
            limits[r] = static_cast<float>(count);
            most = larger(most, count);
        }
        Chunk chunk;
        source_.load(block.unit, c, most, chunk);
        for (int64_t p = 0; p < ceil_div(most, kPageSlots); ++p) {
            for (int64_t first = 0; first < kPageSlots; first += kKeys) {
                score_keys<T>(query, [&](int s) { return chunk.at(p, first + s); }, a_.width, set1(scale_),
                              scores + (p * kPageSlots + first) * kLanes);
            }
        }
        const Vec limit = load(limits), nothing = set1(-kInfinity);
        Vec maximum = nothing;
        for (int64_t key = 0; key < most; ++key) {
            const Vec score = select(lt(set1(static_cast<float>(key)), limit), load(scores + key * kLanes), nothing);
            store_raw(scores + key * kLanes, score);
            maximum = max(score, maximum);
        }
        const Vec base = select(eq(maximum, nothing), zero(), maximum);
        Vec lanes[kLanes];
        for (int i = 0; i < kLanes; ++i) lanes[i] = zero();
        for (int64_t key = 0; key < most; ++key) {
            const Vec weight = exp2_nonpositive(sub(load(scores + key * kLanes), base));
            store_raw(scores + key * kLanes, weight);
            lanes[key % kLanes] = add(lanes[key % kLanes], weight);
        }
        for (int half = kLanes / 2; half > 0; half /= 2) {
            for (int i = 0; i < half; ++i) lanes[i] = add(lanes[i], lanes[i + half]);
        }
        Join join;
        join_sums(block, c, maximum, lanes[0], state, started, join);
        for (int64_t r = 0; r < block.rows;) {
            // Rows of one query see the same keys.
            const int64_t of_query = smaller(a_.heads - (block.first_row + r) % a_.heads, block.rows - r);
            const int64_t parts = ceil_div(of_query, kRows);
            for (int64_t part = 0; part < parts; ++part) {
                const int64_t begin = of_query * part / parts, end = of_query * (part + 1) / parts;
                weigh_rows(chunk, scores + r + begin, seen(block, r, c), end - begin, r + begin, state, join);
            }
            r += of_query;
        }
    }

    // Maxima and sums of a chunk joined to the state; rows that see nothing of the chunk keep theirs.
    void join_sums(const Block& block, int64_t c, Vec maximum, Vec sum, const State& state, bool* started, Join& join) const {
        alignas(64) float maxima[kLanes], sums[kLanes], joined_maxima[kLanes], joined_sums[kLanes];
        bool first_of_all = true;
        for (int64_t r = 0; r < block.rows; ++r) first_of_all = first_of_all && !started[r];
        store_raw(maxima, maximum);
        store_raw(sums, sum);
        if (first_of_all) {
            store_raw(state.maximum, maximum);
            store_raw(state.sum, sum);
        } else {
            const Vec old_maximum = load(state.maximum);
            const Vec most = max(maximum, old_maximum);
            const Vec base = select(eq(most, set1(-kInfinity)), zero(), most);
            const Vec old_factor = exp2_nonpositive(sub(old_maximum, base));
            const Vec new_factor = exp2_nonpositive(sub(maximum, base));
            store_raw(join.old_factor, old_factor);
            store_raw(join.new_factor, new_factor);
            store_raw(joined_maxima, most);
            store_raw(joined_sums, fma(sum, new_factor, mul(load(state.sum), old_factor)));
        }
        for (int64_t r = 0; r < block.rows; ++r) {
            join.first[r] = !started[r];
            if (seen(block, r, c) == 0) continue;
            state.maximum[r] = started[r] ? joined_maxima[r] : maxima[r];
            state.sum[r] = started[r] ? joined_sums[r] : sums[r];
            started[r] = true;
        }
    }

    AOK_MEMBER static void join_output(Vec chunk, float* output, const Join& join, int64_t r) {
        const Vec joined = join.first[r] ? chunk
                                         : fma(chunk, set1(join.new_factor[r]), mul(load(output), set1(join.old_factor[r])));
        store_raw(output, joined);
    }

    // output[row][column] joined with sum over the first `keys` keys of weight * value, in ascending order.
    template <int R, int V>
    AOK_INLINE void weigh(const Chunk& chunk, const float* weights, int64_t keys, int64_t column, int64_t count,
                          int64_t padded, int64_t row, const State& state, const Join& join) {
        Vec acc[R][V];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) acc[r][v] = zero();
        }
        for (int64_t page = 0; page * kPageSlots < keys; ++page) {
            const int64_t slots = smaller(kPageSlots, keys - page * kPageSlots);
            const float* weight = weights + page * kPageSlots * kLanes;
            for (int64_t s = 0; s < slots; ++s, weight += kLanes) {
                const T* value = chunk.at(page, s) + column;
                Vec values[V];
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) {
                    values[v] = V == 1 ? load_as_float(value, count) : load_as_float(value + v * kLanes);
                }
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const Vec one = set1(weight[r]);
#pragma GCC unroll 8
                    for (int v = 0; v < V; ++v) acc[r][v] = fma(one, values[v], acc[r][v]);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) {
                join_output(acc[r][v], state.output + (row + r) * padded + column + v * kLanes, join, row + r);
            }
        }
    }

    template <int R>
    void weigh_columns(const Chunk& chunk, const float* weights, int64_t keys, int64_t row, const State& state,
                       const Join& join) const {
        int64_t column = 0;
        if constexpr (kColumns > 1) {
            for (; column + kColumns * kLanes <= a_.latent; column += kColumns * kLanes) {
                weigh<R, kColumns>(chunk, weights, keys, column, kLanes, padded_, row, state, join);
            }
        }
        for (; column < a_.latent; column += kLanes) {
            const int64_t count = smaller(a_.latent - column, kLanes);
            weigh<R, 1>(chunk, weights, keys, column, count, padded_, row, state, join);
        }
    }

    void weigh_rows(const Chunk& chunk, const float* weights, int64_t keys, int64_t rows, int64_t row,
                    const State& state, const Join& join) const {
        if (keys == 0) return;
        with_rows<kRows>(rows, [&](auto r) { weigh_columns<decltype(r)::value>(chunk, weights, keys, row, state, join); });
    }

    template <int N>
    struct Constant {
        static constexpr int value = N;
    };
    template <int MAX, class F>
    static void with_rows(int64_t n, const F& f) {
        if constexpr (MAX > 1) {
            if (n < MAX) return with_rows<MAX - 1>(n, f);
        }
        f(Constant<MAX>{});
    }

    void write(const Block& block, const State& state) const {
        for (int64_t r = 0; r < block.rows; ++r) {
            const int64_t row = block.first_row + r;
            const int64_t token = source_.first_query(block.unit) + row / a_.heads;
            T* out = static_cast<T*>(a_.out) + (token * a_.heads + row % a_.heads) * a_.latent;
            if (block.chunks == 0) {
                std::memset(out, 0, static_cast<size_t>(a_.latent) * sizeof(T));
                continue;
            }
            const Vec sum = set1(state.sum[r]);
            for (int64_t i = 0; i < a_.latent; i += kLanes) {
                const Vec y = div(load(state.output + r * padded_ + i), sum);
                store_rounded(out + i, y, smaller(a_.latent - i, kLanes));
            }
        }
    }

    const Source& source_;
    const typename Source::Args& a_;
    const int64_t padded_;
    const float scale_;  // times log2(e)
    int64_t block_count_ = 0, chunk_count_ = 0;
    Array<Block> blocks_;
};

// Whether query_starts rise from 0 to at most the queries there are, and every context holds its queries and has pages.
template <class Args>
AOK_INLINE bool sequences_fit(const Args& a) {
    if (a.query_starts[0] != 0 || a.query_starts[a.sequences] > a.tokens) return false;
    for (int64_t b = 0; b < a.sequences; ++b) {
        const int64_t queries = a.query_starts[b + 1] - a.query_starts[b];
        if (queries < 0 || a.context_lens[b] < queries) return false;
        if (ceil_div(a.context_lens[b], kPageSlots) > a.page_table_width) return false;
    }
    return true;
}

// The page of 16 positions of sequence b; page 0, and `invalid` set, where the table names one that is not there.
template <class T, class Args>
AOK_INLINE const T* page_of(const Args& a, int64_t b, int64_t index) {
    int64_t page = a.page_tables[b * a.page_table_stride + index];
    if (page < 0 || page >= a.pages) {
        __atomic_store_n(a.invalid, 1, __ATOMIC_RELAXED);
        page = 0;
    }
    return static_cast<const T*>(a.cache) + page * a.page_stride;
}

}  // namespace aok::AOK_NS
