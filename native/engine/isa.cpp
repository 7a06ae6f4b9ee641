// Which instruction set runs: cpuid decides, OUTLAST_ISA overrules.
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace outlast::engine {

#if defined(__x86_64__)
static bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
static bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
static bool has_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
#endif

const Kernels *kernels_by_name(const char *name) {
    if (std::strcmp(name, "generic") == 0) return &generic_kernels();
#if defined(__x86_64__)
    if (std::strcmp(name, "avx2") == 0 && has_avx2()) return &avx2_kernels();
    if (std::strcmp(name, "avx512") == 0 && has_avx512()) return &avx512_kernels();
    if (std::strcmp(name, "avx512vnni") == 0 && has_vnni()) return &avx512vnni_kernels();
#endif
    return nullptr;
}

static const Kernels &choose() {
    const char *forced = std::getenv("OUTLAST_ISA");
    if (forced != nullptr && *forced != '\0') {
        const Kernels *chosen = kernels_by_name(forced);
        if (chosen == nullptr)
            throw std::runtime_error("OUTLAST_ISA=" + std::string(forced) +
                                     ": not one of generic, avx2, avx512, avx512vnni, or this CPU does not run it");
        return *chosen;
    }
    for (const char *name : {"avx512vnni", "avx512", "avx2"})
        if (const Kernels *chosen = kernels_by_name(name)) return *chosen;
    return generic_kernels();
}

const Kernels &kernels() {
    static const Kernels &chosen = choose();
    return chosen;
}

}  // namespace outlast::engine
