// sampling.block_sumexp and sampling.logprobs, in the orders of docs/design/bits.md.
#include "kernels.h"
#include "math.h"
#include "parallel.h"
#include "vocabulary.h"

namespace aok::AOK_NS {
namespace {

constexpr int64_t kRowGrain = 1 << 14;  // vocabulary entries that take about ten microseconds

template <class T>
void block_sums(const BlockSumExpArgs& a) {
    const int64_t blocks = (a.vocabulary + a.block - 1) / a.block;
    parallel_for(a.rows * blocks, threads_for(a.rows * a.vocabulary, kRowGrain, a.threads), [&](int64_t i) {
        const int64_t row = i / blocks, begin = i % blocks * a.block;
        const int64_t end = begin + a.block < a.vocabulary ? begin + a.block : a.vocabulary;
        const ScaledRow<T> z(static_cast<const T*>(a.logits) + row * a.row_stride, a.temperature[row]);
        const auto exponential = [](Vec x) { return exp(x); };
        const float most = a.row_max[row];
        const float sum = z.visit([&](const auto& load) { return sum_exp(load, begin, end, most, exponential); });
        a.sums[i] = sum != sum ? bits_float(kCanonicalNaN) : sum;
    });
}

float log_one(float x) {
    float lanes[kLanes];
    store(lanes, log(set1(x)));
    return lanes[0];
}

template <class T>
void score_row(const LogprobsArgs& a, int64_t row) {
    const ScaledRow<T> z(static_cast<const T*>(a.logits) + row * a.row_stride, a.temperature[row]);
    // The largest logit over temperature is the largest z; the scaled row turns a -0 into +0 again.
    const float most = z.at(row_maximum(z.logits(), a.vocabulary).index) + 0.0f;
    const float sum = z.visit([&](const auto& load) {
        float total = 0.0f;
        for (int64_t begin = 0; begin < a.vocabulary; begin += a.block) {
            const int64_t end = begin + a.block < a.vocabulary ? begin + a.block : a.vocabulary;
            const float block = sum_exp(load, begin, end, most, [](Vec x) { return exp_nonpositive(x); });
            total = begin == 0 ? block : total + block;
        }
        return total;
    });
    const float log_sum = log_one(sum);
    for (int64_t j = 0; j < a.count; ++j) {
        const int64_t id = a.ids[row * a.id_row_stride + j];
        float logprob = bits_float(kCanonicalNaN);
        if (id >= 0 && id < a.vocabulary) {
            const float x = z.at(id) - most;
            logprob = a.negated ? -(log_sum - x) : x - log_sum;
        }
        a.out[row * a.count + j] = logprob != logprob ? bits_float(kCanonicalNaN) : logprob;
    }
}

template <class T>
void score(const LogprobsArgs& a) {
    parallel_for(a.rows, threads_for(a.rows * a.vocabulary, kRowGrain, a.threads),
                 [&](int64_t row) { score_row<T>(a, row); });
}

}  // namespace

void block_sumexp(const BlockSumExpArgs* args) {
    args->dtype == kBFloat16 ? block_sums<uint16_t>(*args) : block_sums<float>(*args);
}

void logprobs(const LogprobsArgs* args) {
    args->dtype == kBFloat16 ? score<uint16_t>(*args) : score<float>(*args);
}

}  // namespace aok::AOK_NS
