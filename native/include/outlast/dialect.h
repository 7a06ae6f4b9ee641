/* The operator dialect: a subset of CUDA C++ that any host C++ compiler builds as well.
 *
 * An operator is written once:
 *
 *     OL_OPERATOR(scale, scale_args, a) {
 *         for (uint32_t i = blockIdx.x; i < a->rows; i += gridDim.x)          // rows are shared out over blocks
 *             for (uint32_t j = threadIdx.x; j < a->width; j += blockDim.x)   // a row over the threads of a block
 *                 a->out[i * a->width + j] = a->factor * a->in[i * a->width + j];
 *         return OL_OK;
 *     }
 *
 * On the host a block has one thread (blockDim = 1) and the task's parts are the blocks, so the inner loop is a plain
 * loop that vectorises.  `a` is the struct whose address is task.arg[0].
 */
#ifndef OUTLAST_DIALECT_H
#define OUTLAST_DIALECT_H
#include "outlast/task.h"

#ifndef __CUDACC_RTC__
#include <cstdio>
#include <cstring>
#endif

struct ol_dim3 {
    uint32_t x, y, z;
};

#ifndef __CUDACC__
#define __device__
#define __global__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
static constexpr ol_dim3 threadIdx{0, 0, 0};
static constexpr ol_dim3 blockDim{1, 1, 1};
static inline void __syncthreads() {}
#endif

#ifdef __CUDACC__
#define OL_EXPORT __device__
#define OL_DEVICE __device__ __forceinline__ /* a specialisation may not be static */
/* The address of a device function is known only to code that was loaded with it: the module shows it in a variable. */
#define OL_ENTRY(name) extern "C" __device__ ol_op_fn ol_entry_##name = &name;
#else
#define OL_EXPORT __attribute__((visibility("default")))
#define OL_DEVICE inline __attribute__((always_inline))
#define OL_ENTRY(name)
#endif

/* Operator templates live in a namespace of their own for each instruction set they are built for: two copies under one
 * name would be merged by the linker, and a CPU could meet instructions that it lacks. */
#ifndef OL_NAMESPACE
#define OL_NAMESPACE ol_ops
#endif
namespace OL_NAMESPACE {}
using namespace OL_NAMESPACE;

#ifdef __CUDACC_RTC__
#include "outlast/cuda/say.h"
#endif

/* This thread's share of n equal pieces of work: `for (int64_t i = w.begin; i < w.end; i += w.step)`.
 * On the host a part is one contiguous run with step 1, so that the loop vectorises; on a device neighbouring threads
 * take neighbouring pieces. */
struct ol_share {
    int64_t begin, end;
#ifdef __CUDACC__
    int64_t step;
#else
    static constexpr int64_t step = 1;
#endif
};
OL_DEVICE ol_share ol_share_of(int64_t n, ol_dim3 block, ol_dim3 grid) {
#ifdef __CUDACC__
    return {static_cast<int64_t>(block.x) * blockDim.x + threadIdx.x, n, static_cast<int64_t>(grid.x) * blockDim.x};
#else
    return {n * block.x / grid.x, n * (block.x + 1) / grid.x};
#endif
}

/* An operator from a function template: `function(const Args *, ol_dim3 block, ol_dim3 grid, ol_env *) -> int32_t`.
 * Shipped operators are compiled several times, once per instruction set: OL_PREBUILT then keeps their names apart. */
#ifdef OL_PREBUILT
#define OL_LINKAGE static
#else
#define OL_LINKAGE extern "C" OL_EXPORT
#endif
#define OL_INSTANCE(name, Args, ...)                                                                                   \
    OL_LINKAGE int32_t name(const ol_task *task, ol_env *env) {                                                        \
        return __VA_ARGS__(reinterpret_cast<const Args *>(task->arg[0]), ol_dim3{task->part, 0, 0},                    \
                           ol_dim3{task->parts == 0 ? 1u : task->parts, 1, 1}, env);                                   \
    }                                                                                                                  \
    OL_ENTRY(name)

#ifdef __CUDACC__
#define OL_BODY static __device__ inline
#else
#define OL_BODY static inline
#endif
#define OL_OPERATOR(name, Args, a)                                                                                     \
    OL_BODY int32_t name##_body(const Args *a, ol_dim3 blockIdx, ol_dim3 gridDim, ol_env *environment);                \
    extern "C" OL_EXPORT int32_t name(const ol_task *task, ol_env *env) {                                              \
        return name##_body(reinterpret_cast<const Args *>(task->arg[0]), ol_dim3{task->part, 0, 0},                    \
                           ol_dim3{task->parts == 0 ? 1u : task->parts, 1, 1}, env);                                   \
    }                                                                                                                  \
    OL_ENTRY(name)                                                                                                     \
    OL_BODY int32_t name##_body(const Args *a, [[maybe_unused]] ol_dim3 blockIdx, [[maybe_unused]] ol_dim3 gridDim,    \
                                [[maybe_unused]] ol_env *environment)

/* Ends the operator with an error text (integers and strings only: a device formats nothing else).  On a device the
 * first thread of the block that fails writes it.  A thread may fail alone only if no __syncthreads() follows. */
#ifdef __CUDACC_RTC__
#define OL_SAY(...) ol_say(environment, __VA_ARGS__)
#else
#define OL_SAY(...) std::snprintf(environment->error, sizeof environment->error, __VA_ARGS__)
#endif
#define OL_FAIL(...)                                                                                                   \
    do {                                                                                                               \
        OL_SAY(__VA_ARGS__);                                                                                           \
        return OL_FAILED;                                                                                              \
    } while (0)

/* A unit compiled at run time says which ABI it was built for. */
#define OL_UNIT extern "C" OL_EXPORT const uint32_t outlast_abi = OL_ABI_VERSION

#endif
