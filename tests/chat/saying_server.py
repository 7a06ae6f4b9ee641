"""A server that answers each request with bytes of the test's choice, and ends connections in each possible way."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(text: str = "", finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


def refusal(status: int, body: bytes, kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return head.encode() + body


def error_body(message: str, code: str) -> bytes:
    return json.dumps({"error": {"message": message, "code": code}}).encode()


class SayingServer:
    """`say` what the next requests get, in order. A float is a pause; "reset" ends by a TCP reset; None waits for the
    client to hang up."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[bytes] = []
        self.hung_up = threading.Event()
        self._answers: list[Sequence[bytes | float | str | None]] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def say(self, *parts: bytes | float | str | None) -> None:
        self._answers.append(parts)

    def __enter__(self) -> SayingServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            data += connection.recv(65536)
        head, _, body = data.partition(b"\r\n\r\n")
        self.heads.append(head)
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        length = int(lengths[0].split(b":")[1]) if lengths else 0
        while len(body) < length:
            body += connection.recv(65536)
        if head.startswith(b"GET /v1/models"):
            card = {"data": [{"id": "said", "context_length": 100}]}
            connection.sendall(refusal(200, json.dumps(card).encode()))
            return
        if head.startswith(b"GET"):
            connection.sendall(refusal(404, b"nothing here", "text/plain"))
            return
        self.bodies.append(json.loads(body))
        for part in self._answers.pop(0):
            if isinstance(part, float):
                time.sleep(part)
            elif part == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif part is None:
                while connection.recv(65536):
                    pass
                self.hung_up.set()
            else:
                connection.sendall(part)
