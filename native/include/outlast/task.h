/* Layouts of the executor: task, slot-table entry, operator calling convention.
 *
 * Plain C, little endian, no dependencies: shared by C++, by operators compiled at run time and by
 * a numpy dtype (outlast.core.layout) that is compared with it field by field.
 *
 * Ring protocol. `capacity` is a power of two; ticket t (1, 2, 3 ...; 0 = "none") lives in
 * slot (t - 1) & (capacity - 1).
 *
 *   word              written by                 ordering
 *   ring.tail         producer, compare-and-swap seq_cst; claims ticket tail + 1
 *   task body         the claiming producer      plain, before seq; `after` relaxed, so that a thread which helps out
 *                                                can look whether the next task may run before it claims it
 *   task.seq          producer: := ticket        release ("full");  consumer reads with acquire
 *                     consumer: := ticket+cap-1  release ("empty"), only after the body was copied out
 *   ring.head         tasks claimed << 1 | parked.  consumer, compare-and-swap acquire/relaxed; claims the task to
 *                     copy.  park sets the lowest bit and resume clears it (seq_cst): every claim started before
 *                     fails, so the number read then is exact
 *   done[slot]        the worker that ran it     ticket << 1 | failed, one seq_cst store, so that nobody reads the
 *                                                outcome of another ticket; code and text are kept beside the ring
 *   ring.completed    any worker, CAS forward    seq_cst; all tickets <= completed are done.  The store of
 *                     done[] and the loads that look for the next finished ticket are seq_cst, so that of two workers
 *                     which finish neighbouring tickets at once at least one sees the other's
 *   away              why the workers left (asked, idle, silent host), 0 = they are there.  An idle worker sets it
 *                     (seq_cst), reads ring.tail again and takes it back if that moved; who submits moves the tail,
 *                     then reads away (both seq_cst) and starts the workers again: one of the two sees the other
 *   beats             the host, + 1 (relaxed); a worker that sees neither beats nor ring.tail move for the time-out
 *                     takes the host for hung, finishes its task and leaves
 *   sleepers, signal  a thread about to sleep raises sleepers (seq_cst), reads signal, looks again, then waits
 *                     on signal; whoever publishes work or a completion looks at sleepers (seq_cst) afterwards
 *
 * A producer that will run its task itself (run_one) may skip the slot: when it has claimed ticket t and head is t - 1,
 * it moves head on to t as a consumer would and stores seq := t - 1 + cap.  The slot never read "full", so that no
 * consumer can have claimed it.
 *
 * A producer may claim ticket t only when ticket t - capacity is done, so a done[] entry is never
 * overtaken and at most `capacity` tasks are outstanding.  `completed` may lag behind done[], even by
 * a whole lap: whoever advances it takes a later ticket in the place as proof of the earlier one.
 * Consumers claim in ticket order; a task whose `after` is not yet reached waits in the worker that
 * claimed it.  A thread that only helps out while it waits has a deadline of its own and leaves such a
 * task alone.  Since after < ticket (submission refuses others), the lowest unfinished ticket can
 * always run: no deadlock, whatever the number of workers.
 */
#ifndef OUTLAST_TASK_H
#define OUTLAST_TASK_H

#ifdef __cplusplus
#ifdef __CUDACC_RTC__ /* NVRTC has no headers of its own */
#include "outlast/cuda/rtc.h"
#else
#include <cstdint>
#endif
extern "C" {
#else
#include <stdint.h>
#endif

#define OL_ABI_VERSION 1u

/* status of a completed ticket; operators return OL_OK or a negative value of their own */
#define OL_OK 0
#define OL_FAILED (-1)          /* the operator reported an error; text in ol_env.error */
#define OL_NO_OPERATOR (-2)     /* the slot is empty or its generation is gone */
#define OL_DEPENDENCY (-3)      /* the ticket named in `after`, or an earlier task of its plan, failed; not run */

typedef struct ol_task {
    uint64_t seq;         /* ring sequence word; an operator finds its own ticket here */
    uint32_t op;          /* index in the slot table */
    uint32_t generation;  /* low half of the publishing word, read by the producer after it claimed the ticket */
    uint64_t after;       /* wait until every ticket <= after is done; 0 = no wait */
    uint16_t part;        /* this task is part `part` of `parts` equal shares of one operation */
    uint16_t parts;
    uint32_t plan;        /* number of the plan it belongs to, filled at submission; once a task of a plan failed,
                             the rest of the plan is completed with OL_DEPENDENCY without being run.  0 = none */
    uint64_t arg[4];      /* operator arguments: numbers, or addresses of argument structs */
} ol_task;

/* What a worker lends an operator while it runs. */
typedef struct ol_env {
    uint32_t worker;      /* number of the worker (0 = the assisting caller) */
    uint32_t reserved;
    char error[240];      /* NUL-terminated text; set it before returning a negative status */
} ol_env;

/* Every operator, prebuilt or compiled at run time.  Must not throw and must not keep `task` or `env`. */
typedef int32_t (*ol_op_fn)(const ol_task *task, ol_env *env);

/* Slot table entry.  word = (generation << 1) | active;  fn[word & 1] is the current operator.
 * swap: write fn[inactive], store word (seq_cst), then read ring.tail (seq_cst) into flip_ticket.  A producer
 * claims its ticket first (seq_cst) and reads word afterwards, so a ticket above flip_ticket carries the new
 * generation.  A task runs fn[task.generation & 1].  The inactive side may be overwritten or unloaded only when
 * ring.completed >= flip_ticket. */
typedef struct ol_slot {
    uint64_t word;
    uint64_t fn[2];
    uint64_t flip_ticket;
    uint32_t abi;         /* OL_ABI_VERSION of the operator's build; another value is refused */
    uint32_t reserved;
    uint64_t calls;
    uint64_t failures;    /* of those calls */
    uint64_t pad;
} ol_slot;

#ifdef __cplusplus
}
static_assert(sizeof(ol_task) == 64, "a task is one cache line");
static_assert(sizeof(ol_slot) == 64, "a slot is one cache line");
static_assert(sizeof(ol_env) == 248, "layout of ol_env");
#endif
#endif
