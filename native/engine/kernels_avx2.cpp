// The kernels for one instruction set. No standard-library templates here: their code would be merged with other
// translation units' and could bring this one's instructions to a CPU without them.
#include "simd_avx2.h"
#define OL_TABLE avx2_kernels
#define OL_NAME "avx2"
#include "kernels.inl"
