// The C ABI: one argument block for each kernel, and the table of kernels that every instruction set fills.
//
// A kernel is `void kernel(const Args*)`. Every field of a block is eight bytes wide (a pointer, an int64 or a double),
// in the order in which the Python side packs them; strides are in elements. Kernels trust their arguments: the Python
// side has checked shapes, dtypes, strides and ranges.
#pragma once

#include <cstdint>

namespace aok {

// Element types, by the numbers that Python passes.
enum DType : int64_t { kFloat32 = 0, kBFloat16 = 1 };

// y[m, n] = sum_k x[m, k] w[n, k] (+ bias[n]) for g groups; weights packed by pack_weight.
struct GemmArgs {
    const void* x;
    const void* weight;
    const void* bias;  // weight's dtype; may be null
    void* y;
    int64_t groups, m, k, n;
    int64_t x_group_stride, x_row_stride;
    int64_t y_group_stride, y_row_stride;
    int64_t weight_group_stride;  // in bytes
    int64_t x_dtype, weight_dtype;  // y has x's dtype
    int64_t threads;
};

// Packs rows [0, n) of w[n, k] (bf16 or fp32) into column panels.
struct PackArgs {
    const void* w;
    void* packed;
    int64_t n, k;
    int64_t w_row_stride, w_col_stride;
    int64_t dtype;
    int64_t threads;
};

// out[t, :] = w[ids[t], :] from a plain or a packed weight of `rows` rows; NaN for an id outside them.
struct EmbeddingArgs {
    const int64_t* ids;
    const void* weight;
    void* out;  // contiguous
    int64_t tokens, k, rows;
    int64_t weight_row_stride;
    int64_t kind;  // 2 * dtype + (1 when packed)
    int64_t threads;
};

// out = x / rms(x) rounded, times weight; for outer x inner rows of width h. add_rms adds residual first.
struct NormArgs {
    const void* x;
    const void* residual;  // null for the plain norm
    const void* weight;
    void* out;  // contiguous
    void* sum;  // contiguous; null for the plain norm
    int64_t outer, inner, h;
    int64_t x_outer_stride, x_inner_stride;
    int64_t residual_outer_stride;
    int64_t dtype;
    double eps;
    int64_t threads;
};

struct RopeArgs {
    const void* q;
    const void* k;
    void* q_out;  // contiguous
    void* k_out;  // contiguous
    const int64_t* positions;
    const float* cos_sin;
    int64_t tokens, q_heads, k_heads, d, rotary;
    int64_t q_token_stride, q_head_stride, k_token_stride, k_head_stride;
    int64_t cos_sin_row_stride, cos_sin_rows;  // a position outside the rows gives NaN
    int64_t interleaved, dtype;
    int64_t threads;
};

struct SiluArgs {
    const void* gate_up;
    void* out;  // contiguous
    int64_t tokens, f;
    int64_t row_stride;
    int64_t dtype;
    int64_t threads;
};

// Keys and values k[t, h, :], v[t, h, :] into slot slots[t] of the paged cache, in the layout of kv_layout.h.
struct CacheWriteArgs {
    const void* k;
    const void* v;
    void* k_cache;  // the inside of a page is contiguous
    void* v_cache;
    const int64_t* slots;  // distinct; negative ones are skipped
    int64_t* invalid;      // set to 1 when a slot is beyond the cache
    int64_t tokens, kv_heads, d, pages;
    int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride;
    int64_t k_page_stride, v_page_stride;
    int64_t dtype;
    int64_t threads;
};

// out[t, h, :] = attention of query t, head h over the cached keys that it sees; q, caches and out share the dtype.
struct AttentionArgs {
    const void* q;
    const void* k_cache;
    const void* v_cache;
    const int32_t* query_starts;  // [sequences + 1]
    const int32_t* context_lens;  // [sequences]
    const int32_t* page_tables;   // [sequences, page_table_stride]
    void* out;                    // contiguous [tokens, q_heads, d]
    int64_t* invalid;             // set to 1 when lengths or pages do not fit; the output then means nothing
    int64_t tokens, sequences, q_heads, kv_heads, d, pages;
    int64_t q_token_stride, q_head_stride;
    int64_t k_page_stride, v_page_stride, page_table_stride, page_table_width;
    double scale;
    int64_t window;  // 0 sees all
    int64_t dtype;
    int64_t threads;
};

// sums[r, b] = sum of exp(z - row_max[r]) over block b of row r; z = logits / temperature, 0 counts as 1.
struct BlockSumExpArgs {
    const void* logits;
    const float* row_max;
    const float* temperature;
    float* sums;  // contiguous
    int64_t rows, vocabulary, row_stride;
    int64_t block;
    int64_t dtype;
    int64_t threads;
};

// out[r, j] = log of the softmax of z at ids[r, j]; NaN for an id outside the vocabulary.
struct LogprobsArgs {
    const void* logits;
    const int64_t* ids;
    const float* temperature;
    float* out;  // contiguous
    int64_t rows, vocabulary, row_stride;
    int64_t count, id_row_stride;  // ids in a row
    int64_t block;                 // the width that sums are taken over before they are added left to right
    int64_t negated;               // 1: -(log(sum) - x), 0: x - log(sum)
    int64_t dtype;
    int64_t threads;
};

struct SampleArgs {
    const void* logits;
    const float* temperature;
    const int32_t* top_k;
    const float* top_p;
    const float* min_p;
    const int64_t* seeds;
    const int64_t* positions;
    int64_t* out;
    int64_t rows, vocabulary, row_stride;
    int64_t dtype;
    int64_t threads;
};

// The k best experts of each row of logits and their weights (docs/design/bits.md, rule 9).
struct RouteArgs {
    const void* logits;
    const float* bias;  // [experts]; may be null
    float* weights;     // contiguous [tokens, top_k]
    int32_t* ids;       // likewise
    int64_t tokens, experts, top_k;
    int64_t row_stride;
    int64_t groups, top_groups;
    int64_t sigmoid;  // 0: softmax
    int64_t fused;    // 1: choose by the logits, normalise over the chosen; softmax, no bias and one group only
    int64_t normalise;
    double scale;
    int64_t dtype;
    int64_t threads;
};

// out[t, :] = sum over slots j of weights[t, j] * expert(ids[t, j])(x[t, :]); weights packed by pack, an expert each.
struct ExpertsArgs {
    const void* x;
    const void* gate_up;  // [experts] of w[2 intermediate, hidden]
    const void* down;     // [experts] of w[hidden, intermediate]
    const float* weights;  // contiguous [tokens, top_k]
    const int32_t* ids;    // likewise, not negative; from `experts` on the identity
    void* out;             // contiguous
    int64_t tokens, top_k, experts, hidden, intermediate;
    int64_t x_row_stride;
    int64_t gate_up_bytes, down_bytes;  // from one expert to the next
    int64_t x_dtype, weight_dtype;
    int64_t threads;
};

// Rows latent[t, :] into slot slots[t] of a cache of `width` values a slot, which lie one after another.
struct LatentWriteArgs {
    const void* latent;
    void* cache;
    const int64_t* slots;  // distinct; negative ones are skipped
    int64_t* invalid;      // set to 1 when a slot is beyond the cache
    int64_t tokens, width, pages;
    int64_t row_stride, page_stride;
    int64_t bytes;  // of one value
    int64_t threads;
};

// out[t, h, :] = attention of query t, head h over cached entries: all `width` values are the key, the first `latent` of
// them the value. q, cache and out share the dtype.
struct LatentAttentionArgs {
    const void* q;
    const void* cache;
    const int32_t* query_starts;  // [sequences + 1]
    const int32_t* context_lens;  // [sequences]
    const int32_t* page_tables;   // [sequences, page_table_stride]
    void* out;                    // contiguous [tokens, heads, latent]
    int64_t* invalid;             // set to 1 when lengths or pages do not fit; the output then means nothing
    int64_t tokens, sequences, heads, width, latent, pages;  // width is even
    int64_t q_token_stride, q_head_stride, page_stride;
    int64_t page_table_stride, page_table_width;
    double scale;
    int64_t dtype;
    int64_t threads;
};

// out = (x - mean) / deviation * weight + bias, over rows of width h.
struct LayerNormArgs {
    const void* x;
    const void* weight;
    const void* bias;
    void* out;  // contiguous
    int64_t rows, h;
    int64_t row_stride;
    double eps;
    int64_t dtype;
    int64_t threads;
};

// scores[t, p] = sum over heads of weights[t, h] * max(q[t, h, :] . cache[p] * scale, 0); -infinity where t does not see p.
struct IndexScoresArgs {
    const void* q;
    const float* weights;
    const void* cache;
    const int32_t* query_starts;  // [sequences + 1]
    const int32_t* context_lens;  // [sequences]
    const int32_t* page_tables;   // [sequences, page_table_stride]
    float* scores;                // contiguous [tokens, columns]
    int64_t* invalid;             // set to 1 when lengths or pages do not fit; the output then means nothing
    int64_t tokens, sequences, heads, width, pages, columns;  // width is even
    int64_t q_token_stride, q_head_stride, weight_row_stride, page_stride;
    int64_t page_table_stride, page_table_width;
    double scale;
    int64_t dtype;  // of q and the cache
    int64_t threads;
};

// indices[t, :] = the top_k best of scores[t, 0..positions[t]], best first, then -1.
struct IndexTopkArgs {
    const float* scores;
    const int64_t* positions;
    int32_t* indices;  // contiguous [tokens, top_k]
    int64_t tokens, columns, top_k;
    int64_t row_stride;
    int64_t threads;
};

// As LatentAttentionArgs, of each query over the positions indices[t, :] up to the first negative one.
struct SparseAttentionArgs {
    const void* q;
    const void* cache;
    const int32_t* indices;       // [tokens, selected]
    const int32_t* query_starts;  // [sequences + 1]
    const int32_t* context_lens;  // [sequences]
    const int32_t* page_tables;   // [sequences, page_table_stride]
    void* out;                    // contiguous [tokens, heads, latent]
    int64_t* invalid;             // set to 1 when lengths, positions or pages do not fit; the output then means nothing
    int64_t tokens, sequences, heads, width, latent, selected, pages;  // width is even
    int64_t q_token_stride, q_head_stride, page_stride, index_row_stride;
    int64_t page_table_stride, page_table_width;
    int64_t sorted;  // 1: in ascending position, 0: in the order of the indices
    double scale;
    int64_t dtype;
    int64_t threads;
};

// Every kernel: its name and its argument block. Add a line here and a definition in a source file; the rest follows.
#define AOK_KERNELS(KERNEL)                       \
    KERNEL(gemm, GemmArgs)                        \
    KERNEL(pack, PackArgs)                        \
    KERNEL(embedding, EmbeddingArgs)              \
    KERNEL(rms_norm, NormArgs)                    \
    KERNEL(rope, RopeArgs)                        \
    KERNEL(silu_and_mul, SiluArgs)                \
    KERNEL(cache_write, CacheWriteArgs)           \
    KERNEL(attention, AttentionArgs)              \
    KERNEL(block_sumexp, BlockSumExpArgs)         \
    KERNEL(logprobs, LogprobsArgs)                \
    KERNEL(sample, SampleArgs)                    \
    KERNEL(route, RouteArgs)                      \
    KERNEL(experts, ExpertsArgs)                  \
    KERNEL(latent_write, LatentWriteArgs)         \
    KERNEL(latent_attention, LatentAttentionArgs) \
    KERNEL(layer_norm, LayerNormArgs)             \
    KERNEL(index_scores, IndexScoresArgs)         \
    KERNEL(index_topk, IndexTopkArgs)             \
    KERNEL(sparse_attention, SparseAttentionArgs)

struct KernelTable {
#define AOK_FIELD(name, Args) void (*name)(const Args*);
    AOK_KERNELS(AOK_FIELD)
#undef AOK_FIELD
};

}  // namespace aok
