/* What NVRTC, which brings no headers, lacks of <cstdint>, <climits> and <cmath>.  LP64, as on every 64-bit Linux. */
#ifndef OUTLAST_CUDA_RTC_H
#define OUTLAST_CUDA_RTC_H
#ifdef __CUDACC_RTC__

typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef long intptr_t;
typedef unsigned long uintptr_t;
static_assert(sizeof(int64_t) == 8 && sizeof(void *) == 8, "LP64");

#define INT8_MIN (-128)
#define INT8_MAX 127
#define UINT8_MAX 255
#define INT16_MIN (-32767 - 1)
#define INT16_MAX 32767
#define UINT16_MAX 65535
#define INT32_MIN (-2147483647 - 1)
#define INT32_MAX 2147483647
#define UINT32_MAX 4294967295u
#define INT64_MIN (-9223372036854775807l - 1)
#define INT64_MAX 9223372036854775807l
#define UINT64_MAX 18446744073709551615ul

/* Builtins of gcc that operators use; those of them that are constants stay constant expressions. */
#define __builtin_memcpy memcpy
#define __builtin_memmove memmove
#define __builtin_memset memset
#define __builtin_inff() __builtin_bit_cast(float, 0x7f800000)
#define __builtin_inf() __builtin_bit_cast(double, 0x7ff0000000000000l)
#define __builtin_huge_valf __builtin_inff
#define __builtin_huge_val __builtin_inf
#define __builtin_nanf(text) __builtin_bit_cast(float, 0x7fc00000)
#define __builtin_nan(text) __builtin_bit_cast(double, 0x7ff8000000000000l)
#define __builtin_signbit signbit
#define __builtin_clz __clz
#define __builtin_clzll __clzll
#define __builtin_popcount __popc
#define __builtin_popcountll __popcll
#define __builtin_sqrt sqrt
#define __builtin_sqrtf sqrtf
#define __builtin_fma fma
#define __builtin_fmaf fmaf
#define __builtin_floor floor
#define __builtin_floorf floorf
#define __builtin_ceil ceil
#define __builtin_ceilf ceilf
#define __builtin_trunc trunc
#define __builtin_truncf truncf
#define __builtin_rint rint
#define __builtin_rintf rintf
#define __builtin_nearbyint nearbyint
#define __builtin_nearbyintf nearbyintf
#define __builtin_round round
#define __builtin_roundf roundf
#define __builtin_fabs fabs
#define __builtin_fabsf fabsf
#define __builtin_fmod fmod
#define __builtin_fmodf fmodf
#define __builtin_remainder remainder
#define __builtin_remainderf remainderf
#define __builtin_copysign copysign
#define __builtin_copysignf copysignf
#define __builtin_fmin fmin
#define __builtin_fminf fminf
#define __builtin_fmax fmax
#define __builtin_fmaxf fmaxf
#define __builtin_exp exp
#define __builtin_expf expf
#define __builtin_exp2 exp2
#define __builtin_exp2f exp2f
#define __builtin_expm1 expm1
#define __builtin_expm1f expm1f
#define __builtin_log log
#define __builtin_logf logf
#define __builtin_log2 log2
#define __builtin_log2f log2f
#define __builtin_log10 log10
#define __builtin_log10f log10f
#define __builtin_log1p log1p
#define __builtin_log1pf log1pf
#define __builtin_pow pow
#define __builtin_powf powf
#define __builtin_sin sin
#define __builtin_sinf sinf
#define __builtin_cos cos
#define __builtin_cosf cosf
#define __builtin_tan tan
#define __builtin_tanf tanf
#define __builtin_asin asin
#define __builtin_asinf asinf
#define __builtin_acos acos
#define __builtin_acosf acosf
#define __builtin_atan atan
#define __builtin_atanf atanf
#define __builtin_sinh sinh
#define __builtin_sinhf sinhf
#define __builtin_cosh cosh
#define __builtin_coshf coshf
#define __builtin_tanh tanh
#define __builtin_tanhf tanhf
#define __builtin_asinh asinh
#define __builtin_asinhf asinhf
#define __builtin_acosh acosh
#define __builtin_acoshf acoshf
#define __builtin_atanh atanh
#define __builtin_atanhf atanhf
#define __builtin_atan2 atan2
#define __builtin_atan2f atan2f
#define __builtin_erf erf
#define __builtin_erff erff
#define __builtin_erfc erfc
#define __builtin_erfcf erfcf
#define __builtin_lgamma lgamma
#define __builtin_lgammaf lgammaf
#define __builtin_tgamma tgamma
#define __builtin_tgammaf tgammaf

#ifndef INFINITY
#define INFINITY __builtin_inff()
#endif
#ifndef NAN
#define NAN __builtin_nanf("")
#endif

#endif
#endif
