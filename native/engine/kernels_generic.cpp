// The kernels for one instruction set. No standard-library templates here: their code would be merged with other
// translation units' and could bring this one's instructions to a CPU without them.
#include "simd_generic.h"
#define OL_TABLE generic_kernels
#define OL_NAME "generic"
#include "kernels.inl"
