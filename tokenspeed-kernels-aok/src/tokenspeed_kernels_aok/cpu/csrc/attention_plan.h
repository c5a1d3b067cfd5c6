// How one call of attention.paged is cut into work: which rows go together and which chunks of keys they walk.
//
// Nothing decided here can change a bit. A *group* is some rows of one sequence for some of its key/value heads. It is
// computed by one *unit*, or, when it is more than a thread's share, by several that each take some chunks of 256 keys
// and store the result of every chunk by itself; those are folded in ascending order afterwards, with the same
// operations.
//
// A group of few rows (decoding) takes several heads, chunk by chunk: memory is then read page by page, and all of the
// second-level cache is used, of which the pages of a single head share few sets. A group of many rows (prefill) takes
// one head, and its rows reuse each chunk.
#pragma once

#include "abi.h"
#include "attention_tile.h"
#include "memory.h"

namespace aok::AOK_NS {

struct Group {
    int64_t sequence;
    int64_t first_head, heads;    // key/value heads
    int64_t first_row, rows;      // (query, head) pairs of each key/value head, query by query
    int64_t first_chunk, chunks;  // what any of the rows can see
    int64_t partial;              // where its results by chunk begin, or -1 when one unit does all

    int64_t all_rows() const { return heads * rows; }
    int64_t cost() const { return all_rows() * chunks; }
};

struct Unit {
    int64_t group, first_chunk, chunks;
};

constexpr int64_t kGroupRows = 8 * kBlockRows;  // rows that walk a chunk before the next chunk is read
constexpr int64_t kGroupsPerThread = 8;         // enough to even out unequal groups
constexpr int64_t kUnitsPerThread = 4;          // pieces of a group that is more than a thread's share

// The keys [begin, end) that a query of sequence `b` sees.
struct Span {
    int64_t begin, end;
};
AOK_INLINE Span visible_keys(const AttentionArgs& a, int64_t b, int64_t query) {
    const int64_t queries = a.query_starts[b + 1] - a.query_starts[b];
    const int64_t position = a.context_lens[b] - queries + query;
    return {a.window > 0 ? larger(position - a.window + 1, 0) : 0, position + 1};
}

// Floats that the result of one chunk takes for `rows` rows: maxima, sums, outputs.
AOK_INLINE int64_t partial_floats(int64_t rows, int64_t padded_d) {
    return 2 * round_up(rows, kLanes) + rows * padded_d;
}

class AttentionPlan {
public:
    explicit AttentionPlan(const AttentionArgs& a)
        : group_size_(a.q_heads / a.kv_heads), threads_(larger(a.threads, 1)), rows_per_group_(choose_rows(a)),
          group_count_(count_groups(a)) {
        groups_.allocate(group_count_);
        fill_groups(a);
        split(a);
        units_.allocate(unit_count_);
        fill_units();
    }

    int64_t units() const { return unit_count_; }
    int64_t groups() const { return group_count_; }
    int64_t partial_size() const { return partial_floats_; }
    int64_t max_rows() const { return max_rows_; }
    const Group& group(int64_t i) const { return groups_[i]; }
    const Unit& unit(int64_t i) const { return units_[i]; }

private:
    int64_t rows_of(const AttentionArgs& a, int64_t b) const {
        return (a.query_starts[b + 1] - a.query_starts[b]) * group_size_;
    }

    // Rows of one head in a group. The rows of one query stay together: they read the same keys.
    int64_t choose_rows(const AttentionArgs& a) const {
        const int64_t rows = (a.query_starts[a.sequences] - a.query_starts[0]) * a.q_heads;
        const int64_t share = round_up(ceil_div(rows, kGroupsPerThread * threads_), kBlockRows);
        return smaller(larger(share, round_up(group_size_, kBlockRows)), kGroupRows);
    }

    // Heads of a group, for a sequence with `rows` rows.
    int64_t choose_heads(const AttentionArgs& a, int64_t rows) const {
        if (rows > kScoreRows) return 1;
        const int64_t parts = a.sequences >= kUnitsPerThread * threads_ ? 1 : smaller(threads_, a.kv_heads);
        return smaller(ceil_div(a.kv_heads, parts), kGroupRows / rows);
    }

    int64_t count_groups(const AttentionArgs& a) const {
        int64_t count = 0;
        for (int64_t b = 0; b < a.sequences; ++b) {
            const int64_t rows = rows_of(a, b);
            if (rows > 0) count += ceil_div(rows, rows_per_group_) * ceil_div(a.kv_heads, choose_heads(a, rows));
        }
        return count;
    }

    // Long walks first, so that the last units to be taken are short ones.
    void fill_groups(const AttentionArgs& a) {
        int64_t next = 0;
        for (int64_t b = 0; b < a.sequences; ++b) {
            const int64_t rows = rows_of(a, b);
            if (rows == 0) continue;
            const int64_t heads = choose_heads(a, rows);
            for (int64_t head = 0; head < a.kv_heads; head += heads) {
                for (int64_t part = ceil_div(rows, rows_per_group_) - 1; part >= 0; --part) {
                    const int64_t first = part * rows_per_group_;
                    const int64_t count = smaller(rows_per_group_, rows - first);
                    const int64_t begin = visible_keys(a, b, first / group_size_).begin / kChunkKeys;
                    const int64_t end = ceil_div(visible_keys(a, b, (first + count - 1) / group_size_).end, kChunkKeys);
                    const int64_t taken = smaller(heads, a.kv_heads - head);
                    groups_[next++] = {b, head, taken, first, count, begin, end - begin, -1};
                }
            }
        }
    }

    // Chunks in a unit of group `g`.
    int64_t chunks_in_unit(const Group& g) const {
        const bool balanced = threads_ == 1 || 4 * g.cost() * threads_ <= 5 * total_cost_;
        if (balanced || g.rows > larger(kBlockRows, group_size_)) return g.chunks;
        return larger(total_cost_ / (kUnitsPerThread * threads_ * g.all_rows()), 1);
    }

    void split(const AttentionArgs& a) {
        const int64_t padded_d = round_up(a.d, kColumnBlock);
        for (int64_t i = 0; i < group_count_; ++i) {
            total_cost_ += groups_[i].cost();
            max_rows_ = larger(max_rows_, groups_[i].all_rows());
        }
        for (int64_t i = 0; i < group_count_; ++i) {
            Group& g = groups_[i];
            const int64_t units = ceil_div(g.chunks, chunks_in_unit(g));
            unit_count_ += units;
            if (units == 1) continue;
            g.partial = partial_floats_;
            partial_floats_ += g.chunks * round_up(partial_floats(g.all_rows(), padded_d), kLanes);
        }
    }

    void fill_units() {
        int64_t next = 0;
        for (int64_t i = 0; i < group_count_; ++i) {
            const Group& g = groups_[i];
            const int64_t step = chunks_in_unit(g);
            for (int64_t done = 0; done < g.chunks; done += step) {
                units_[next++] = {i, g.first_chunk + done, smaller(step, g.chunks - done)};
            }
        }
    }

    const int64_t group_size_;
    const int64_t threads_;
    const int64_t rows_per_group_;
    const int64_t group_count_;
    int64_t total_cost_ = 0, unit_count_ = 0, partial_floats_ = 0, max_rows_ = 0;
    Array<Group> groups_;
    Array<Unit> units_;
};

}  // namespace aok::AOK_NS
