/* The persistent kernel: 1 to 4 blocks that take tasks from the ring of device_ring.h until they are told to leave.
 *
 * Built with -rdc=true and linked without LTO, or its calls through pointers would be relative to its own code and could
 * not reach operators of other modules.
 */
#include "outlast/device_ring.h"
#include "outlast/dialect.h"
#include "outlast/order.h"
#include "outlast/plan.h"

/* A read of host memory takes about a microsecond, so a leader pauses for a fraction of that between looks at first. */
#define OL_REST_MIN_NS 100u
#define OL_REST_MAX_NS 4000u
/* Command and heartbeat stand in another line of host memory: looking at them in each turn would double its cost. */
#define OL_LOOK_EVERY 8u

/* What the leader shares with its block. */
struct ol_turn {
    ol_task task;
    ol_env env;
    uint64_t function; /* 0 = nothing to call */
    uint64_t began;
    uint32_t leave;    /* reason, 0 = run the task */
    int32_t status;
    const char *text;  /* set by the leader where no operator ran */
    /* kept by the leader from task to task, so that a busy kernel reads the control lines as rarely as an idle one */
    uint32_t looks;
    uint64_t beat, beat_at;
};

/* Copies a task word by word: the host writes it, so nothing of it may come from a cache. */
OL_DEVICE void ol_copy_task(ol_task *to, const ol_task *from, uint64_t ticket) {
    const uint64_t *source = reinterpret_cast<const uint64_t *>(from);
    uint64_t *target = reinterpret_cast<uint64_t *>(to);
    target[0] = ticket;
#pragma unroll
    for (int i = 1; i < 8; ++i) target[i] = ol_load_system(source + i);
}

/* Whether the task may be claimed now; sets its status if it is not to be run. */
OL_DEVICE bool ol_may_run(const ol_device_ring *ring, ol_device_state *state, ol_turn *turn, const ol_task *slot) {
    const ol_task &task = turn->task;
    if (task.op == OL_OP_GATE) {
        /* The only address that is followed before the claim: it has to be of this task and not half of a later one. */
        ol_fence_system();
        if (ol_load_system(&slot->seq) != task.seq) return false;
        const uint64_t word = ol_acquire_system(reinterpret_cast<const uint64_t *>(task.arg[0]));
        return static_cast<int64_t>(word - task.arg[1]) >= 0;
    }
    if (task.after == 0) return true;
    if (ol_acquire_device(&state->completed) < task.after) return false;
    const uint64_t *marks = reinterpret_cast<const uint64_t *>(ring->marks);
    if (ol_load_device(marks + ((task.after - 1) & (ring->capacity - 1))) == (task.after << 1 | 1)) {
        turn->status = OL_DEPENDENCY;
        turn->text = "the task it waits for failed";
    }
    return true;
}

/* Decides what a claimed task calls. */
OL_DEVICE void ol_look_up(ol_device_ring *ring, ol_turn *turn) {
    const ol_task &task = turn->task;
    turn->function = 0;
    if (turn->status != OL_OK || task.op == OL_OP_GATE) return;
    if (task.plan == OL_PLAN_DOOMED) {
        turn->status = OL_DEPENDENCY;
        turn->text = "the task it waits for failed";
    } else if (task.plan != 0 && ol_load_system(&ring->plan_failed[task.plan % OL_DEVICE_PLANS]) == task.plan) {
        turn->status = OL_DEPENDENCY;
        turn->text = "an earlier task of its plan failed";
    } else {
        const ol_slot *slots = reinterpret_cast<const ol_slot *>(ring->slots);
        if (task.op < ring->operators) turn->function = ol_load_device(&slots[task.op].fn[task.generation & 1]);
        if (turn->function == 0) {
            turn->status = OL_NO_OPERATOR;
            turn->text = "no operator is registered under this number";
        }
    }
}

/* The leader's search for work; returns with a claimed task or a reason to leave. */
OL_DEVICE void ol_next(ol_device_ring *ring, ol_device_state *state, ol_turn *turn) {
    const uint64_t mask = ring->capacity - 1, began = ol_clock_ns();
    ol_task *tasks = reinterpret_cast<ol_task *>(ring->tasks);
    uint32_t rest = OL_REST_MIN_NS;
    turn->leave = 0;
    for (;;) {
        const bool look = turn->looks++ % OL_LOOK_EVERY == 0;
        if (look && ol_load_system(&ring->command) == OL_COMMAND_LEAVE) {
            turn->leave = OL_LEFT_COMMAND;
            return;
        }
        const uint64_t head = ol_load_device(&state->head), ticket = head + 1;
        ol_task *slot = tasks + (head & mask);
        const bool full = ol_acquire_system(&slot->seq) == ticket;
        if (full) {
            turn->status = OL_OK;
            turn->text = nullptr;
            ol_copy_task(&turn->task, slot, ticket);
            if (ol_may_run(ring, state, turn, slot)) {
                if (ol_exchange_if_device(&state->head, head, ticket) != head) continue; /* another leader took it */
                ol_release_system(&slot->seq, ticket + mask);
                ol_look_up(ring, turn);
                turn->began = ol_clock_ns();
                ol_store_device(&state->active, turn->began);
                return;
            }
        }
        const uint64_t now = ol_clock_ns();
        if (look) {
            const uint64_t seen = ol_load_system(&ring->heartbeat);
            if (seen != turn->beat) {
                turn->beat = seen;
                turn->beat_at = now;
            } else if (ring->heartbeat_ns != 0 && now > turn->beat_at && now - turn->beat_at > ring->heartbeat_ns) {
                turn->leave = OL_LEFT_HEARTBEAT;
                return;
            }
            const uint64_t active = ol_load_device(&state->active), since = active > began ? active : began;
            if (!full && ring->idle_ns != 0 && now > since && now - since > ring->idle_ns) {
                turn->leave = OL_LEFT_IDLE;
                return;
            }
        }
        __nanosleep(rest);
        if (rest < OL_REST_MAX_NS) rest *= 2;
    }
}

/* The leader makes a task's outcome known; every thread of the block has ended its part. */
OL_DEVICE void ol_complete(ol_device_ring *ring, ol_device_state *state, ol_turn *turn, uint32_t block) {
    const uint64_t mask = ring->capacity - 1, ticket = turn->task.seq, failed = turn->status != OL_OK;
    const uint64_t word = ticket << 1 | failed;
    ol_outcome *outcome = reinterpret_cast<ol_outcome *>(ring->outcomes) + ((ticket - 1) & mask);
    uint64_t *marks = reinterpret_cast<uint64_t *>(ring->marks);
    outcome->status = turn->status;
    outcome->worker = block;
    outcome->began = turn->began;
    outcome->ended = ol_clock_ns();
    if (failed) {
        const char *text = turn->text != nullptr ? turn->text : turn->env.error;
        uint32_t i = 0;
        for (; i + 1 < sizeof outcome->text && text[i] != '\0'; ++i) outcome->text[i] = text[i];
        outcome->text[i] = '\0';
        if (turn->task.plan != 0 && turn->task.plan != OL_PLAN_DOOMED)
            ol_store_system(&ring->plan_failed[turn->task.plan % OL_DEVICE_PLANS], turn->task.plan);
    }
    ol_release_system(&outcome->word, word);
    ol_release_device(marks + ((ticket - 1) & mask), word);
    ol_fence_device();
    for (;;) { /* a later ticket in a place is proof of the earlier one */
        const uint64_t done = ol_acquire_device(&state->completed);
        if (ol_acquire_device(marks + (done & mask)) >> 1 < done + 1) break;
        ol_exchange_if_device(&state->completed, done, done + 1);
    }
    ol_store_device(&state->active, outcome->ended);
}

/* The operator `sequence`: the steps of one task, each by all threads of the block, with a barrier between levels. */
extern "C" __device__ int32_t sequence(const ol_task *task, ol_env *env) {
    ol_sequence *plan = reinterpret_cast<ol_sequence *>(task->arg[0]);
    const ol_step *steps = reinterpret_cast<const ol_step *>(plan->steps);
    const ol_slot *slots = reinterpret_cast<const ol_slot *>(plan->slots);
    uint64_t *times = reinterpret_cast<uint64_t *>(plan->times);
    const bool leader = threadIdx.x == 0;
    if (times != nullptr && leader) times[0] = ol_clock_ns();
    for (uint32_t first = 0; first < plan->count;) {
        const uint32_t level = steps[first].level;
        uint32_t step = first, failed = 0xffffffffu;
        int32_t status = OL_OK;
        for (; step < plan->count && steps[step].level == level; ++step) {
            const uint64_t word = ol_acquire_device(&slots[steps[step].op].word);
            const uint64_t function = ol_load_device(&slots[steps[step].op].fn[word & 1]);
            ol_task own{};
            own.seq = task->seq;
            own.op = steps[step].op;
            own.generation = static_cast<uint32_t>(word);
            own.parts = 1;
            own.arg[0] = steps[step].args;
            const int32_t ended = function == 0 ? OL_NO_OPERATOR : reinterpret_cast<ol_op_fn>(function)(&own, env);
            if (ended != OL_OK && status == OL_OK) {
                status = ended;
                failed = step;
            }
            if (times != nullptr) {
                __syncthreads();
                if (leader) times[step + 1] = ol_clock_ns();
            }
        }
        if (__syncthreads_or(status != OL_OK)) { /* the same for all threads; the first failing step counts */
            if (leader) plan->failed = 0xffffffffu;
            __syncthreads();
            if (status != OL_OK) atomicMin(&plan->failed, failed);
            __syncthreads();
            return plan->failed == failed ? status : OL_OK;
        }
        first = step;
    }
    if (leader) plan->runs += 1;
    return OL_OK;
}
OL_ENTRY(sequence)

/* Reserves registers: the linker gives the kernel as many as the functions need that may be called through a pointer and
 * were linked with it.  Operators come later, so this one, never called, needs as many as the cap of all of them allows. */
extern "C" __device__ int32_t ol_ballast(const ol_task *task, ol_env *) {
    const volatile uint64_t *in = reinterpret_cast<const volatile uint64_t *>(task->arg[0]);
    volatile uint64_t *out = reinterpret_cast<volatile uint64_t *>(task->arg[1]);
    uint64_t held[OL_BALLAST];
#pragma unroll
    for (int i = 0; i < OL_BALLAST; ++i) held[i] = in[i];
#pragma unroll
    for (int i = 0; i < OL_BALLAST; ++i) out[i] = held[OL_BALLAST - 1 - i] * held[(i * 7) % OL_BALLAST];
    return OL_OK;
}
OL_ENTRY(ol_ballast)

extern "C" __global__ void __launch_bounds__(OL_THREADS) outlast_persistent(ol_device_ring *ring) {
    __shared__ ol_turn turn;
    ol_device_state *state = reinterpret_cast<ol_device_state *>(ring->state);
    const bool leader = threadIdx.x == 0;
    if (leader) {
        turn.env.worker = blockIdx.x;
        turn.looks = 0;
        turn.beat = ol_load_system(&ring->heartbeat);
        turn.beat_at = ol_clock_ns();
    }
    for (;;) {
        if (leader) {
            turn.env.reserved = 0;
            turn.env.error[0] = '\0';
            ol_next(ring, state, &turn);
        }
        __syncthreads();
        if (turn.leave != 0) break;
        if (turn.function != 0) {
            const int32_t status = reinterpret_cast<ol_op_fn>(turn.function)(&turn.task, &turn.env);
            if (status != OL_OK) atomicCAS(&turn.status, OL_OK, status); /* the first failing thread decides */
        }
        __syncthreads();
        if (leader) ol_complete(ring, state, &turn, blockIdx.x);
        __syncthreads(); /* nobody reads `turn` while the leader fills it again */
    }
    if (leader) {
        ol_store_system(&ring->cursor, ol_load_device(&state->head));
        ol_release_system(&ring->left[blockIdx.x], static_cast<uint64_t>(ring->launch) << 8 | turn.leave);
    }
}
