"""The executor's protocol (native/include/outlast/task.h) as small state machines, and a search through all states.

A thread is a program: a dict from the name of a step to a function that does one atomic action on the shared words and
its own registers, and returns the next step's name (None: blocked, try again later). `explore` visits every state that
any interleaving can reach. A step raises `Violation` where an invariant is broken; so does a state from which the end
can no longer be reached (a lost wake-up, a deadlock, a ring that stays full).

Interleavings are sequentially consistent: what weaker orderings allow is left to ThreadSanitizer (ring_stress.cpp).
Time-outs of sleepers are left out on purpose, so that a lost wake-up is not healed by one.

`mutant` names a deliberate mistake; the tests show that each is found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Words = dict[str, Any]
Step = Callable[[Words, Words], str | None]
Program = dict[str, Step]

END = "end"


class Violation(Exception):
    """An invariant does not hold; the text ends with the steps that led there."""


@dataclass
class Thread:
    program: Program
    start: str
    registers: Words


def explore(shared: Words, threads: list[Thread], *, limit: int = 3_000_000) -> int:
    """Visit every reachable state; returns their number. The end is reached when all threads are at `END`."""
    shared_names = list(shared)
    names = [list(thread.registers) for thread in threads]
    first = (tuple(shared.values()), tuple((t.start, tuple(t.registers.values())) for t in threads))
    number = {first: 0}
    states = [first]
    parents = [(0, "")]
    before: list[list[int]] = [[]]
    ends: list[int] = []

    def history(at: int, last: str) -> str:
        steps = [last]
        while at:
            at, step = parents[at]
            steps.append(step)
        return " ".join(reversed(steps))

    at = 0
    while at < len(states):
        shared_now, threads_now = states[at]
        if all(pc == END for pc, _ in threads_now):
            ends.append(at)
        for i, (pc, registers) in enumerate(threads_now):
            if pc == END:
                continue
            words = dict(zip(shared_names, shared_now, strict=True))
            own = dict(zip(names[i], registers, strict=True))
            try:
                following = threads[i].program[pc](words, own)
            except Violation as error:
                raise Violation(f"{error}: {history(at, f'{i}:{pc}')}") from None
            if following is None:
                continue
            moved = (following, tuple(own.values()))
            state = (tuple(words.values()), (*threads_now[:i], moved, *threads_now[i + 1 :]))
            to = number.get(state)
            if to is None:
                to = number[state] = len(states)
                if to > limit:
                    raise AssertionError("the model is too large")
                states.append(state)
                parents.append((at, f"{i}:{pc}"))
                before.append([])
            before[to].append(at)
        at += 1
    good = bytearray(len(states))
    stack = ends[:]
    for end in ends:
        good[end] = 1
    while stack:
        for origin in before[stack.pop()]:
            if not good[origin]:
                good[origin] = 1
                stack.append(origin)
    if not all(good):
        stuck = next(i for i, ok in enumerate(good) if not ok)
        raise Violation(f"stuck, the end can not be reached: {history(stuck, '')}")
    return len(states)


def _put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


# ---- the ring ------------------------------------------------------------------------------------------------------


def ring_words(capacity: int, tasks: int, first: int = 0, outcomes: int | None = None) -> Words:
    """Words of a ring whose next ticket is `first` + 1, and what the model watches (in capitals).

    `outcomes`: entries of done[]. The executor has as many as slots; with more, seq alone guards a slot's reuse.
    """
    places = outcomes or capacity
    done = [0 if first + i < places else first + i + 1 - places for i in range(places)]
    return {
        "tail": first, "head": first, "parked": False, "completed": first,
        "seq": tuple(first + i for i in range(capacity)), "body": (None,) * capacity, "done": tuple(done),
        "FIRST": first, "RAN": (0,) * tasks, "RUNNING": 0, "HELD": False,
        "word": 2, "fn": (1, 0), "flip": 0,
    }  # fmt: skip


def _generation(s: Words, r: Words) -> None:
    r["generation"] = s["word"]


def _claim_steps(capacity: int, mutant: str, claimed: str) -> Program:
    """A producer claims a ticket: r["t"] is the tail it saw, so its ticket is t + 1."""
    mask = capacity - 1

    def read_tail(s: Words, r: Words) -> str:
        r["t"] = s["tail"]
        if mutant == "word before claim":
            _generation(s, r)
        return "p_done"

    def read_done(s: Words, r: Words) -> str | None:
        places = len(s["done"])
        finished = s["done"][r["t"] & (places - 1)]
        if finished + places >= r["t"] + 1 or mutant == "claim without done":
            return "p_seq"
        return "p_tail" if s["tail"] != r["t"] else None  # full: look again

    def read_seq(s: Words, r: Words) -> str | None:
        if s["seq"][r["t"] & mask] == r["t"] or mutant == "claim without seq":
            return "p_claim"
        return "p_tail" if s["tail"] != r["t"] else None

    def claim(s: Words, r: Words) -> str:
        if mutant == "plain claim":
            s["tail"] = r["t"] + 1
            return claimed
        if s["tail"] != r["t"]:
            return "p_tail"
        s["tail"] = r["t"] + 1
        return claimed

    return {"p_tail": read_tail, "p_done": read_done, "p_seq": read_seq, "p_claim": claim}


def producer(capacity: int, tasks: int, mutant: str = "", *, direct: bool = False) -> Thread:
    """Submits `tasks` tasks. `direct`: takes each itself when nothing stands before it, as run_one does."""
    mask = capacity - 1

    def word(s: Words, r: Words) -> str:
        if mutant != "word before claim":
            _generation(s, r)
        return "d_head" if direct else "p_body"

    def take_own(s: Words, r: Words) -> str:
        if s["parked"] and mutant != "direct ignores park":
            return "p_body"
        if s["head"] != r["t"] and mutant != "direct overtakes":
            return "p_body"
        s["head"] = r["t"] + 1
        return "d_seq"

    def hand_back(s: Words, r: Words) -> str:
        r["h"], r["got"], r["gen"] = r["t"], r["t"] + 1, r["generation"]
        s["seq"] = _put(s["seq"], r["t"] & mask, r["t"] + capacity)
        return "x_run"

    def body(s: Words, r: Words) -> str:
        s["body"] = _put(s["body"], r["t"] & mask, (r["t"] + 1, r["generation"]))
        return "p_full"

    def full(s: Words, r: Words) -> str:
        s["seq"] = _put(s["seq"], r["t"] & mask, r["t"] + 1)
        r["left"] -= 1
        return "p_tail" if r["left"] else END

    def executed(s: Words, r: Words) -> str:
        r["left"] -= 1
        return "p_tail" if r["left"] else END

    program = {
        **_claim_steps(capacity, mutant, "p_word"), "p_word": word, "p_body": body, "p_full": full,
        "d_head": take_own, "d_seq": hand_back, **_run_steps(mutant, "d_end"), "d_end": executed,
    }  # fmt: skip
    return Thread(program, "p_tail", {"t": 0, "left": tasks, "generation": 0, **_RUN_REGISTERS})


_RUN_REGISTERS: Words = {"h": 0, "got": 0, "gen": 0, "c": 0}


def _run_steps(mutant: str, after: str) -> Program:
    """Run the task r["got"] of generation r["gen"], that head r["h"] named, and complete it."""

    def run(s: Words, r: Words) -> str:
        ticket = r["h"] + 1
        if r["got"] != ticket:
            raise Violation(f"ticket {ticket} was overwritten before it was copied")
        index = ticket - s["FIRST"] - 1
        if s["RAN"][index]:
            raise Violation(f"ticket {ticket} runs twice")
        if s["HELD"]:
            raise Violation(f"ticket {ticket} starts while the executor is parked")
        s["RAN"] = _put(s["RAN"], index, 1)
        s["RUNNING"] += 1
        _check_code(s, r)
        return "x_ran"

    def ran(s: Words, r: Words) -> str:
        _check_code(s, r)
        s["RUNNING"] -= 1
        return "x_done"

    def done(s: Words, r: Words) -> str:
        places = len(s["done"])
        at = r["h"] & (places - 1)
        if s["done"][at] != max(0, r["h"] + 1 - places):
            raise Violation(f"the outcome of ticket {s['done'][at]} is overwritten by that of {r['h'] + 1}")
        s["done"] = _put(s["done"], at, r["h"] + 1)
        return "x_completed"

    def completed(s: Words, r: Words) -> str:
        r["c"] = s["completed"]
        return "x_next"

    def following(s: Words, r: Words) -> str:
        found = s["done"][r["c"] & (len(s["done"]) - 1)]
        more = found == r["c"] + 1 if mutant == "lap not seen" else found >= r["c"] + 1
        if not more:
            r.update(_RUN_REGISTERS)
            return after
        return "x_advance"

    def advance(s: Words, r: Words) -> str:
        if mutant == "plain completed":
            if s["completed"] > r["c"]:
                raise Violation("completed goes back")
            s["completed"] = r["c"] = r["c"] + 1
        elif s["completed"] == r["c"]:
            s["completed"] = r["c"] = r["c"] + 1
        else:
            r["c"] = s["completed"]
        if s["completed"] > s["head"]:
            raise Violation("completed passed head")
        return "x_next"

    return {
        "x_run": run, "x_ran": ran, "x_done": done, "x_completed": completed, "x_next": following, "x_advance": advance,
    }  # fmt: skip


def _check_code(s: Words, r: Words) -> None:
    """Version n is published as generation n, on side n & 1 of the word n << 1 | side."""
    generation, side = r["gen"] >> 1, r["gen"] & 1
    if s["fn"][side] != generation:
        raise Violation(f"a task of generation {generation} runs version {s['fn'][side]}")


def consumer(capacity: int, mutant: str = "") -> Thread:
    """Takes and runs tasks until all have run."""
    mask = capacity - 1

    def read_head(s: Words, r: Words) -> str | None:
        if s["completed"] - s["FIRST"] == len(s["RAN"]):
            return END
        r["h"] = s["head"]
        if s["parked"]:
            return None
        return "c_seq" if s["seq"][s["head"] & mask] == s["head"] + 1 else None  # nothing there: look again

    def read_seq(s: Words, r: Words) -> str:
        if s["seq"][r["h"] & mask] != r["h"] + 1:
            r["h"] = 0
            return "c_head"
        return "c_claim"

    def claim(s: Words, r: Words) -> str:
        if mutant == "plain take":
            s["head"] = r["h"] + 1
            return "c_copy"
        # The parked bit stands in the same word, so the exchange fails if it was set.
        if s["head"] != r["h"] or (s["parked"] and mutant != "park beside the claim"):
            r["h"] = 0
            return "c_head"
        s["head"] = r["h"] + 1
        return "c_early" if mutant == "release before copy" else "c_copy"

    def copy(s: Words, r: Words) -> str:
        body = s["body"][r["h"] & mask]
        r["got"], r["gen"] = body if body is not None else (0, 0)
        return "x_run" if mutant == "release before copy" else "c_release"

    def release(s: Words, r: Words) -> str:
        s["seq"] = _put(s["seq"], r["h"] & mask, r["h"] + capacity)
        return "c_copy" if mutant == "release before copy" else "x_run"

    program = {
        "c_head": read_head, "c_seq": read_seq, "c_claim": claim, "c_copy": copy, "c_release": release,
        "c_early": release, **_run_steps(mutant, "c_head"),
    }  # fmt: skip
    return Thread(program, "c_head", dict(_RUN_REGISTERS))


# ---- publication and reclaim ---------------------------------------------------------------------------------------


def swapper(swaps: int, mutant: str = "") -> Thread:
    """Publishes `swaps` new versions; each overwrites the side that is not active, whose code is thereby gone."""

    def wait(s: Words, r: Words) -> str | None:
        if mutant == "reclaim without waiting":
            return "s_write"
        reached = s["head"] if mutant == "reclaim at head" else s["completed"]
        return "s_write" if reached >= s["flip"] else None

    def write(s: Words, r: Words) -> str:
        side = (s["word"] & 1) ^ 1
        s["fn"] = _put(s["fn"], side, (s["word"] >> 1) + 1)
        return "s_early" if mutant == "tail before word" else "s_word"

    def publish(s: Words, r: Words) -> str:
        s["word"] = ((s["word"] >> 1) + 1) << 1 | ((s["word"] & 1) ^ 1)
        return "s_flip" if mutant == "tail before word" else "s_tail"

    def tail(s: Words, r: Words) -> str:
        r["tail"] = s["tail"]
        return "s_word" if mutant == "tail before word" else "s_flip"

    def flip(s: Words, r: Words) -> str:
        s["flip"], r["tail"] = r["tail"], 0
        r["left"] -= 1
        return "s_wait" if r["left"] else END

    program = {"s_wait": wait, "s_write": write, "s_word": publish, "s_tail": tail, "s_early": tail, "s_flip": flip}
    return Thread(program, "s_wait", {"left": swaps, "tail": 0})


# ---- park ----------------------------------------------------------------------------------------------------------


def parker(mutant: str = "") -> Thread:
    """Parks, holds the device for a moment, and resumes."""

    def park(s: Words, r: Words) -> str:
        s["parked"] = True
        r["cursor"] = s["head"]
        return "k_held" if mutant == "park without waiting" else "k_wait"

    def wait(s: Words, r: Words) -> str | None:
        return "k_held" if s["completed"] >= r["cursor"] else None

    def held(s: Words, r: Words) -> str:
        if s["RUNNING"]:
            raise Violation("a task runs on a parked executor")
        s["HELD"] = True
        return "k_resume"

    def resume(s: Words, r: Words) -> str:
        s["HELD"] = s["parked"] = False
        if mutant == "resume forgets":
            s["parked"] = True
        r["cursor"] = 0
        return END

    return Thread({"k_park": park, "k_wait": wait, "k_held": held, "k_resume": resume}, "k_park", {"cursor": 0})


# ---- sleep and wake ------------------------------------------------------------------------------------------------


def sleep_words(tasks: int) -> Words:
    """`published` stands for seq or done[], whatever is looked for; `WOKEN` counts futex wake-ups."""
    return {"published": 0, "taken": 0, "sleepers": 0, "signal": 0, "tasks": tasks}


def publisher(tasks: int, mutant: str = "") -> Thread:
    """Publishes, then looks for sleepers."""

    def publish(s: Words, r: Words) -> str:
        s["published"] += 1
        if mutant == "look before publishing":
            return "w_signal" if r["seen"] else "w_next"
        return "w_look"

    def look(s: Words, r: Words) -> str:
        r["seen"] = s["sleepers"]
        if mutant == "look before publishing":
            return "w_publish"
        return "w_signal" if r["seen"] else "w_next"

    def signal(s: Words, r: Words) -> str:
        if mutant != "wake without signal":
            s["signal"] += 1
        return "w_next"

    def following(s: Words, r: Words) -> str:
        r["left"] -= 1
        r["seen"] = 0
        if r["left"] == 0:
            return END
        return "w_look" if mutant == "look before publishing" else "w_publish"

    start = "w_look" if mutant == "look before publishing" else "w_publish"
    program = {"w_publish": publish, "w_look": look, "w_signal": signal, "w_next": following}
    return Thread(program, start, {"left": tasks, "seen": 0})


def sleeper(mutant: str = "") -> Thread:
    """A worker: takes what there is, else sleeps until the signal moves. Nobody wakes it for the end of all tasks."""

    def look(s: Words, r: Words) -> str:
        if s["taken"] < s["published"]:
            s["taken"] += 1
            return "z_look"
        if s["taken"] == s["tasks"]:
            return END
        if mutant == "signal read late":
            return "z_raise_late"
        return "z_raise"

    def up(s: Words, r: Words) -> str:
        s["sleepers"] += 1
        return "z_signal"

    def up_late(s: Words, r: Words) -> str:
        s["sleepers"] += 1
        return "z_again"

    def signal(s: Words, r: Words) -> str:
        r["seen"] = s["signal"]
        return "z_sleep" if mutant in ("no second look", "signal read late") else "z_again"

    def again(s: Words, r: Words) -> str:
        if s["taken"] < s["published"] or s["taken"] == s["tasks"]:
            return "z_down"
        return "z_signal" if mutant == "signal read late" else "z_sleep"

    def sleep(s: Words, r: Words) -> str | None:
        # A worker that finds everything taken may sleep for ever: that is no loss.
        if s["signal"] != r["seen"] or s["taken"] == s["tasks"]:
            return "z_down"
        return None

    def down(s: Words, r: Words) -> str:
        s["sleepers"] -= 1
        r["seen"] = 0
        return "z_look"

    program = {
        "z_look": look, "z_raise": up, "z_raise_late": up_late, "z_signal": signal, "z_again": again,
        "z_sleep": sleep, "z_down": down,
    }  # fmt: skip
    return Thread(program, "z_look", {"seen": 0})


# ---- workers that leave by themselves --------------------------------------------------------------------------------


def away_words(tasks: int) -> Words:
    return {"tail": 0, "taken": 0, "away": 0, "gone": False, "lock": False, "tasks": tasks}


def leaving_worker(mutant: str = "") -> Thread:
    """Takes tasks; when it finds none it may leave, which it takes back if the tail moved meanwhile."""

    def look(s: Words, r: Words) -> str:
        if s["taken"] < s["tail"]:
            s["taken"] += 1
            return "l_look"
        if s["taken"] == s["tasks"]:
            return END
        r["tail"] = s["tail"]
        return "l_lock"

    def lock(s: Words, r: Words) -> str | None:
        if s["lock"]:
            return None
        s["lock"] = True
        return "l_away"

    def away(s: Words, r: Words) -> str:
        s["away"] = 1
        return "l_check"

    def check(s: Words, r: Words) -> str:
        if s["tail"] != r["tail"] and mutant != "leave without a second look":
            s["away"] = 0
            s["lock"] = False
            r["tail"] = 0
            return "l_look"
        s["lock"] = False
        return "l_leave"

    def leave(s: Words, r: Words) -> str | None:
        if s["lock"]:
            return None
        if s["away"] == 0:  # brought back before it was gone
            r["tail"] = 0
            return "l_look"
        s["gone"] = True
        return "l_gone"

    def gone(s: Words, r: Words) -> str | None:
        if s["gone"]:
            return None
        r["tail"] = 0
        return "l_look"

    program = {"l_look": look, "l_lock": lock, "l_away": away, "l_check": check, "l_leave": leave, "l_gone": gone}
    return Thread(program, "l_look", {"tail": 0})


def announcing_producer(tasks: int, mutant: str = "") -> Thread:
    """Submits, then looks whether the workers are away and brings them back."""

    def submit(s: Words, r: Words) -> str:
        s["tail"] += 1
        return "a_next" if mutant == "submit after the look" else "a_look"

    def look(s: Words, r: Words) -> str:
        if s["away"]:
            return "a_lock"
        return "a_submit" if mutant == "submit after the look" else "a_next"

    def lock(s: Words, r: Words) -> str | None:
        if s["lock"]:
            return None
        s["away"] = 0  # one action: all of it is under the lock
        s["gone"] = False
        return "a_submit" if mutant == "submit after the look" else "a_next"

    def following(s: Words, r: Words) -> str:
        r["left"] -= 1
        if r["left"] == 0:
            return END
        return "a_look" if mutant == "submit after the look" else "a_submit"

    start = "a_look" if mutant == "submit after the look" else "a_submit"
    return Thread({"a_submit": submit, "a_look": look, "a_lock": lock, "a_next": following}, start, {"left": tasks})
