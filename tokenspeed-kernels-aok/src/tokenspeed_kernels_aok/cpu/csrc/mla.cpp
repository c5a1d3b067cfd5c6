// latent_attention and latent_write: attention over compressed entries (docs/design/bits.md, rule 11), and their storage.
#include "kernels.h"
#include "latent_attention.h"

namespace aok::AOK_NS {
namespace {

// A sequence is a unit; a query meets all entries up to its own, in pages.
template <class T>
class Sequences {
public:
    using Args = LatentAttentionArgs;
    struct Chunk {
        const T* pages[kPagesOfChunk];
        int64_t width;
        AOK_MEMBER const T* at(int64_t page, int64_t slot) const { return pages[page] + slot * width; }
    };

    explicit Sequences(const Args& args) : a_(args) {}
    const Args& args() const { return a_; }
    int64_t units() const { return a_.sequences; }
    int64_t first_query(int64_t b) const { return a_.query_starts[b]; }
    int64_t queries(int64_t b) const { return a_.query_starts[b + 1] - a_.query_starts[b]; }
    int64_t visible(int64_t b, int64_t i) const { return a_.context_lens[b] - queries(b) + i + 1; }

    void load(int64_t b, int64_t c, int64_t count, Chunk& chunk) const {
        chunk.width = a_.width;
        for (int64_t p = 0; p < ceil_div(count, kPageSlots); ++p) {
            chunk.pages[p] = page_of<T>(a_, b, c * kPagesOfChunk + p);
        }
    }

private:
    const Args& a_;
};

template <class T>
void attend(const LatentAttentionArgs& a) {
    const int64_t row = a.heads * a.latent, used = a.query_starts[a.sequences];
    std::memset(static_cast<T*>(a.out) + used * row, 0, static_cast<size_t>((a.tokens - used) * row) * sizeof(T));
    const Sequences<T> sequences(a);
    LatentAttention<T, Sequences<T>>(sequences).run();
}

}  // namespace

void latent_attention(const LatentAttentionArgs* a) {
    if (!sequences_fit(*a)) {
        *a->invalid = 1;
        return;
    }
    a->dtype == kBFloat16 ? attend<uint16_t>(*a) : attend<float>(*a);
}

void latent_write(const LatentWriteArgs* args) {
    const LatentWriteArgs& a = *args;
    parallel_for(a.tokens, threads_for(a.tokens * a.width, 1 << 17, a.threads), [&](int64_t t) {
        const int64_t slot = a.slots[t];
        if (slot < 0) return;
        if (slot / kPageSlots >= a.pages) {
            __atomic_store_n(a.invalid, 1, __ATOMIC_RELAXED);
            return;
        }
        const int64_t to = slot / kPageSlots * a.page_stride + slot % kPageSlots * a.width;
        std::memcpy(static_cast<char*>(a.cache) + to * a.bytes,
                    static_cast<const char*>(a.latent) + t * a.row_stride * a.bytes,
                    static_cast<size_t>(a.width * a.bytes));
    });
}

}  // namespace aok::AOK_NS
