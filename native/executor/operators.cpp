// Which shipped operators run: cpuid decides, OUTLAST_ISA overrules.
#include "operators.hpp"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#define OL_FAMILIES(f) f(pointwise) f(movement) f(reduce) f(rows) f(matmul) f(attention)
#define OL_WIDE(f) f(pointwise) f(rows) f(matmul) f(attention)    // families with kernels of their own for AVX-512
#define OL_NOT_WIDE(f) f(movement) f(reduce)
#define OL_DECLARE(family) extern const outlast::ShippedTable OL_TABLE_NAME2(family, generic);
OL_FAMILIES(OL_DECLARE)
#if defined(__x86_64__)
#define OL_DECLARE_X86(family)                                                                                         \
    extern const outlast::ShippedTable OL_TABLE_NAME2(family, avx2);
#define OL_DECLARE_AVX512(family) extern const outlast::ShippedTable OL_TABLE_NAME2(family, avx512);
OL_FAMILIES(OL_DECLARE_X86)
OL_WIDE(OL_DECLARE_AVX512)
#endif

namespace outlast {

std::vector<ShippedTable> shipped_tables(const char* isa) {
#define OL_GENERIC(family) OL_TABLE_NAME2(family, generic),
#define OL_AVX2(family) OL_TABLE_NAME2(family, avx2),
#define OL_AVX512(family) OL_TABLE_NAME2(family, avx512),
    if (std::strcmp(isa, "generic") == 0) return {OL_FAMILIES(OL_GENERIC)};
#if defined(__x86_64__)
    if (std::strcmp(isa, "avx2") == 0) return {OL_FAMILIES(OL_AVX2)};
    if (std::strcmp(isa, "avx512") == 0) return {OL_WIDE(OL_AVX512) OL_NOT_WIDE(OL_AVX2)};
#endif
    return {};
}

static bool runs_here(const char* isa) {
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (std::strcmp(isa, "avx2") == 0) return avx2;
    if (std::strcmp(isa, "avx512") == 0)
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    return std::strcmp(isa, "generic") == 0;
}

const char* chosen_isa() {
    const char* forced = std::getenv("OUTLAST_ISA");
    for (const char* isa : {"avx512", "avx2", "generic"}) {
        if (forced != nullptr && *forced != '\0' && std::strcmp(forced, isa) != 0) continue;
        if (runs_here(isa)) return isa;
    }
    throw std::runtime_error("OUTLAST_ISA=" + std::string(forced) + ": not one of generic, avx2, avx512, or this CPU does not run it");
}

}  // namespace outlast
