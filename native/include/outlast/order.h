/* Memory operations whose order matters, by name; for operators, for the persistent kernel, and for any host compiler.
 *
 *   _system   seen in this order by the host and by the whole device
 *   _device   seen in this order by the blocks of one device (on the host: the same as _system)
 *
 * Words are naturally aligned, so each operation is one access.
 */
#ifndef OUTLAST_ORDER_H
#define OUTLAST_ORDER_H
#include "outlast/dialect.h"

#ifdef __CUDACC__
OL_DEVICE uint64_t ol_acquire_system(const uint64_t *p) {
    uint64_t v;
    asm volatile("ld.acquire.sys.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
OL_DEVICE void ol_release_system(uint64_t *p, uint64_t v) {
    asm volatile("st.release.sys.b64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
OL_DEVICE uint64_t ol_load_system(const uint64_t *p) {
    uint64_t v;
    asm volatile("ld.relaxed.sys.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
OL_DEVICE void ol_store_system(uint64_t *p, uint64_t v) {
    asm volatile("st.relaxed.sys.b64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
OL_DEVICE uint64_t ol_acquire_device(const uint64_t *p) {
    uint64_t v;
    asm volatile("ld.acquire.gpu.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
OL_DEVICE void ol_release_device(uint64_t *p, uint64_t v) {
    asm volatile("st.release.gpu.b64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
OL_DEVICE uint64_t ol_load_device(const uint64_t *p) {
    uint64_t v;
    asm volatile("ld.relaxed.gpu.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
OL_DEVICE void ol_store_device(uint64_t *p, uint64_t v) {
    asm volatile("st.relaxed.gpu.b64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
/* Compare and swap, acquire and release; gives what stood there. */
OL_DEVICE uint64_t ol_exchange_if_device(uint64_t *p, uint64_t expected, uint64_t desired) {
    uint64_t v;
    asm volatile("atom.acq_rel.gpu.cas.b64 %0, [%1], %2, %3;" : "=l"(v) : "l"(p), "l"(expected), "l"(desired) : "memory");
    return v;
}
/* Between a store and a later load of another word, which none of the other orders keeps apart. */
OL_DEVICE void ol_fence_device() { asm volatile("fence.sc.gpu;" ::: "memory"); }
/* Between loads: what was read before is not older than what is read behind it. */
OL_DEVICE void ol_fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
OL_DEVICE uint64_t ol_clock_ns() {
    uint64_t v;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v)::"memory");
    return v;
}
OL_DEVICE void ol_pause() { __nanosleep(200); }
#else
OL_DEVICE uint64_t ol_acquire_system(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
OL_DEVICE void ol_release_system(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
OL_DEVICE uint64_t ol_load_system(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
OL_DEVICE void ol_store_system(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
OL_DEVICE uint64_t ol_exchange_if_device(uint64_t *p, uint64_t expected, uint64_t desired) {
    __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return expected;
}
OL_DEVICE void ol_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}
#endif

#endif
