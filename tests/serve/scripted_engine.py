"""A scripted engine: no model, but a real engine otherwise. Its state lives in shared memory and survives SIGKILL.

Tokens are bytes (256 = end of answer). Each next token is a hash of prompt, seed, choice and all tokens before it, so a
wrongly restored sequence shows. The prompt can order faults, e.g. `<<poison@5>>`: at token 5 the process kills itself.
The log has one slot per sequence: key, prefilled tokens, count, tokens; `count` is the commit word. A sequence ends
after `<<say:TEXT>>` is said, or at `max_tokens`.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import signal
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outlast.core.errors import Fenced, OutlastError, Refused
from outlast.engines.protocol import Emission, EngineRequest, JournalEntry, RecoveryReport
from outlast.serve.control import ControlPage

EOS = 256
VOCAB = 257
SLOTS = 300
SLOT_TOKENS = 2048
_HEAD = 64
_SLOT = struct.Struct("<QII")  # key, prefilled, count
_SLOT_BYTES = _SLOT.size + 4 * SLOT_TOKENS

#: Fault points for tests, see outlast.serve.control.
POINT_MID_RECOVER = 100
POINT_BEFORE_COMMIT = 101
POINT_AFTER_COMMIT = 102
POINT_PREFILL = 103

_ORDER = re.compile(rb"<<(\w+)@(\d+)>>")
_SAY = re.compile(rb"<<say:(.*?)>>", re.DOTALL)


class ScriptedLog:
    """LogOwner of the tests: one memfd. Word 0 is the writer epoch."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("outlast-scripted-log", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, _HEAD + SLOTS * _SLOT_BYTES)
        self._map = mmap.mmap(self.fd, _HEAD)
        self.closed = False

    def fence(self) -> int:
        epoch = struct.unpack_from("<Q", self._map, 0)[0] + 1
        struct.pack_into("<Q", self._map, 0, epoch)
        return epoch

    def fds(self) -> tuple[int, ...]:
        return (self.fd,)

    def spec(self) -> Mapping[str, Any]:
        return {"fd": self.fd}

    def used(self) -> int:
        return os.fstat(self.fd).st_blocks * 512

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)
        self.closed = True


class _Sequence:
    def __init__(self, request: EngineRequest, slot: int, alone: bool) -> None:
        self.request = request
        self.slot = slot
        self.alone = alone
        self.prefilled = 0
        self.tokens: list[int] = []
        self.reported = 0
        prompt = bytes(t for t in request.prompt if t < 256)
        self.orders = {int(at): name.decode() for name, at in _ORDER.findall(prompt)}
        said = _SAY.search(prompt)
        self.say = said[1] if said else None

    def next_token(self) -> int:
        at = len(self.tokens)
        if self.say is not None:
            return self.say[at] if at < len(self.say) else EOS
        p = self.request.params
        seed = p.seed if p.temperature > 0 else 0
        state = repr((self.request.prompt, seed, p.stream, self.tokens)).encode()
        return b"abcdefghijklmnop    "[hashlib.blake2b(state, digest_size=1).digest()[0] % 20]


class ScriptedEngine:
    def __init__(self, options: dict[str, Any], control: ControlPage) -> None:
        self._control = control
        self._step_seconds = options.get("step_ms", 1.0) / 1000
        self._chunk = options.get("chunk", 64)
        self._map = mmap.mmap(options["log"]["fd"], _HEAD + SLOTS * _SLOT_BYTES)
        self._epoch = 0
        self._live: dict[int, _Sequence] = {}
        self._failures: list[tuple[int, str]] = []
        self._turn = 0
        self._stepped = 0

    # --- the log

    def _check_owner(self) -> None:
        if struct.unpack_from("<Q", self._map, 0)[0] != self._epoch:
            raise Fenced("a newer writer owns the log")

    def _offset(self, slot: int) -> int:
        return _HEAD + slot * _SLOT_BYTES

    def _read(self, slot: int) -> tuple[int, int, list[int]]:
        key, prefilled, count = _SLOT.unpack_from(self._map, self._offset(slot))
        return key, prefilled, list(struct.unpack_from(f"<{count}I", self._map, self._offset(slot) + _SLOT.size))

    def _write(self, s: _Sequence) -> None:
        """Tokens first, then their number."""
        self._check_owner()
        struct.pack_into(f"<{len(s.tokens)}I", self._map, self._offset(s.slot) + _SLOT.size, *s.tokens)
        _SLOT.pack_into(self._map, self._offset(s.slot), s.request.key, s.prefilled, len(s.tokens))

    def _free_slot(self) -> int:
        used = {s.slot for s in self._live.values()}
        free = next((slot for slot in range(SLOTS) if slot not in used and self._read(slot)[0] == 0), None)
        if free is None:
            raise Refused("no slot is free")
        return free

    # --- the contract

    def recover(self, writer_epoch: int, journal: Sequence[JournalEntry], *, use_log: bool = True) -> RecoveryReport:
        started = time.monotonic()
        self._epoch = writer_epoch
        self._check_owner()
        logged = {}
        for slot in range(SLOTS):
            key = _SLOT.unpack_from(self._map, self._offset(slot))[0]
            if key:
                logged[key] = slot
        names = {entry.request.key for entry in journal}
        for key in [key for key in logged if key not in names]:
            _SLOT.pack_into(self._map, self._offset(logged.pop(key)), 0, 0, 0)
        restored = tokens = 0
        taken = set(logged.values())
        for entry in journal:
            self._control.fault(POINT_MID_RECOVER)
            slot = logged.get(entry.request.key)
            if slot is None:
                slot = next(s for s in range(SLOTS) if s not in taken)
                taken.add(slot)
            s = _Sequence(entry.request, slot, entry.alone)
            _, prefilled, have = self._read(slot) if entry.request.key in logged else (0, 0, [])
            if use_log and prefilled and have[: len(entry.delivered)] == list(entry.delivered):
                s.prefilled, s.tokens = prefilled, have
                restored += 1
                tokens += prefilled + len(have)
            else:
                s.tokens = list(entry.delivered)
            s.reported = len(entry.delivered)
            self._live[entry.request.key] = s
            self._write(s)
        ms = (time.monotonic() - started) * 1000
        return RecoveryReport(restored, len(journal) - restored, tokens, "" if use_log else "asked", {"apply": ms})

    def submit(self, request: EngineRequest) -> None:
        if b"<<refuse>>" in bytes(t for t in request.prompt if t < 256):
            raise Refused("this can never fit", why="the prompt says so")
        s = _Sequence(request, self._free_slot(), alone=False)
        self._live[request.key] = s
        self._write(s)

    def cancel(self, key: int) -> None:
        s = self._live.pop(key, None)
        if s is not None:
            _SLOT.pack_into(self._map, self._offset(s.slot), 0, 0, 0)

    def release(self, key: int) -> None:
        for slot in range(SLOTS):
            if _SLOT.unpack_from(self._map, self._offset(slot))[0] == key:
                _SLOT.pack_into(self._map, self._offset(slot), 0, 0, 0)

    def step(self) -> list[Emission]:
        groups = [[s] for s in self._live.values() if s.alone]
        groups.append([s for s in self._live.values() if not s.alone])
        groups = [g for g in groups if g]
        if not groups:
            return []
        self._turn += 1
        group = groups[self._turn % len(groups)]
        self._control.mark(s.request.key for s in group)
        time.sleep(self._step_seconds)
        out: list[Emission] = []
        for s in group:
            out += self._advance(s)
            s.alone = False
        return out

    def _advance(self, s: _Sequence) -> list[Emission]:
        if s.prefilled < len(s.request.prompt):
            s.prefilled = min(s.prefilled + self._chunk, len(s.request.prompt))
            self._control.fault(POINT_PREFILL)
            self._write(s)
            return []
        if s.reported == len(s.tokens):
            self._obey(s)
            if s.request.key not in self._live:
                return []
            s.tokens.append(s.next_token())
            self._stepped += 1
            self._control.fault(POINT_BEFORE_COMMIT)
            self._write(s)
            self._control.fault(POINT_AFTER_COMMIT)
        out = []
        while s.reported < len(s.tokens):
            out.append(self._emission(s, s.reported))
            s.reported += 1
        if s.orders.get(s.reported) == "lie":
            del s.orders[s.reported]
            out.append(Emission(s.request.key, 0, s.tokens[0] ^ 1, -1.0))
        if out[-1].finish is not None:
            del self._live[s.request.key]  # its slot stays until it is released
        return out

    def _emission(self, s: _Sequence, index: int) -> Emission:
        token = s.tokens[index]
        finish = None
        if token in s.request.stop_tokens:
            finish = "stop"
        elif index + 1 >= s.request.max_tokens:
            finish = "length"
        top = tuple((t, -1.0 - t) for t in range(s.request.params.top_logprobs))
        return Emission(s.request.key, index, token, -0.5, top, finish)

    def _obey(self, s: _Sequence) -> None:
        match s.orders.get(len(s.tokens)):
            case "poison":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(3600)
            case "throw":
                raise OutlastError("the script says throw")
            case "fault":
                self._failures.append((s.request.key, "the script says fault"))
                self.cancel(s.request.key)

    def prepare(self) -> None:
        """Nothing to get ready."""

    def busy(self) -> bool:
        return bool(self._live)

    def failures(self) -> list[tuple[int, str]]:
        out, self._failures = self._failures, []
        return out

    def stats(self) -> dict[str, float]:
        used = sum(self._read(slot)[0] != 0 for slot in range(SLOTS))
        return {
            "running": len(self._live),
            "stepped_tokens": self._stepped,
            "kv_blocks_used": used,
            "kv_blocks_total": SLOTS,
        }

    def close(self) -> None:
        self._map.close()


def create(options: dict[str, Any], *, control: ControlPage) -> ScriptedEngine:
    """The factory. Options: step_ms, chunk, start_s (slow start), start_fails_while (a path that exists),
    helper_pid_file (the first engine starts a helper process and notes its pid)."""
    time.sleep(options.get("start_s", 0.0))
    gate = options.get("start_fails_while")
    if gate and Path(gate).exists():
        raise OutlastError("the scripted engine can not start", why="a test asked for it")
    mark = options.get("helper_pid_file")
    if mark and not Path(mark).exists():
        helper = subprocess.Popen(["/bin/sleep", "1000"])
        Path(mark).write_text(str(helper.pid))
    return ScriptedEngine(options, control)


class ByteDetokenizer:
    def __init__(self) -> None:
        self._open = b""

    def push(self, token: int) -> str:
        if token >= 256:
            return ""
        self._open += bytes([token])
        try:
            text = self._open.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""
            text = self._open.decode(errors="replace")
        self._open = b""
        return text

    def flush(self) -> str:
        text, self._open = self._open.decode(errors="replace"), b""
        return text


class ByteTokenizer:
    vocab_size = VOCAB
    stop_tokens = (EOS,)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode("".join(f"[{m['role']}]{m['content']}" for m in messages) + "[assistant]")

    def detokenizer(self) -> ByteDetokenizer:
        return ByteDetokenizer()

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b"<eos>"
