// attention.paged: causal attention of ragged queries over the paged cache. The order of additions is that of
// docs/design/bits.md; everything else here (tiles, units, threads, prefetches) only decides speed.
#include "attention_plan.h"
#include "attention_softmax.h"
#include "attention_tile.h"
#include "kernels.h"
#include "parallel.h"

namespace aok::AOK_NS {
namespace {

// The pages of one chunk of one sequence and head.
template <class T>
struct Chunk {
    const uint32_t* keys[kChunkPages];
    const T* values[kChunkPages];
};

// What one thread needs while it computes a unit of up to `rows` rows, all heads taken together.
template <class T>
struct Workspace {
    Workspace(int64_t rows, int64_t d, int64_t padded_d)
        : query((2 * rows + kBlockRows) * QueryWords<T>::words(d)), scores(kBlockRows * kScoreStride),
          chunk_output(kScoreRows * padded_d), output(rows * padded_d), maximum(rows), sum(rows), started(rows) {}

    Array<uint32_t> query;      // [heads][blocks][words][stride]
    Array<float> scores;        // [kBlockRows][kScoreStride], then exp2 of the scaled differences
    Array<float> chunk_output;  // [kScoreRows][padded_d]
    Array<float> output;        // [rows][padded_d]
    Array<float> maximum, sum;  // [rows]
    Array<bool> started;        // [rows]: some chunk was folded in
};

template <class T>
class Attention {
public:
    explicit Attention(const AttentionArgs& args)
        : a_(args), plan_(args), group_size_(args.q_heads / args.kv_heads), padded_d_(round_up(args.d, kColumnBlock)),
          scale_(static_cast<float>(args.scale * 1.4426950408889634)), partial_(plan_.partial_size()) {}

    void run() {
        parallel_tasks(plan_.units(), a_.threads, [&](const Tasks& take) {
            Workspace<T> w(plan_.max_rows(), a_.d, padded_d_);
            for (int64_t i = take(); i < plan_.units(); i = take()) {
                const int64_t likely = smaller(take.peek(), plan_.units() - 1);
                compute(w, plan_.unit(i), plan_.unit(likely));
            }
        });
        if (plan_.partial_size() == 0) return;
        parallel_tasks(plan_.groups(), a_.threads, [&](const Tasks& take) {
            Workspace<T> w(plan_.max_rows(), a_.d, padded_d_);
            for (int64_t i = take(); i < plan_.groups(); i = take()) {
                if (plan_.group(i).partial >= 0) fold_partials(w, plan_.group(i));
            }
        });
    }

private:
    int64_t partial_stride(const Group& g) const { return round_up(partial_floats(g.all_rows(), padded_d_), kLanes); }
    int64_t query_of(const Group& g, int64_t row) const { return (g.first_row + row) / group_size_; }
    int64_t token_of(const Group& g, int64_t row) const { return a_.query_starts[g.sequence] + query_of(g, row); }
    int64_t head_of(const Group& g, int64_t head, int64_t row) const {
        return (g.first_head + head) * group_size_ + (g.first_row + row) % group_size_;
    }

    void locate(const Group& g, int64_t head, int64_t chunk, Chunk<T>& out) const {
        const int64_t first = chunk * kChunkPages;
        const int64_t pages = smaller(ceil_div(a_.context_lens[g.sequence], kPageSlots) - first, kChunkPages);
        const int32_t* table = a_.page_tables + g.sequence * a_.page_table_stride + first;
        const int64_t inside = (g.first_head + head) * kPageSlots * a_.d;
        for (int64_t p = 0; p < kChunkPages; ++p) {
            int64_t page = table[smaller(p, pages - 1)];
            if (page < 0 || page >= a_.pages) {
                __atomic_store_n(a_.invalid, 1, __ATOMIC_RELAXED);
                page = 0;
            }
            const T* keys = static_cast<const T*>(a_.k_cache) + page * a_.k_page_stride + inside;
            out.keys[p] = reinterpret_cast<const uint32_t*>(keys);
            out.values[p] = static_cast<const T*>(a_.v_cache) + page * a_.v_page_stride + inside;
        }
    }

    // Rows side by side in a block of query words.
    static int64_t query_stride(const Group& g) { return g.rows <= kScoreRows ? round_up(g.rows, 2) : kBlockRows; }
    int64_t query_block(const Group& g) const { return QueryWords<T>::words(a_.d) * query_stride(g); }
    int64_t query_head(const Group& g) const { return ceil_div(g.rows, kBlockRows) * query_block(g); }

    void load_queries(const Group& g, uint32_t* query) const {
        const int64_t words = QueryWords<T>::words(a_.d), stride = query_stride(g);
        for (int64_t head = 0; head < g.heads; ++head) {
            for (int64_t row = 0; row < g.rows; ++row) {
                const T* q = static_cast<const T*>(a_.q) + head_of(g, head, row) * a_.q_head_stride +
                             token_of(g, row) * a_.q_token_stride;
                uint32_t* to = query + head * query_head(g) + row / kBlockRows * query_block(g) + row % kBlockRows;
                for (int64_t j = 0; j < words; ++j) to[j * stride] = QueryWords<T>::word(q, j);
            }
        }
    }

    void compute(Workspace<T>& w, const Unit& unit, const Unit& likely_next) {
        const Group& g = plan_.group(unit.group);
        load_queries(g, w.query.data());
        std::memset(w.started.data(), 0, static_cast<size_t>(g.all_rows()));
        Chunk<T> now, ahead;
        locate(g, 0, unit.first_chunk, ahead);
        for (int64_t i = 0; i < unit.chunks; ++i) {
            const int64_t chunk = unit.first_chunk + i;
            float* partial = g.partial < 0 ? nullptr
                                           : partial_.data() + g.partial + (chunk - g.first_chunk) * partial_stride(g);
            for (int64_t head = 0; head < g.heads; ++head) {
                now = ahead;
                if (head + 1 < g.heads) {
                    locate(g, head + 1, chunk, ahead);
                } else if (i + 1 < unit.chunks) {
                    locate(g, 0, chunk + 1, ahead);
                } else {
                    locate(plan_.group(likely_next.group), 0, likely_next.first_chunk, ahead);
                }
                for (int64_t row = 0; row < g.rows; row += kBlockRows) {
                    const Block block{&g, head, row, smaller(kBlockRows, g.rows - row)};
                    compute_block(w, block, chunk, now, g.rows <= kScoreRows ? &ahead : nullptr, partial);
                }
            }
        }
        if (g.partial < 0) write_output(w, g);
    }

    // Rows [first, first + count) of one head of a group.
    struct Block {
        const Group* group;
        int64_t head, first, count;

        int64_t state(int64_t r) const { return head * group->rows + first + r; }  // of the unit's rows
    };

    // One chunk for the rows of a block, those that see some of it. `ahead` is what will be read next, or null.
    void compute_block(Workspace<T>& w, const Block& b, int64_t chunk, const Chunk<T>& now, const Chunk<T>* ahead,
                       float* partial) {
        const Group& g = *b.group;
        BlockSpans spans;
        int64_t seen_first = b.count, seen_end = 0;
        for (int64_t r = 0; r < b.count; ++r) {
            const Span keys = visible_keys(a_, g.sequence, query_of(g, b.first + r));
            spans.begin[r] = larger(keys.begin - chunk * kChunkKeys, 0);
            spans.end[r] = smaller(keys.end - chunk * kChunkKeys, kChunkKeys);
            if (spans.begin[r] >= spans.end[r]) continue;
            // Spans move forward with the query, so the rows that see something are neighbours.
            seen_first = smaller(seen_first, r);
            seen_end = r + 1;
        }
        alignas(64) float maximum[kBlockRows + kLanes], sum[kBlockRows + kLanes];
        alignas(64) float old_factor[kBlockRows + kLanes], new_factor[kBlockRows + kLanes];
        if (seen_first < seen_end) {
            const int64_t page_begin = spans.begin[seen_first] / kPageSlots;
            const int64_t page_end = ceil_div(spans.end[seen_end - 1], kPageSlots);
            const uint32_t* q = w.query.data() + b.head * query_head(g) + b.first / kBlockRows * query_block(g);
            score_block(q, query_stride(g), seen_first, seen_end, page_begin, page_end, now, ahead, w.scores.data());
            soften_block(w.scores.data(), spans, seen_first, seen_end, maximum, sum);
        }
        if (partial == nullptr) {
            fold_sums(w, b.state(0), seen_first, seen_end, maximum, sum, old_factor, new_factor);
        } else {
            store_sums(partial, g.all_rows(), b, seen_first, seen_end, maximum, sum);
        }
        for (int64_t tile = seen_first; tile < seen_end;) {
            const int64_t rows = tile_rows(seen_end - tile, kScoreRows);
            float* out = partial == nullptr
                             ? w.chunk_output.data()
                             : partial + 2 * round_up(g.all_rows(), kLanes) + b.state(tile) * padded_d_;
            std::memset(out, 0, static_cast<size_t>(rows * padded_d_) * sizeof(float));
            weigh_tile(now, ahead, w.scores.data(), spans, tile, rows, out);
            for (int64_t r = tile; partial == nullptr && r < tile + rows; ++r) {
                fold_output(w, b.state(r), out + (r - tile) * padded_d_, old_factor[r], new_factor[r]);
            }
            tile += rows;
        }
        for (int64_t r = seen_first; r < seen_end; ++r) w.started[b.state(r)] = true;
    }

    // Rows of the next tile when `left` remain: even tiles rather than a thin last one.
    static int64_t tile_rows(int64_t left, int64_t most) { return ceil_div(left, ceil_div(left, most)); }

    void score_block(const uint32_t* q, int64_t q_stride, int64_t row_begin, int64_t row_end, int64_t page_begin,
                     int64_t page_end, const Chunk<T>& now, const Chunk<T>* ahead, float* s) const {
        for (int64_t page = page_begin; page < page_end;) {
            const bool wide = page_end - page >= kScorePages;
            for (int64_t row = row_begin; row < row_end;) {
                const int64_t rows = tile_rows(row_end - row, kScoreRows);
                with_constant<kScoreRows>(rows, [&](auto n) {
                    const uint32_t* const* keys = now.keys + page;
                    float* to = s + row * kScoreStride + page * kPageSlots;
                    const uint32_t* const* more = ahead != nullptr ? ahead->keys + page : nullptr;
                    const auto score = [&](auto pages, auto prefetching) {
                        constexpr bool kAhead = prefetching.value != 0;
                        score_pages<T, n.value, pages.value, kAhead>(keys, more, q + row, q_stride, a_.d, scale_, to);
                    };
                    if (ahead != nullptr) {
                        wide ? score(Constant<kScorePages>{}, Constant<1>{}) : score(Constant<1>{}, Constant<1>{});
                    } else {
                        wide ? score(Constant<kScorePages>{}, Constant<0>{}) : score(Constant<1>{}, Constant<0>{});
                    }
                });
                row += rows;
            }
            page += wide ? kScorePages : 1;
        }
    }

    // (m, l) <- (m, l) + (chunk's m, l), and the factors by which the outputs follow.
    void fold_sums(Workspace<T>& w, int64_t first, int64_t begin, int64_t end, const float* maximum, const float* sum,
                   float* old_factor, float* new_factor) const {
        for (int64_t r = begin; r < end; ++r) {
            float& m = w.maximum[first + r];
            float& l = w.sum[first + r];
            if (!w.started[first + r]) {
                m = maximum[r];
                l = sum[r];
                old_factor[r] = new_factor[r] = 0.0f;
                continue;
            }
            const float most = m > maximum[r] ? m : maximum[r];
            const float base = most == -kInfinity ? 0.0f : most;
            old_factor[r] = m - base;
            new_factor[r] = maximum[r] - base;
            m = most;
        }
        for (int64_t r = begin; r < end; r += kLanes) {
            const int64_t n = smaller(end - r, kLanes);
            store(old_factor + r, exp2_nonpositive(load(old_factor + r, n)), n);
            store(new_factor + r, exp2_nonpositive(load(new_factor + r, n)), n);
        }
        for (int64_t r = begin; r < end; ++r) {
            float& l = w.sum[first + r];
            if (w.started[first + r]) l = fma_one(sum[r], new_factor[r], l * old_factor[r]);
        }
    }

    static void store_sums(float* partial, int64_t all_rows, const Block& b, int64_t begin, int64_t end,
                           const float* maximum, const float* sum) {
        float* to_maximum = partial + b.state(0);
        float* to_sum = to_maximum + round_up(all_rows, kLanes);
        for (int64_t r = 0; r < b.count; ++r) {
            const bool seen = r >= begin && r < end;
            to_maximum[r] = seen ? maximum[r] : 0.0f;
            to_sum[r] = seen ? sum[r] : -1.0f;  // a sum is never negative: this row does not see this chunk
        }
    }

    void fold_output(Workspace<T>& w, int64_t row, const float* chunk_output, float old_factor,
                     float new_factor) const {
        float* o = w.output.data() + row * padded_d_;
        if (!w.started[row]) {
            std::memcpy(o, chunk_output, static_cast<size_t>(padded_d_) * sizeof(float));
            return;
        }
        const Vec stay = set1(old_factor), join = set1(new_factor);
        for (int64_t c = 0; c < padded_d_; c += kLanes) {
            keep(o + c, fma(load(chunk_output + c), join, mul(load(o + c), stay)));
        }
    }

    // P V of one chunk for a tile of rows. The keys that all rows see go together; the others row by row, so that a
    // key which a row does not see touches nothing of it, not even as 0 * infinity.
    void weigh_tile(const Chunk<T>& now, const Chunk<T>* ahead, const float* p, const BlockSpans& spans, int64_t row,
                    int64_t rows, float* out) const {
        int64_t begin = spans.begin[row], end = spans.end[row];
        for (int64_t r = row + 1; r < row + rows; ++r) {
            begin = larger(begin, spans.begin[r]);
            end = smaller(end, spans.end[r]);
        }
        end = larger(begin, end);
        for (int64_t r = 0; r < rows; ++r) {
            weigh_rows(now, nullptr, p + (row + r) * kScoreStride, 1, spans.begin[row + r],
                       smaller(begin, spans.end[row + r]), out + r * padded_d_);
        }
        for (int64_t r = 0; r < rows;) {
            const int64_t n = tile_rows(rows - r, kValueRows);
            weigh_rows(now, r == 0 ? ahead : nullptr, p + (row + r) * kScoreStride, n, begin, end, out + r * padded_d_);
            r += n;
        }
        for (int64_t r = 0; r < rows; ++r) {
            weigh_rows(now, nullptr, p + (row + r) * kScoreStride, 1, larger(end, spans.begin[row + r]),
                       spans.end[row + r], out + r * padded_d_);
        }
    }

    void weigh_rows(const Chunk<T>& now, const Chunk<T>* ahead, const float* p, int64_t rows, int64_t begin,
                    int64_t end, float* out) const {
        if (begin >= end) return;
        with_constant<kValueRows>(rows, [&](auto n) {
            constexpr int kRows = n.value;
            constexpr int kMost = kValueRegisters / (2 * kRows);
            int64_t column = 0;
            const auto walk = [&](auto blocks) {
                while (a_.d - column >= blocks.value * kColumnBlock) {
                    weigh<kRows, blocks.value, true>(now, ahead, column, kLanes, p, begin, end, out);
                    column += blocks.value * kColumnBlock;
                }
            };
            if constexpr (kMost >= 4) walk(Constant<4>{});
            if constexpr (kMost >= 2) walk(Constant<2>{});
            walk(Constant<1>{});
            if (column < a_.d) weigh<kRows, 1, false>(now, nullptr, column, (a_.d - column) / 2, p, begin, end, out);
        });
    }

    template <int ROWS, int BLOCKS, bool WHOLE>
    void weigh(const Chunk<T>& now, const Chunk<T>* ahead, int64_t column, int64_t half, const float* p, int64_t begin,
               int64_t end, float* out) const {
        if (ahead != nullptr) {
            weigh_values<T, ROWS, BLOCKS, WHOLE, true>(now.values, ahead->values, column, a_.d, half, p, begin, end,
                                                       out + column, padded_d_);
        } else {
            weigh_values<T, ROWS, BLOCKS, WHOLE, false>(now.values, nullptr, column, a_.d, half, p, begin, end,
                                                        out + column, padded_d_);
        }
    }

    // The chunks of a group that several units computed, in ascending order.
    void fold_partials(Workspace<T>& w, const Group& g) {
        std::memset(w.started.data(), 0, static_cast<size_t>(g.all_rows()));
        float old_factor[kLanes], new_factor[kLanes];
        for (int64_t chunk = 0; chunk < g.chunks; ++chunk) {
            const float* maximum = partial_.data() + g.partial + chunk * partial_stride(g);
            const float* sum = maximum + round_up(g.all_rows(), kLanes);
            const float* output = sum + round_up(g.all_rows(), kLanes);
            for (int64_t row = 0; row < g.all_rows(); ++row) {
                if (sum[row] < 0.0f) continue;
                fold_sums(w, row, 0, 1, maximum + row, sum + row, old_factor, new_factor);
                fold_output(w, row, output + row * padded_d_, old_factor[0], new_factor[0]);
                w.started[row] = true;
            }
        }
        write_output(w, g);
    }

    void write_output(const Workspace<T>& w, const Group& g) const {
        for (int64_t head = 0; head < g.heads; ++head) {
            for (int64_t row = 0; row < g.rows; ++row) {
                const int64_t state = head * g.rows + row;
                T* to = static_cast<T*>(a_.out) + (token_of(g, row) * a_.q_heads + head_of(g, head, row)) * a_.d;
                const Vec sum = set1(w.sum[state]);
                const float* o = w.output.data() + state * padded_d_;
                for (int64_t column = 0; column < a_.d; column += kColumnBlock) {
                    const int64_t half = smaller(a_.d - column, kColumnBlock) / 2;
                    store_rounded(to + column, div(load(o + column), sum), half);
                    store_rounded(to + column + half, div(load(o + column + kLanes), sum), half);
                }
            }
        }
    }

    const AttentionArgs& a_;
    const AttentionPlan plan_;
    const int64_t group_size_;
    const int64_t padded_d_;
    const float scale_;
    const Array<float> partial_;
};

// Every sequence has its queries inside its context, and its context inside its page table.
bool lengths_fit(const AttentionArgs& a) {
    int64_t end = 0;
    for (int64_t b = 0; b < a.sequences; ++b) {
        const int64_t queries = a.query_starts[b + 1] - a.query_starts[b];
        if (a.query_starts[b] != end || queries < 0 || a.context_lens[b] < queries) return false;
        if (queries > 0 && ceil_div(a.context_lens[b], kPageSlots) > a.page_table_width) return false;
        end += queries;
    }
    return end <= a.tokens;
}

// Rows of the output that belong to no sequence.
void clear_padding(const AttentionArgs& a) {
    const int64_t used = a.sequences > 0 ? a.query_starts[a.sequences] : 0;
    const int64_t row = a.q_heads * a.d * (a.dtype == kBFloat16 ? 2 : 4);
    std::memset(static_cast<char*>(a.out) + used * row, 0, static_cast<size_t>((a.tokens - used) * row));
}

}  // namespace

void attention(const AttentionArgs* args) {
    if (!lengths_fit(*args)) {
        *args->invalid = 1;
        return;
    }
    clear_padding(*args);
    args->dtype == kBFloat16 ? Attention<uint16_t>(*args).run() : Attention<float>(*args).run();
}

}  // namespace aok::AOK_NS
