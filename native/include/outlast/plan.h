/* Layout of a plan that is run as one task, and the executor as other native modules call it.
 *
 * The shipped operator `sequence` (arg[0] = address of an ol_sequence) runs the steps one after the other, each through
 * the slot table.  It looks a step's slot up when the step starts: the flip of a swap may fall between two steps, never
 * into one.  The replaced code stays loaded meanwhile, since the sequence's own ticket is not done (ol_slot).
 * A number that is not in the table, or has no operator, fails the sequence with OL_NO_OPERATOR.
 *
 *   word                    written by
 *   steps, count, slots     whoever made the plan, before submission
 *   failed                  the sequence: index of the step that failed, before it returns that step's status
 *   times                   the sequence, if `times` is not 0: count + 1 readings of the steady clock in nanoseconds,
 *                           before the first step and after each; the caller provides the room
 *   runs                    the sequence, + 1 for each run that ended well (plain: a sequence has one runner at a time)
 */
#ifndef OUTLAST_PLAN_H
#define OUTLAST_PLAN_H

#include "outlast/task.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ol_step {
    uint32_t op;      /* index in the slot table */
    uint32_t level;   /* steps of one level do not depend on each other; levels rise along the plan */
    uint64_t args;    /* becomes arg[0] of the step's task; part = 0, parts = 1 */
} ol_step;

typedef struct ol_sequence {
    uint64_t steps;   /* address of ol_step[count] */
    uint32_t count;
    uint32_t failed;
    uint64_t slots;   /* the address that ol_executor.slots gives */
    uint64_t times;
    uint64_t runs;
} ol_sequence;

/* The executor for another native module of this process: a table of functions, so that nothing is linked across. */
typedef struct ol_executor {
    uint32_t abi;             /* OL_ABI_VERSION of the executor's build; look before calling */
    uint32_t workers;
    uint64_t self;            /* first argument of the functions */
    uint64_t slots;           /* address of the slot table, for ol_sequence */
    uint32_t sequence;        /* index of the operator `sequence` */
    uint32_t reserved;
    /* int32_t (*run_one)(uint64_t self, const ol_task *, double timeout_s, char *text, uint64_t text_bytes):
     * puts one task into the ring and runs tasks until it is done.  Runs it at once, on the calling thread, when none
     * stands before it.  Wakes no worker unless it has to wait.  OL_OK, the task's status with its text, or 1 when the
     * time is over (the task may still run). */
    uint64_t run_one;
    /* int32_t (*run)(uint64_t self, const ol_task *, uint64_t count, double timeout_s, char *text, uint64_t text_bytes):
     * a plan of tasks, `after` counting them from 1; see Executor::run.  Same results. */
    uint64_t run;
} ol_executor;

#ifdef __cplusplus
}
static_assert(sizeof(ol_step) == 16, "layout of ol_step");
static_assert(sizeof(ol_sequence) == 40, "layout of ol_sequence");
static_assert(sizeof(ol_executor) == 48, "layout of ol_executor");
#endif
#endif
