// Repeats recorded calls of kernels (check_emulated.py) with every variant of a library, and compares all their memory.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace {

using Bytes = std::vector<char>;

bool read_bytes(FILE* file, void* into, size_t count) { return std::fread(into, 1, count, file) == count; }

// The parts of the next recorded call; none at the end of the file.
std::vector<Bytes> next_call(FILE* file) {
    int64_t count = 0;
    if (!read_bytes(file, &count, sizeof count)) return {};
    std::vector<Bytes> parts(count);
    for (Bytes& part : parts) {
        int64_t size = 0;
        if (!read_bytes(file, &size, sizeof size)) std::abort();
        part.resize(size);
        if (!read_bytes(file, part.data(), size)) std::abort();
    }
    return parts;
}

char* aligned_copy(const Bytes& bytes) {
    char* memory = static_cast<char*>(std::aligned_alloc(128, (bytes.size() + 127) / 128 * 128));
    std::memcpy(memory, bytes.data(), bytes.size());
    return memory;
}

struct Tally {
    int64_t calls = 0, bytes = 0, differing = 0;
};

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) return 2;
    void* library = dlopen(argv[1], RTLD_NOW);
    if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 2;
    auto integer = [&](const char* name) { return reinterpret_cast<int64_t (*)()>(dlsym(library, name)); };
    auto text = [&](const char* name) { return reinterpret_cast<const char* (*)(int64_t)>(dlsym(library, name)); };
    auto kernel_at = reinterpret_cast<void* (*)(int64_t, int64_t)>(dlsym(library, "aok_kernel"));
    std::map<std::string, int64_t> kernels;
    for (int64_t i = 0; i < integer("aok_kernel_count")(); ++i) kernels[text("aok_kernel_name")(i)] = i;

    bool equal = true;
    for (int64_t variant = 0; variant < integer("aok_variant_count")(); ++variant) {
        FILE* file = std::fopen(argv[2], "rb");
        if (!file) return 2;
        std::map<std::string, Tally> tallies;
        for (auto parts = next_call(file); !parts.empty(); parts = next_call(file)) {
            const std::string name(parts[0].begin(), parts[0].end());
            Bytes block = parts[1];
            const size_t buffers = (parts.size() - 3) / 2;
            std::vector<char*> memory;
            for (size_t i = 0; i < buffers; ++i) memory.push_back(aligned_copy(parts[3 + i]));
            const auto* places = reinterpret_cast<const int64_t*>(parts[2].data());
            for (size_t i = 0; i < parts[2].size() / 24; ++i) {
                char* address = memory[places[3 * i + 1]] + places[3 * i + 2];
                std::memcpy(block.data() + 8 * places[3 * i], &address, sizeof address);
            }
            reinterpret_cast<void (*)(const char*)>(kernel_at(variant, kernels.at(name)))(block.data());
            Tally& tally = tallies[name];
            ++tally.calls;
            for (size_t i = 0; i < buffers; ++i) {
                const Bytes& expected = parts[3 + buffers + i];
                tally.bytes += expected.size();
                for (size_t at = 0; at < expected.size(); ++at) tally.differing += memory[i][at] != expected[at];
                std::free(memory[i]);
            }
        }
        std::fclose(file);
        for (const auto& [name, tally] : tallies) {
            equal = equal && tally.differing == 0;
            std::printf("%-8s %s: %lld calls, %lld bytes, %lld differ\n", text("aok_variant_name")(variant),
                        name.c_str(), static_cast<long long>(tally.calls), static_cast<long long>(tally.bytes),
                        static_cast<long long>(tally.differing));
        }
    }
    return equal ? 0 : 1;
}
