"""The native engine beside transformers in fp32 and llama.cpp: decode, prefill, start, recovery, accuracy, bits.

The same GGUF, the same threads, in the same run, in rounds of all sides in turn; a ratio is that of medians, baseline
by outlast, so above 1 outlast is quicker. On a machine with other work, threads that wait for each other are slow: the
baselines run with one thread as well, and whichever is quicker counts. They come with the extras `bench` (transformers)
and `llamacpp` (llama-cpp-python, which builds llama.cpp from source); one that is not installed leaves its rows and
figures empty.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outlast.bench import engine_checks, engine_speed, engine_start, overhead
from outlast.bench.engine_sides import (
    DEFAULT,
    FAST,
    MODES,
    LlamaCpp,
    LlamaModel,
    Native,
    Side,
    Transformers,
)
from outlast.bench.engine_speed import Measured, Rates, prompts_of
from outlast.bench.executor_rounds import busy
from outlast.bench.prompts import conversation
from outlast.bench.report import conditions, median, say, significant, spread
from outlast.bench.rounds import breakdown
from outlast.bench.stages import Lines
from outlast.bench.trial import requests_for, run_trial, settings_for
from outlast.core import machine
from outlast.core.errors import UsageError
from outlast.core.memory import Memory
from outlast.engines.native import decoder as decoders
from outlast.engines.native import models
from outlast.engines.native.decoder import Compute
from outlast.engines.native.gguf import Gguf
from outlast.engines.native.loading import open_weights, weights_bytes
from outlast.engines.native.tokenizer import Tokenizer

PARTS = ("decode", "batch", "prefill", "busy", "dispatch", "overhead", "start", "accuracy", "bits", "recovery")
CONTEXTS = (32, 512, 2000)
STREAMS = 8
PREFILL_TOKENS = 512
START_TOKENS = 20
RECOVERY_CONTEXT = 1000
TEXT_TOKENS = 256  #: of the text on which accuracy is looked at
#: Every figure that a program may look for; None where it was not measured.
FIGURES = (
    "decode_vs_transformers", "decode_vs_llamacpp", "batch8_scaling", "batch8_vs_llamacpp", "prefill_vs_llamacpp",
    "accuracy", "start_vs_transformers", "first_token_s", "kill_to_next_token_ms", "overhead_pct", "dispatch_pct",
    "bits_equal",
)  # fmt: skip
_ROOM = 512  #: positions of a stream beyond its prompt: what the rounds and the others' prefill take
_VECTORS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8")


def configure(parser: argparse.ArgumentParser) -> None:
    """Which parts, how long."""
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that it works")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part to run; may be repeated")
    parser.add_argument("--model", default="builtin", metavar="NAME|PATH", help="model to decode (default: builtin)")
    parser.add_argument("--threads", type=int, default=cores, metavar="N", help=f"of all sides (default: {cores})")
    parser.add_argument("--contexts", type=_numbers, default=CONTEXTS, metavar="N,N", help="default: 32,512,2000")


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers") from None


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The report. A figure that is missing a baseline is None and its row says "not installed"."""
    if arguments.threads < 1 or min(arguments.contexts) < 1:
        raise UsageError("nothing to measure", why="--threads and --contexts are at least 1")
    bench = Bench(arguments)
    try:
        for part in arguments.only or PARTS:
            say(f"{part} ...")
            getattr(bench, part)()
    finally:
        bench.close()
    rows = bench.rows
    figures = {name: bench.figures.get(name) for name in FIGURES}
    return {
        **figures,
        "ok": figures["bits_equal"] is not False,
        "not_reached": [
            f"{row['what']}, context {row['context']}, against {row['baseline']}: {row['ratio']}x, not {row['must']}x"
            for row in rows if row["reached"] is False
        ],
        "rows": [{**row, "cpu": bench.cpu} for row in rows],
        **bench.details,
        "threads": arguments.threads,
        "modes": list(MODES),
        "llamacpp_built_for": bench.llama.features if bench.llama else "not installed",
        **conditions("torch", "transformers", "llama_cpp_python", "numpy"),
    }  # fmt: skip


class Bench:
    """The parts. Each adds to `figures`, `rows` and `details`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.figures: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.details: dict[str, Any] = {}
        self._quick = bool(arguments.quick)
        self._rounds, self._steps = (2, 3) if arguments.quick else (6, 8)
        self._threads: int = arguments.threads
        self._contexts: tuple[int, ...] = arguments.contexts
        self._model: str = arguments.model
        self._path = models.find(arguments.model)
        self._memory = Memory.anonymous(weights_bytes(self._path), name="outlast-weights")
        self._weights = open_weights(self._memory, self._path)
        self._vocabulary = self._weights.config.vocab
        self._torch: Transformers | None = None
        self._torch_missing = False
        self.llama = self._llama_model()
        self.cpu = f"{decoders.isa()} kernels on {', '.join(_features()) or machine.processor().detail}"

    def _llama_model(self) -> LlamaModel | None:
        try:
            return LlamaModel(self._path)
        except ImportError as error:
            say(f"NO LLAMA.CPP: {error}; its rows say so")
            return None

    def _transformers(self) -> Transformers | None:
        """Loaded when it is first wanted."""
        if self._torch is None and not self._torch_missing:
            try:
                self._torch = Transformers(self._path, self._threads)
            except ImportError as error:
                self._torch_missing = True
                say(f"NO TRANSFORMERS: {error}; its rows say so")
        return self._torch

    def _native(self, mode: Compute, streams: int, room: int, threads: int = 0) -> Native:
        return Native(self._weights, threads=threads or self._threads, mode=mode, streams=streams, room=room)

    def _llamacpp(self, streams: int, room: int) -> dict[str, Side]:
        if self.llama is None:
            return {}
        return {
            f"llama.cpp, {_threads(n)}": LlamaCpp(self.llama, threads=n, streams=streams, room=room)
            for n in dict.fromkeys((self._threads, 1))
        }

    def _text(self, tokens: int) -> list[int]:
        with Gguf(self._path) as gguf:
            tokenizer = Tokenizer(gguf)
        return tokenizer.encode_chat(conversation(1, tokens, tokenizer))[:tokens]

    def close(self) -> None:
        """Give everything back."""
        if self._torch is not None:
            self._torch.close()
        if self.llama is not None:
            self.llama.close()

    # --- speed

    def decode(self) -> None:
        """One stream."""
        mode = DEFAULT
        for context in self._contexts:
            say(f"context {context}, 1 stream")
            room = context + _ROOM
            sides: dict[str, Side] = {m: self._native(m, 1, room) for m in MODES}
            sides |= self._llamacpp(1, room)
            torch = self._transformers()
            if torch is not None:
                sides[f"transformers, {_threads(self._threads)}"] = torch
                if self._threads > 1:
                    sides["transformers, 1 thread"] = Transformers(self._path, 1, model=torch.model)
            prompts = prompts_of(1, context, self._vocabulary)
            found = self._decoded(sides, dict.fromkeys(sides, prompts))
            ours = mode
            first = context == self._contexts[0]
            self._row("decode_vs_transformers" if first else "", "decode, 1 stream", context, found, ours,
                      "transformers", Rates(1, 7, 12))  # fmt: skip
            self._row("decode_vs_llamacpp" if first else "", "decode, 1 stream", context, found, ours, "llama.cpp",
                      Rates(1, 1.3, 2))  # fmt: skip
            for other in MODES[1:]:
                self._row("", "decode, 1 stream", context, found, other, "llama.cpp", Rates(1))

    def batch(self) -> None:
        """Eight streams."""
        for context in self._contexts:
            say(f"context {context}, {STREAMS} streams")
            room = context + _ROOM
            names = (DEFAULT, FAST)
            sides: dict[str, Side] = {}
            prompts = {}
            one, many = (prompts_of(n, context, self._vocabulary) for n in (1, STREAMS))
            for mode in names:
                for streams, texts in ((1, one), (STREAMS, many)):
                    name = f"{mode}, {streams}"
                    sides[name], prompts[name] = self._native(mode, streams, room), texts
            llama = self._llamacpp(STREAMS, room)
            found = self._decoded(sides | llama, prompts | dict.fromkeys(llama, many))
            first = context == self._contexts[0]
            for mode in names:
                key = "batch8_vs_llamacpp" if first and mode == FAST else ""
                must, aim = (2, 3.5) if mode == FAST else (None, None)
                self._row(key, f"decode, {STREAMS} streams", context, found, f"{mode}, {STREAMS}", "llama.cpp",
                          Rates(STREAMS, must, aim))  # fmt: skip
            for mode in names:
                self._scaling(context, found, mode, "batch8_scaling" if first and mode == DEFAULT else "")

    def _scaling(self, context: int, found: Mapping[str, Measured], mode: Compute, key: str) -> None:
        """Tokens per second of all streams by those of one stream, of the same mode."""
        many, one = f"{mode}, {STREAMS}", f"{mode}, 1"
        line = engine_speed.row(f"{STREAMS} streams by 1", context, found, many, one, Rates(STREAMS, 2))
        for name in ("baseline_tok_s", "ratio", "p25", "p75"):
            # The row is of steps; a step of one stream gives one token.
            line[name] = significant(line[name] / STREAMS, 4) if name == "baseline_tok_s" else line[name] * STREAMS
            line[name] = significant(line[name], 4)
        line["reached"] = line["ratio"] >= line["must"]
        self._add(line, key)

    def prefill(self) -> None:
        """A prompt of 512 tokens."""
        room = PREFILL_TOKENS + 64
        sides: dict[str, Side] = {m: self._native(m, 1, room) for m in (DEFAULT, FAST)}
        sides |= self._llamacpp(1, room)
        found = engine_speed.fill(sides, PREFILL_TOKENS, self._vocabulary, rounds=self._rounds)
        _close(sides)
        self._row("prefill_vs_llamacpp", "prefill", PREFILL_TOKENS, found, DEFAULT, "llama.cpp",
                  Rates(PREFILL_TOKENS, 1.5, 3))  # fmt: skip
        self._row("", "prefill", PREFILL_TOKENS, found, FAST, "llama.cpp", Rates(PREFILL_TOKENS))

    def busy(self) -> None:
        """Two threads while all cores but one do something else, beside one thread."""
        context = self._contexts[0]
        sides: dict[str, Side] = {_threads(n): self._native(DEFAULT, 1, context + _ROOM, n) for n in (2, 1)}
        prompts = prompts_of(1, context, self._vocabulary)
        with busy(max(1, len(os.sched_getaffinity(0)) - 1)):
            found = self._decoded(sides, dict.fromkeys(sides, prompts), rounds=2 * self._rounds)
        self._row("", "2 threads, one core free", context, found, "2 threads", "1 thread", Rates(1, 0.9))

    def dispatch(self) -> None:
        """What the executor takes of a decode step, as it counts itself in every 16th plan."""
        context = PREFILL_TOKENS
        rows = {}
        for threads in sorted({1, self._threads}):
            side = self._native(DEFAULT, 1, context + _ROOM, threads)
            side.open(prompts_of(1, context, self._vocabulary))
            rows[_threads(threads)] = engine_speed.dispatch(side, plans=1 if self._quick else 20, steps=_ROOM - 16)
            side.close()
        self.figures["dispatch_pct"] = rows[_threads(self._threads)]["pct"]
        self.details["dispatch"] = rows

    def overhead(self) -> None:
        """Checkpointing on and off, step by step."""
        found = overhead.measure(self._model, context=RECOVERY_CONTEXT, quads=25 if self._quick else 150)
        self.figures["overhead_pct"] = found["overhead_pct"]
        self.details["overhead"] = found

    def start(self) -> None:
        """From the start of a process to its first token."""
        rounds = 2 if self._quick else 7
        prompt = self._text(START_TOKENS)
        ours, token = engine_start.native(self._path, prompt, threads=self._threads, rounds=rounds)
        again, _ = engine_start.native(
            self._path, prompt, threads=self._threads, rounds=rounds, weights_fd=self._memory.fd
        )
        self.figures["first_token_s"] = median(ours)
        rows: dict[str, Any] = {
            "outlast": {"seconds": median(ours), **_ends(ours)},
            "outlast, weights repacked": {"seconds": median(again), **_ends(again)},
        }
        torch = self._transformers()
        if torch is None:
            rows["transformers"] = {"seconds": None, "min": "not installed", "max": None}
        else:
            with tempfile.TemporaryDirectory() as folder:
                with _no_progress_bars():
                    torch.model.save_pretrained(folder)
                theirs, other = engine_start.transformers(
                    Path(folder), prompt, threads=self._threads, rounds=1 if self._quick else 3
                )
            rows["transformers"] = {"seconds": median(theirs), **_ends(theirs)}
            self.figures["start_vs_transformers"] = significant((median(theirs) or 0) / (median(ours) or 1), 4)
            self.details["start_same_token"] = token == other
        self.details["start"] = rows

    # --- checks

    def accuracy(self) -> None:
        """Logits of a text against transformers in fp32."""
        torch = self._transformers()
        if torch is None:
            return
        text = self._text(64 if self._quick else TEXT_TOKENS)
        self.figures["accuracy"] = engine_checks.accuracy(self._weights, text, torch.logits(text), MODES, self._threads)

    def bits(self) -> None:
        """Byte-equality over batch, threads, chunks, recovery."""
        text = self._text(TEXT_TOKENS)
        found = {mode: engine_checks.bits_equal(self._weights, mode, text) for mode in MODES}
        self.details["bits"] = found
        self.figures["bits_equal"] = all(all(one.values()) for one in found.values())

    def recovery(self) -> None:
        """Kills of the serving engine, timed at the client."""
        stage = Lines()
        shape = {"context": RECOVERY_CONTEXT, "tokens": 150}
        rows, parts = {}, {}
        for streams, kills in ((1, 2), (4, 1)) if self._quick else ((1, 12), (4, 5)):
            requests = requests_for(self._model, streams, seed=streams, **shape)
            settings = settings_for(self._model, streams, **shape)
            trial = run_trial(settings, requests, kills=kills, seed=1, stage=stage, title=f"{streams} streams")
            verdict = trial.verdict()
            found = spread(trial.recoveries)
            rows[f"{streams} streams"] = {
                "median_ms": median(trial.recoveries), "p75": found.get("p75"), "max": found.get("max"),
                "kills": len(trial.kills), "identical": verdict.identical, "restart_ms": None, "ratio": None,
            }  # fmt: skip
            parts[f"{streams} streams"] = breakdown(trial.kills)
            if streams == 1:
                again = run_trial(
                    replace(settings, recovery="reprefill", checkpoint=False, spares=0), requests,
                    kills=1 if self._quick else 3, seed=2, stage=stage, title="restart and prefill", reference=False,
                )  # fmt: skip
                restart, took = median(again.recoveries) or 0.0, median(trial.recoveries) or 1.0
                rows["1 streams"] |= {"restart_ms": restart, "ratio": significant(restart / took, 4)}
                self.figures["kill_to_next_token_ms"] = took
            self.figures["bits_equal"] = self.figures.get("bits_equal", True) and verdict.identical
        self.details |= {"recovery": rows, "recovery_phases_ms": parts}

    # --- rows

    def _decoded(self, sides: Mapping[str, Side], prompts: Mapping[str, Any], rounds: int = 0) -> dict[str, Measured]:
        """Measure and close, but for the model that other parts use again."""
        try:
            return engine_speed.decode(sides, prompts, rounds=rounds or self._rounds, steps=self._steps)
        finally:
            _close({name: side for name, side in sides.items() if side is not self._torch})

    def _row(
        self, key: str, what: str, context: int, found: Mapping[str, Measured], ours: str, baseline: str, rates: Rates
    ) -> None:
        self._add(engine_speed.row(what, context, found, ours, baseline, rates), key)

    def _add(self, line: dict[str, Any], key: str) -> None:
        self.rows.append(line)
        say(f"  {line['what']}, {line['outlast']} against {line['baseline']}: {line['ratio']}")
        if key:
            self.figures[key] = line["ratio"]


def _threads(number: int) -> str:
    return f"{number} thread{'s' * (number > 1)}"


def _close(sides: Mapping[str, Side]) -> None:
    for side in sides.values():
        side.close()


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Of transformers: standard error has this benchmark's own progress."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _ends(values: Sequence[float]) -> dict[str, float]:
    return {"min": significant(min(values), 4), "max": significant(max(values), 4)}


def _features() -> list[str]:
    """Vector extensions of this CPU that a kernel could use."""
    try:
        found = re.search(r"^flags\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return []
    flags = set(found.group(1).split()) if found else set()
    return [name for name in _VECTORS if name in flags]
