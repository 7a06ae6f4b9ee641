// The kernels for one instruction set. No standard-library templates here: their code would be merged with other
// translation units' and could bring this one's instructions to a CPU without them.
#define OL_VNNI
#include "simd_avx512.h"
#define OL_TABLE avx512vnni_kernels
#define OL_NAME "avx512vnni"
#include "kernels.inl"
