// Row operators: rms_norm and add_rms, layer_norm, rope, silu_and_mul, embedding. One row's bits depend on that row alone.
#include "kernels.h"
#include "math.h"
#include "panels.h"
#include "parallel.h"
#include "simd.h"

namespace aok::AOK_NS {
namespace {

AOK_INLINE uint16_t quiet_nan(uint16_t) { return kCanonicalNaN16; }
AOK_INLINE float quiet_nan(float) { return bits_float(kCanonicalNaN); }

template <class T>
AOK_INLINE void fill_nan(T* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = quiet_nan(T{});
}

// Sum of squares in 64 virtual lanes (index mod 64), folded by halves.
template <class T>
AOK_INLINE float sum_of_squares(const T* x, int64_t h) {
    Vec lanes[4] = {zero(), zero(), zero(), zero()};
    int64_t i = 0;
    for (; i + 64 <= h; i += 64) {
        for (int v = 0; v < 4; ++v) {
            const Vec a = load_as_float(x + i + 16 * v);
            lanes[v] = fma(a, a, lanes[v]);
        }
    }
    for (int v = 0; i < h; i += 16, ++v) {
        const Vec a = h - i < 16 ? load_as_float(x + i, h - i) : load_as_float(x + i);
        lanes[v] = fma(a, a, lanes[v]);
    }
    return fold(add(add(lanes[0], lanes[2]), add(lanes[1], lanes[3])));
}

// 1 / sqrt(mean + eps), by an IEEE division, square root and division.
AOK_INLINE float inverse_rms(float squares, int64_t h, float eps) {
    const Vec mean = div(set1(squares), set1(static_cast<float>(h)));
    alignas(64) float lane[kLanes];
    store(lane, div(set1(1.0f), sqrt(add(mean, set1(eps)))));
    return lane[0];
}

template <class T>
AOK_INLINE void scale_row(const T* x, const T* weight, T* out, int64_t h, float inverse) {
    const Vec factor = set1(inverse);
    int64_t i = 0;
    for (; i + 16 <= h; i += 16) {
        const Vec normal = round_to<T>(mul(load_as_float(x + i), factor));
        store_rounded(out + i, mul(normal, load_as_float(weight + i)));
    }
    if (i < h) {
        const Vec normal = round_to<T>(mul(load_as_float(x + i, h - i), factor));
        store_rounded(out + i, mul(normal, load_as_float(weight + i, h - i)), h - i);
    }
}

template <class T>
void rms_norm_rows(const NormArgs& a) {
    const T* x = static_cast<const T*>(a.x);
    T* out = static_cast<T*>(a.out);
    const float eps = static_cast<float>(a.eps);
    const int64_t rows = a.outer * a.inner;
    parallel_for(rows, threads_for(rows * a.h, 1 << 14, a.threads), [&](int64_t row) {
        const T* from = x + row / a.inner * a.x_outer_stride + row % a.inner * a.x_inner_stride;
        const float inverse = inverse_rms(sum_of_squares(from, a.h), a.h, eps);
        scale_row(from, static_cast<const T*>(a.weight), out + row * a.h, a.h, inverse);
    });
}

// The norm of the unrounded fp32 sum; only the sum that is handed on is rounded.
template <class T>
void add_rms_rows(const NormArgs& a) {
    const T* x = static_cast<const T*>(a.x);
    const T* residual = static_cast<const T*>(a.residual);
    const T* weight = static_cast<const T*>(a.weight);
    T* out = static_cast<T*>(a.out);
    T* sum = static_cast<T*>(a.sum);
    const float eps = static_cast<float>(a.eps);
    parallel_for(a.outer, threads_for(a.outer * a.h, 1 << 13, a.threads), [&](int64_t row) {
        const T* left = x + row * a.x_outer_stride;
        const T* right = residual + row * a.residual_outer_stride;
        const auto add_at = [&](int64_t i, int64_t n) {
            return n < 16 ? add(load_as_float(left + i, n), load_as_float(right + i, n))
                          : add(load_as_float(left + i), load_as_float(right + i));
        };
        Vec lanes[4] = {zero(), zero(), zero(), zero()};
        for (int64_t i = 0; i < a.h; i += 16) {
            const Vec s = add_at(i, a.h - i);
            lanes[i / 16 % 4] = fma(s, s, lanes[i / 16 % 4]);
        }
        const float squares = fold(add(add(lanes[0], lanes[2]), add(lanes[1], lanes[3])));
        const Vec factor = set1(inverse_rms(squares, a.h, eps));
        for (int64_t i = 0; i < a.h; i += 16) {
            const int64_t n = a.h - i < 16 ? a.h - i : 16;
            const Vec s = add_at(i, n);
            store_rounded(sum + row * a.h + i, s, n);
            store_rounded(out + row * a.h + i, mul(round_to<T>(mul(s, factor)), load_as_float(weight + i, n)), n);
        }
    });
}

// (x - mean) * r * weight + bias: means in 64 virtual lanes as above, one rounding at the end.
template <class T>
void layer_norm_rows(const LayerNormArgs& a) {
    const T* weight = static_cast<const T*>(a.weight);
    const T* bias = static_cast<const T*>(a.bias);
    const float eps = static_cast<float>(a.eps);
    const Vec width = set1(static_cast<float>(a.h));
    parallel_for(a.rows, threads_for(a.rows * a.h, 1 << 13, a.threads), [&](int64_t row) {
        const T* x = static_cast<const T*>(a.x) + row * a.row_stride;
        T* out = static_cast<T*>(a.out) + row * a.h;
        Vec lanes[4] = {zero(), zero(), zero(), zero()};
        for (int64_t i = 0; i < a.h; i += 16) {
            lanes[i / 16 % 4] = add(lanes[i / 16 % 4], load_as_float(x + i, a.h - i < 16 ? a.h - i : 16));
        }
        const Vec mean = div(set1(fold(add(add(lanes[0], lanes[2]), add(lanes[1], lanes[3])))), width);
        for (Vec& lane : lanes) lane = zero();
        for (int64_t i = 0; i < a.h; i += 16) {
            const int64_t n = a.h - i < 16 ? a.h - i : 16;
            const Vec centred = select(first_lanes(n), sub(load_as_float(x + i, n), mean), zero());
            lanes[i / 16 % 4] = fma(centred, centred, lanes[i / 16 % 4]);
        }
        const float squares = fold(add(add(lanes[0], lanes[2]), add(lanes[1], lanes[3])));
        const Vec factor = set1(inverse_rms(squares, a.h, eps));
        for (int64_t i = 0; i < a.h; i += 16) {
            const int64_t n = a.h - i < 16 ? a.h - i : 16;
            const Vec normal = mul(sub(load_as_float(x + i, n), mean), factor);
            store_rounded(out + i, fma(normal, load_as_float(weight + i, n), load_as_float(bias + i, n)), n);
        }
    });
}

// (a, b) -> (a cos - b sin, b cos + a sin): one rounded product each, then one fused multiply-add.
AOK_INLINE Vec rotated_first(Vec a, Vec b, Vec cosine, Vec sine) { return fma(a, cosine, neg(mul(b, sine))); }
AOK_INLINE Vec rotated_second(Vec a, Vec b, Vec cosine, Vec sine) { return fma(b, cosine, mul(a, sine)); }

template <class T>
AOK_INLINE void rope_half(const T* x, T* out, const float* cosine, const float* sine, int64_t half) {
    for (int64_t i = 0; i < half; i += 16) {
        const int64_t n = half - i < 16 ? half - i : 16;
        const Vec a = load_as_float(x + i, n), b = load_as_float(x + half + i, n);
        const Vec c = load(cosine + i, n), s = load(sine + i, n);
        store_rounded(out + i, rotated_first(a, b, c, s), n);
        store_rounded(out + half + i, rotated_second(a, b, c, s), n);
    }
}

template <class T>
AOK_INLINE void rope_pairs(const T* x, T* out, const float* cosine, const float* sine, int64_t half) {
    T first[kLanes] = {}, second[kLanes] = {};
    for (int64_t i = 0; i < half; i += 16) {
        const int64_t n = half - i < 16 ? half - i : 16;
        for (int64_t l = 0; l < n; ++l) {
            first[l] = x[2 * (i + l)];
            second[l] = x[2 * (i + l) + 1];
        }
        const Vec a = load_as_float(first), b = load_as_float(second);
        const Vec c = load(cosine + i, n), s = load(sine + i, n);
        store_rounded(first, rotated_first(a, b, c, s));
        store_rounded(second, rotated_second(a, b, c, s));
        for (int64_t l = 0; l < n; ++l) {
            out[2 * (i + l)] = first[l];
            out[2 * (i + l) + 1] = second[l];
        }
    }
}

template <class T>
void rope_tokens(const RopeArgs& a) {
    const int64_t heads = a.q_heads + a.k_heads;
    parallel_for(a.tokens, threads_for(a.tokens * heads * a.d, 1 << 14, a.threads), [&](int64_t t) {
        const int64_t position = a.positions[t];
        if (position < 0 || position >= a.cos_sin_rows) {
            fill_nan(static_cast<T*>(a.q_out) + t * a.q_heads * a.d, a.q_heads * a.d);
            fill_nan(static_cast<T*>(a.k_out) + t * a.k_heads * a.d, a.k_heads * a.d);
            return;
        }
        const float* cosine = a.cos_sin + position * a.cos_sin_row_stride;
        const float* sine = cosine + a.rotary / 2;
        for (int64_t h = 0; h < heads; ++h) {
            const bool query = h < a.q_heads;
            const int64_t head = query ? h : h - a.q_heads;
            const T* x = query ? static_cast<const T*>(a.q) + t * a.q_token_stride + head * a.q_head_stride
                               : static_cast<const T*>(a.k) + t * a.k_token_stride + head * a.k_head_stride;
            T* out = query ? static_cast<T*>(a.q_out) + (t * a.q_heads + head) * a.d
                           : static_cast<T*>(a.k_out) + (t * a.k_heads + head) * a.d;
            if (a.interleaved) {
                rope_pairs(x, out, cosine, sine, a.rotary / 2);
            } else {
                rope_half(x, out, cosine, sine, a.rotary / 2);
            }
            std::memcpy(out + a.rotary, x + a.rotary, static_cast<size_t>(a.d - a.rotary) * sizeof(T));
        }
    });
}

// gate / (1 + exp(-gate)) * up.
AOK_INLINE Vec silu_times(Vec gate, Vec up) { return mul(div(gate, add(set1(1.0f), exp(neg(gate)))), up); }

template <class T>
void silu_rows(const SiluArgs& a) {
    const T* x = static_cast<const T*>(a.gate_up);
    T* out = static_cast<T*>(a.out);
    // Pieces of rows, so that one long row also has work for every thread.
    constexpr int64_t piece = 1024;
    const int64_t pieces = (a.f + piece - 1) / piece;
    parallel_for(a.tokens * pieces, threads_for(a.tokens * a.f, 1 << 12, a.threads), [&](int64_t item) {
        const int64_t row = item / pieces, begin = item % pieces * piece;
        const int64_t end = begin + piece < a.f ? begin + piece : a.f;
        const T* gate = x + row * a.row_stride;
        int64_t i = begin;
        for (; i + 16 <= end; i += 16) {
            store_rounded(out + row * a.f + i, silu_times(load_as_float(gate + i), load_as_float(gate + a.f + i)));
        }
        if (i < end) {
            const int64_t n = end - i;
            const Vec y = silu_times(load_as_float(gate + i, n), load_as_float(gate + a.f + i, n));
            store_rounded(out + row * a.f + i, y, n);
        }
    });
}

template <class T>
void embedding_rows(const EmbeddingArgs& a) {
    parallel_for(a.tokens, threads_for(a.tokens * a.k, 1 << 15, a.threads), [&](int64_t t) {
        T* out = static_cast<T*>(a.out) + t * a.k;
        const int64_t id = a.ids[t];
        if (id < 0 || id >= a.rows) {
            fill_nan(out, a.k);
        } else if (a.kind % 2) {
            unpack_row(a.weight, out, id, a.k);
        } else {
            std::memcpy(out, static_cast<const T*>(a.weight) + id * a.weight_row_stride,
                        static_cast<size_t>(a.k) * sizeof(T));
        }
    });
}

}  // namespace

void rms_norm(const NormArgs* a) {
    if (a->residual) {
        a->dtype == kBFloat16 ? add_rms_rows<uint16_t>(*a) : add_rms_rows<float>(*a);
    } else {
        a->dtype == kBFloat16 ? rms_norm_rows<uint16_t>(*a) : rms_norm_rows<float>(*a);
    }
}

void layer_norm(const LayerNormArgs* a) {
    a->dtype == kBFloat16 ? layer_norm_rows<uint16_t>(*a) : layer_norm_rows<float>(*a);
}

void rope(const RopeArgs* a) { a->dtype == kBFloat16 ? rope_tokens<uint16_t>(*a) : rope_tokens<float>(*a); }

void silu_and_mul(const SiluArgs* a) { a->dtype == kBFloat16 ? silu_rows<uint16_t>(*a) : silu_rows<float>(*a); }

void embedding(const EmbeddingArgs* a) {
    a->kind / 2 == kBFloat16 ? embedding_rows<uint16_t>(*a) : embedding_rows<float>(*a);
}

}  // namespace aok::AOK_NS
