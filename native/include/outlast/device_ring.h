/* The ring between a host and a persistent kernel: what stands beside ol_task, ol_slot and ol_sequence on a device.
 *
 * Tasks, outcomes and ol_device_ring lie in pinned host memory that the device reads and writes in place; ol_device_state,
 * the marks and the slot table lie in device memory.  One host thread at a time submits (it holds a lock); each block of
 * the kernel has a leader, its thread 0, and runs one task at a time with all of its threads.
 *
 *   word                 written by              ordering
 *   task body            the host                plain, before seq
 *   task.seq             the host: := ticket     release ("full"); leaders read with acquire at system scope
 *                        leader: := ticket+cap-1 release at system scope ("empty"), after it claimed the ticket
 *   state.head           leaders, CAS            acquire/release at device scope; the number of tickets claimed.  A leader
 *                        copies the body and looks whether the task may run *before* the CAS: while head is ticket - 1
 *                        nobody else can have handed the slot back, so what it copied is whole if the CAS succeeds
 *   outcome.word         the leader that ran it  ticket << 1 | failed, release at system scope, after __syncthreads(), so
 *                        that it covers the writes of the whole block; status, times and text before it
 *   marks[slot]          the same                ticket << 1 | failed, for other leaders
 *   state.completed      any leader, CAS forward device scope; all tickets <= completed are done.  A fence between the
 *                        mark and the look at the next one: of two leaders that finish neighbours, one sees the other's
 *   ring.command         the host                relaxed; leaders look at it every few turns
 *   ring.heartbeat       the host                relaxed, raised many times per heartbeat_ns
 *   ring.left[block]     the leader              launch << 8 | reason, release, the last thing it does
 *   gate words           a stream of the caller  cuStreamWriteValue64; leaders read with acquire at system scope
 *   plan_failed[place]   host or leader          number of a plan of which nothing more shall run
 *   slots                the host                by copies on its own stream: fn of the idle side, then word, in order
 *
 * Tickets are claimed in order, and only when they may run (`after` reached, gate open).  So a leader that waits holds
 * nothing, the kernel can leave at any such moment, and a ticket behind a gate is never claimed before the gate opened.
 * The host gives out ticket t only when t - capacity is done and its outcome was looked at.
 */
#ifndef OUTLAST_DEVICE_RING_H
#define OUTLAST_DEVICE_RING_H

#include "outlast/task.h"

#define OL_DEVICE_BLOCKS_MAX 4
#define OL_DEVICE_PLANS 64

/* ring.command */
#define OL_COMMAND_RUN 0
#define OL_COMMAND_LEAVE 1

/* why a block left; low byte of ring.left */
#define OL_LEFT_COMMAND 1
#define OL_LEFT_IDLE 2
#define OL_LEFT_HEARTBEAT 3

/* task.op of a gate: may be claimed once the word at arg[0] has reached arg[1]; runs no operator */
#define OL_OP_GATE 0xffffffff
/* task.plan of a task that the host knows to be in vain: it completes with OL_DEPENDENCY */
#define OL_PLAN_DOOMED 0xffffffff

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ol_outcome {
    uint64_t word;
    int32_t status;
    uint32_t worker;      /* number of the block */
    uint64_t began;       /* nanoseconds of the device's clock */
    uint64_t ended;
    char text[224];       /* cut from ol_env.error; set only if the task failed */
} ol_outcome;

typedef struct ol_device_ring {
    /* line 0: the host, before a launch */
    uint64_t tasks;       /* address of ol_task[capacity] */
    uint64_t outcomes;    /* address of ol_outcome[capacity] */
    uint64_t state;       /* address of ol_device_state */
    uint64_t marks;       /* address of uint64_t[capacity] */
    uint64_t slots;       /* address of ol_slot[operators] */
    uint64_t idle_ns;     /* leave after this long without a task; 0 = never */
    uint64_t heartbeat_ns; /* leave when the heartbeat stood still for this long; 0 = never */
    uint32_t capacity;    /* a power of two */
    uint32_t operators;
    uint32_t launch;      /* number of this launch */
    uint32_t reserved;
    uint64_t pad0[7];
    /* line 1: the host */
    uint64_t command;
    uint64_t heartbeat;
    uint64_t pad1[14];
    /* line 2: the device */
    uint64_t cursor;      /* state.head when a block left */
    uint64_t left[4];
    uint64_t pad2[11];
    /* lines 3 to 6 */
    uint64_t plan_failed[64];
} ol_device_ring;

typedef struct ol_device_state {
    uint64_t head;
    uint64_t pad0[15];
    uint64_t completed;
    uint64_t pad1[15];
    uint64_t active;      /* the clock when a task was last claimed or ended */
    uint64_t pad2[15];
} ol_device_state;

#ifdef __cplusplus
}
static_assert(sizeof(ol_outcome) == 256, "two lines");
static_assert(sizeof(ol_device_ring) == 7 * 128, "layout of ol_device_ring");
static_assert(sizeof(ol_device_state) == 3 * 128, "one line each");
#endif
#endif
