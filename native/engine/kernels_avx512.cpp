// The kernels for one instruction set. No standard-library templates here: their code would be merged with other
// translation units' and could bring this one's instructions to a CPU without them.
#include "simd_avx512.h"
#define OL_TABLE avx512_kernels
#define OL_NAME "avx512"
#include "kernels.inl"
