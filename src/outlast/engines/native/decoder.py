"""The decoder: sequences, and each step of a batch as a plan of executor tasks.

A step goes: `plan` → the tasks run (in the executor, or `Decoder.run` in a test) → `commit`, or `abandon` if they
did not. The arithmetic and its guarantees are in native/engine (kernels.h, step.h); this layer types it and turns
refusals of the extension into the package's errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from outlast.core.errors import OperatorFailed, UsageError
from outlast.engines.native import _native
from outlast.engines.native.architecture import ModelConfig
from outlast.engines.native.weights import Weights
from outlast.engines.protocol import SamplingParams

Geometry: TypeAlias = _native.KvGeometry

#: How quantized weights are multiplied: with activations as floats, as two int8 planes (about 16 bits), or as one.
Compute = Literal["f32", "int8x2", "int8"]
COMPUTE: Compute = "int8x2"


@dataclass(frozen=True, slots=True)
class Item:
    """One sequence's share of a step: `positions` new ones, after computing the last `recheck` old ones again."""

    handle: int
    positions: int
    recheck: int = 0
    drafts: tuple[int, ...] = ()  #: guesses of the tokens behind the last known one, which must be in the step


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A planned step, in memory that the decoder owns until the next `plan`.

    `address` points to `count` `ol_task`s. `after` in them is relative: the number (from 1) of the task of this plan
    up to which all must be done, 0 = none; add the ticket before the first task to those that are not 0.
    `writes_address` points to `writes_count` `ol_step_write`s, one per sequence of the batch, in its order, each
    followed by one per draft; the last level of tasks fills their states.

    Plans of the same `number` (from 1) have the same tasks: they are built once for each way of cutting the levels,
    and what they work on is patched.
    """

    address: int
    count: int
    writes_address: int
    writes_count: int
    number: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a committed step did for one sequence."""

    handle: int
    token: int | None  #: None: nothing was sampled (prefill goes on, or the state was refused)
    logprob: float
    top: tuple[tuple[int, float], ...]
    verified: bool  #: False: recomputed KV rows differ from the stored ones, which were put back; rewind and recompute
    finite: bool  #: False: the logits are not finite; the sequence cannot go on
    more: tuple[tuple[int, float, tuple[tuple[int, float], ...]], ...] = ()  #: tokens that drafts let through: as above


def compute_mode(name: str) -> Compute:
    """The mode called `name`. Raises `UsageError` for an unknown one."""
    for mode in get_args(Compute):
        if name == mode:
            return mode  # type: ignore[no-any-return]
    raise UsageError(f"no way to compute is called {name!r}", do=f"Choose one of {', '.join(get_args(Compute))}.")


def kernels(compute: Compute = COMPUTE) -> str:
    """Instruction set and mode, as the manifest names them: "avx2/int8x2". Raises as `isa` does."""
    return f"{isa()}/{compute}"


def isa() -> str:
    """Instruction set of the kernels in use. Raises `UsageError` for a bad OUTLAST_ISA."""
    try:
        return _native.isa()
    except RuntimeError as error:
        raise UsageError("The kernels cannot be chosen", why=str(error)) from error


def operators() -> dict[str, int]:
    """Name -> address of each operator (`ol_op_fn`), to be registered in the executor's slot table."""
    return _native.operators()


def kv_geometry(config: ModelConfig, block_tokens: int, blocks: int) -> Geometry:
    """Geometry of a KV pool of `blocks` blocks of `block_tokens` positions; it needs `blocks * block_bytes` bytes."""
    return _native.kv_geometry(config.native(), block_tokens, blocks)


def sampler_params(params: SamplingParams, stop_tokens: Sequence[int] = ()) -> _native.SamplerParams:
    """For the extension, which draws a token from them; `stop_tokens`: for `min_tokens`.

    Raises `ValueError` or `TypeError` for values out of range.
    """
    return _native.SamplerParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        stream=params.stream,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=list(params.logit_bias),
        top_logprobs=params.top_logprobs,
        typical_p=params.typical_p,
        min_tokens=params.min_tokens,
        stop_tokens=list(stop_tokens),
    )


class Decoder:
    """A model over one KV pool. Not thread-safe; the operators of a planned step may run on any threads.

    `weights` and the memory at `pool` (`geometry.blocks * geometry.block_bytes` bytes) must outlive the decoder.
    `compute` decides on bits and speed, docs/reference/numerics.md; `instructions`: an instruction set, "" = the best.
    """

    def __init__(
        self,
        weights: Weights,
        pool: int,
        geometry: Geometry,
        *,
        compute: Compute = COMPUTE,
        instructions: str = "",
    ) -> None:
        tensors = [(t.name, t.type, t.rows, t.columns, t.offset) for t in weights.tensors]
        self.weights = weights
        self.config = weights.config
        self.geometry = geometry
        self.compute = compute
        try:
            self._native = _native.Decoder(
                weights.config.native(), tensors, weights.address, weights.size, pool, geometry, instructions, compute
            )
        except (ValueError, RuntimeError) as error:
            raise UsageError("The decoder cannot be set up", why=str(error)) from error

    def bind(self, slots: Mapping[str, int]) -> None:
        """Slot-table index of every operator of `operators()`, for the tasks of later plans."""
        self._native.bind(dict(slots))

    def add(
        self,
        key: int,
        generation: int,
        tokens: Sequence[int],
        prompt_length: int,
        computed: int,
        params: SamplingParams,
        stop_tokens: Sequence[int] = (),
    ) -> int:
        """Takes up a sequence and returns its handle.

        `tokens` are prompt and generated tokens; the KV rows of the first `computed` positions (fewer than there are
        tokens) are in the pool already. No draft behind a stop token is let through. Raises `UsageError` for
        values out of range.
        """
        try:
            native = sampler_params(params, stop_tokens)
            return self._native.add(key, generation, list(tokens), prompt_length, computed, native)
        except (ValueError, TypeError) as error:
            raise UsageError(f"Request {key} cannot be decoded", why=str(error)) from error

    def set_table(self, handle: int, blocks: Sequence[int]) -> None:
        """Physical block of each logical block of the sequence. Not while a step is planned."""
        self._native.set_table(handle, list(blocks))

    def remove(self, handle: int) -> None:
        """Forgets a sequence; unknown handles are ignored. Not while it is part of a planned step."""
        self._native.remove(handle)

    def rewind(self, handle: int, computed: int) -> None:
        """Positions from `computed` on are to be computed again (after a refused verification: 0)."""
        self._native.rewind(handle, computed)

    def computed(self, handle: int) -> int:
        """Positions whose KV rows are in the pool."""
        return self._native.computed(handle)

    def length(self, handle: int) -> int:
        """Known tokens: prompt and generated."""
        return self._native.length(handle)

    def tokens(self, handle: int) -> list[int]:
        """Prompt and generated tokens."""
        return self._native.tokens(handle)

    def plan(self, batch: Sequence[Item], parts: int) -> StepPlan:
        """Plans one step. A sequence samples a token if the step covers its last known position.

        `parts`: into how many tasks a level of work may be cut (1-256); no result depends on it. Raises `UsageError` if
        an item's positions are not the sequence's next ones or its block table is too short.
        """
        try:
            self._native.plan([(i.handle, i.positions, i.recheck, list(i.drafts)) for i in batch], parts)
        except (ValueError, TypeError) as error:
            raise UsageError("The step cannot be planned", why=str(error)) from error
        native = self._native
        return StepPlan(
            native.tasks_address, native.tasks_count, native.writes_address, native.writes_count, native.plan_number
        )

    @property
    def plans_built(self) -> int:
        """How many different plans were built so far."""
        return self._native.plans_built

    def run(self, threads: int = 1) -> None:
        """Runs the planned tasks without the executor, on the calling thread and `threads - 1` others."""
        try:
            self._native.run(threads)
        except RuntimeError as error:
            raise OperatorFailed("A step failed", why=str(error)) from error

    def commit(self) -> list[StepResult]:
        """After the plan ran: advances the sequences, appends sampled tokens; one result per item of the batch."""
        return [
            StepResult(
                r.handle, r.token, r.logprob, tuple(r.top), r.verified, r.finite,
                tuple((token, logprob, tuple(top)) for token, logprob, top in r.more),
            )
            for r in self._native.commit()
        ]  # fmt: skip

    def accepted(self) -> list[int]:
        """After the plan ran and before `commit`: how many drafts of each item came true."""
        return self._native.accepted()

    def abandon(self) -> None:
        """Forgets a planned step that did not run, or not to its end; sequences stay as they were before `plan`."""
        self._native.abandon()

    def logits(self) -> list[bytes]:
        """Logits (native float32) of the step that ran, one row per sampling sequence; valid until the next `plan`."""
        return self._native.logits()
