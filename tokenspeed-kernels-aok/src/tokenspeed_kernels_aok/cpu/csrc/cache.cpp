// cache.write: keys and values into their slots, in the layout of kv_layout.h.
#include "kernels.h"
#include "kv_layout.h"
#include "parallel.h"

namespace aok::AOK_NS {
namespace {

// A NaN is stored as it is: the layout moves bits and computes nothing.
void write_key(const uint16_t* k, uint16_t* head, int64_t slot, int64_t d) {
    for (int64_t j = 0; j < d / 2; ++j) std::memcpy(head + (j * kPageSlots + slot) * 2, k + 2 * j, 4);
}

void write_key(const float* k, float* head, int64_t slot, int64_t d) {
    for (int64_t i = 0; i < d; ++i) std::memcpy(head + i * kPageSlots + slot, k + i, 4);
}

void write_value(const uint16_t* v, uint16_t* row, int64_t d) {
    for (int64_t start = 0; start < d; start += kColumnBlock) {
        const int64_t half = (d - start < kColumnBlock ? d - start : kColumnBlock) / 2;
        for (int64_t l = 0; l < half; ++l) {
            row[start + 2 * l] = v[start + l];
            row[start + 2 * l + 1] = v[start + half + l];
        }
    }
}

void write_value(const float* v, float* row, int64_t d) { std::memcpy(row, v, static_cast<size_t>(d) * sizeof(float)); }

template <class T>
void write(const CacheWriteArgs& a) {
    const int64_t threads = threads_for(a.tokens * a.kv_heads * a.d, 1 << 14, a.threads);
    parallel_for(a.tokens, threads, [&](int64_t t) {
        const int64_t slot = a.slots[t];
        if (slot < 0) return;
        const int64_t page = slot / kPageSlots, offset = slot % kPageSlots;
        if (page >= a.pages) {
            __atomic_store_n(a.invalid, 1, __ATOMIC_RELAXED);
            return;
        }
        T* k_page = static_cast<T*>(a.k_cache) + page * a.k_page_stride;
        T* v_page = static_cast<T*>(a.v_cache) + page * a.v_page_stride;
        for (int64_t h = 0; h < a.kv_heads; ++h) {
            const int64_t head = h * kPageSlots * a.d;
            const T* k = static_cast<const T*>(a.k) + t * a.k_token_stride + h * a.k_head_stride;
            const T* v = static_cast<const T*>(a.v) + t * a.v_token_stride + h * a.v_head_stride;
            write_key(k, k_page + head, offset, a.d);
            write_value(v, v_page + head + offset * a.d, a.d);
        }
    });
}

}  // namespace

void cache_write(const CacheWriteArgs* args) {
    args->dtype == kBFloat16 ? write<uint16_t>(*args) : write<float>(*args);
}

}  // namespace aok::AOK_NS
