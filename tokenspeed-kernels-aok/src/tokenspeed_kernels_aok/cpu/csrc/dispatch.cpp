// Which instruction sets this build and this CPU have, and the kernels of each. Compiled for the baseline only.
#include <cstring>

#include "abi.h"

namespace aok {
namespace {

struct Variant {
    const char* name;
    const KernelTable* kernels;
    bool (*supported)();
};

bool always() { return true; }

}  // namespace

extern const KernelTable kernels_portable;
#if defined(__x86_64__)
extern const KernelTable kernels_avx2, kernels_avx512f, kernels_avx512_bf16;

namespace {

// __builtin_cpu_supports reads CPUID and, for the wide registers, XCR0: what the CPU has and the OS saves.
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512f() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_bf16() { return has_avx512f() && __builtin_cpu_supports("avx512bf16"); }

const Variant kVariants[] = {
    {"portable", &kernels_portable, always},
    {"avx2", &kernels_avx2, has_avx2},
    {"avx512f", &kernels_avx512f, has_avx512f},
    {"avx512_bf16", &kernels_avx512_bf16, has_avx512_bf16},
};

}  // namespace
#elif defined(__aarch64__)
extern const KernelTable kernels_neon;

namespace {

const Variant kVariants[] = {
    {"portable", &kernels_portable, always},
    {"neon", &kernels_neon, always},
};

}  // namespace
#else
namespace {

const Variant kVariants[] = {{"portable", &kernels_portable, always}};

}  // namespace
#endif

namespace {

struct KernelInfo {
    const char* name;
    size_t args_bytes;
};

#define AOK_INFO(name, Args) {#name, sizeof(Args)},
const KernelInfo kKernels[] = {AOK_KERNELS(AOK_INFO)};
#undef AOK_INFO

#define AOK_CHECK(name, Args) static_assert(alignof(Args) == 8 && sizeof(Args) % 8 == 0, "fields are 8 bytes");
AOK_KERNELS(AOK_CHECK)
#undef AOK_CHECK

}  // namespace
}  // namespace aok

#define AOK_EXPORT extern "C" __attribute__((visibility("default")))

// Variants in rising order of preference.
AOK_EXPORT int64_t aok_variant_count() { return sizeof(aok::kVariants) / sizeof(aok::kVariants[0]); }

AOK_EXPORT const char* aok_variant_name(int64_t variant) { return aok::kVariants[variant].name; }

AOK_EXPORT int64_t aok_variant_supported(int64_t variant) { return aok::kVariants[variant].supported() ? 1 : 0; }

AOK_EXPORT int64_t aok_kernel_count() { return sizeof(aok::kKernels) / sizeof(aok::kKernels[0]); }

AOK_EXPORT const char* aok_kernel_name(int64_t kernel) { return aok::kKernels[kernel].name; }

AOK_EXPORT int64_t aok_kernel_args_bytes(int64_t kernel) {
    return static_cast<int64_t>(aok::kKernels[kernel].args_bytes);
}

// The address of a kernel. The caller has checked that the variant is supported.
AOK_EXPORT void* aok_kernel(int64_t variant, int64_t kernel) {
    void* address;
    std::memcpy(&address, reinterpret_cast<const char*>(aok::kVariants[variant].kernels) + kernel * sizeof(void*),
                sizeof(address));
    return address;
}
