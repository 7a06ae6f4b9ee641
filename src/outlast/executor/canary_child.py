"""Runs canary tasks of an operator that nobody trusts yet, in a process of its own.

Started as a program by `outlast.executor.canary`, with nothing but the standard library: it starts in some 20 ms. The
request comes on standard input and the answer goes to standard output, each one line of JSON and then raw bytes. The
operator runs here, so if it traps or does not end, this process does, and the one that asked goes on.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import struct
import sys
from collections.abc import Sequence
from typing import BinaryIO

_TASK = struct.Struct("<QIIQHHI4Q")  # ol_task
_ENV = struct.Struct("<II240s")  # ol_env
GUARD = 64  #: bytes on both sides of each buffer that the operator must leave as they are


def run(
    function: int,
    arguments: bytes,
    addresses: Sequence[tuple[int, int, int]],
    buffers: Sequence[ctypes.Array[ctypes.c_char]],
    parts: int,
) -> tuple[int, str]:
    """Run one operation in `parts` tasks, one after the other; (status, text) of the first that fails, else (0, "").

    `arguments` is the argument struct; each of `addresses` (offset, buffer, offset in it) is filled in first.
    """
    struct_memory = ctypes.create_string_buffer(arguments, max(1, len(arguments)))
    for offset, buffer, inside in addresses:
        struct.pack_into("<Q", struct_memory, offset, ctypes.addressof(buffers[buffer]) + inside)
    call = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)(function)
    for part in range(parts):
        task = ctypes.create_string_buffer(_TASK.size)
        _TASK.pack_into(task, 0, part + 1, 0, 2, 0, part, parts, 0, ctypes.addressof(struct_memory), 0, 0, 0)
        env = ctypes.create_string_buffer(_ENV.size)
        status = call(ctypes.addressof(task), ctypes.addressof(env))
        if status != 0:
            text = env.raw[8:].split(b"\0", 1)[0].decode("utf-8", "replace")
            return status, text
    return 0, ""


def _serve(source: BinaryIO, sink: BinaryIO) -> None:
    request = json.loads(source.readline())
    library = ctypes.CDLL(request["path"], mode=os.RTLD_NOW | os.RTLD_LOCAL)
    abi = ctypes.c_uint32.in_dll(library, "outlast_abi").value
    function = ctypes.cast(getattr(library, request["symbol"]), ctypes.c_void_p).value or 0
    for example in request["examples"]:
        blobs = [source.read(length) for length in example["buffers"]]
        buffers = [ctypes.create_string_buffer(blob, len(blob)) for blob in blobs]
        if abi != request["abi"]:
            answer = {"abi": abi, "status": 0, "text": ""}
        else:
            arguments = bytes.fromhex(example["arguments"])
            status, text = run(function, arguments, example["addresses"], buffers, example["parts"])
            answer = {"abi": abi, "status": status, "text": text}
        sink.write(json.dumps(answer).encode() + b"\n")
        for buffer in buffers:
            sink.write(buffer.raw)
        sink.flush()


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sink = os.fdopen(os.dup(1), "wb")  # what the operator prints must not get between
    os.dup2(2, 1)
    try:
        _serve(sys.stdin.buffer, sink)
    except (OSError, ValueError, AttributeError) as error:  # it does not load, or lacks a symbol
        sink.write(json.dumps({"error": str(error)}).encode() + b"\n")
        sink.flush()


if __name__ == "__main__":
    _main()
