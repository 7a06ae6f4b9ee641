"""A client of the OpenAI chat API on the standard library's HTTP: models, health, and streams that can be waited for.

A stream is read by a thread of its own and handed over through a queue with a descriptor, so that one `select` can wait
for tokens, the keyboard and signals. Whatever a server sends is outside bytes: bounded, and never trusted for its type.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import re
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from outlast.chat.sse import BadStream, Comment, Data, EventParser
from outlast.core.errors import OutlastError, UsageError

CONNECT_SECONDS = 10.0
#: Silence after which a stream is given up. A foreign server may say nothing while it reads a long prompt.
SILENCE_SECONDS = 300.0
#: The same of a server that sends a comment every half second.
OWN_SILENCE_SECONDS = 30.0
_ASK_SECONDS = 10.0
_JOIN_SECONDS = 1.0
_KEY = re.compile(r"[!-~]+")
_MAX_BODY = 1 << 20  #: bytes of an error body, /health or /v1/models that are read
_READ_BYTES = 64 << 10


class ChatError(OutlastError):
    """A request was refused, or its stream did not come to its proper end. `code` is the server's, or one of ours.

    Ours: `unreachable` (no connection, or no answer), `truncated` (ended without a finish), `protocol` (not the API).
    """

    def __init__(self, what: str, *, why: str = "", do: str = "", code: str = "", status: int = 0) -> None:
        super().__init__(what, why=why, do=do)
        self.code = code
        self.status = status


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of the answer, the number of tokens behind it, and which engine made it (None if the server names none)."""

    text: str
    tokens: int
    engine: int | None


@dataclass(frozen=True, slots=True)
class Notice:
    """A comment of the server: it lives, or has something to say between tokens."""

    text: str


@dataclass(frozen=True, slots=True)
class End:
    """The last event of a stream. Complete if `finish` is set and `error` is not."""

    finish: str | None
    error: ChatError | None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


Event = Piece | Notice | End


@dataclass(frozen=True, slots=True)
class Model:
    """A model as the server lists it; `context` in tokens, if it says."""

    id: str
    context: int | None


class Client:
    """Of one server."""

    def __init__(self, url: str, *, silence: float = SILENCE_SECONDS, key: str | None = None) -> None:
        """`url`: `http://host:port`, with or without `/v1`; `key` is sent as bearer token with each request (RFC 6750).

        Raises UsageError for anything else, for a key that no header can hold, and for one that would cross a network
        in the clear.
        """
        text = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise UsageError(f"no server at {url!r}", why=str(error), do=_EXAMPLE) from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise UsageError(f"no server at {url!r}", why="it is not the address of a web server", do=_EXAMPLE)
        if parts.username is not None:
            raise UsageError("the address holds a user name", why="logging in is not supported", do=_EXAMPLE)
        self.host = parts.hostname
        self._port = port
        self._tls = parts.scheme == "https"
        path = parts.path.rstrip("/")
        self._base = path.removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{self._base}"  #: without a trailing slash, and without `/v1`
        self._silence = silence
        self.headers: dict[str, str] = {}  #: of each request
        if key is not None:
            if not _KEY.fullmatch(key):
                raise UsageError("the key is none", why="it is empty, or holds spaces or characters outside ASCII")
            if not (self._tls or self.is_local):
                why = "http would send it readable over the network"
                raise UsageError(f"the key is not sent to {self.host}", why=why, do="Use an https address.")
            self.headers["authorization"] = f"Bearer {key}"

    @property
    def is_local(self) -> bool:
        """Whether the server runs on this machine, as far as its address tells."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def connection(self, timeout: float) -> http.client.HTTPConnection:
        """A new one, not yet connected."""
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        return kind(self.host, self._port, timeout=timeout)

    def models(self) -> list[Model]:
        """What the server offers. Raises ChatError."""
        answer = self._get("/v1/models")
        rows = answer.get("data")
        found = []
        for row in rows if isinstance(rows, list) else []:
            if isinstance(row, dict) and isinstance(row.get("id"), str):
                context = row.get("context_length", row.get("max_model_len"))
                found.append(Model(row["id"], context if type(context) is int and context > 0 else None))
        if not found:
            what = f"{self.url} offers no model"
            raise ChatError(what, why="/v1/models lists none", do=_ANOTHER_KIND, code="protocol")
        return found

    def health(self) -> dict[str, Any]:
        """The body of /health, also while it is not well; empty if the server has none. Raises ChatError."""
        return self._get("/health", any_status=True)

    def _get(self, path: str, *, any_status: bool = False) -> dict[str, Any]:
        connection = self.connection(_ASK_SECONDS)
        try:
            connection.request("GET", self._base + path, headers=self.headers)
            answer = connection.getresponse()
            body = answer.read(_MAX_BODY)
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None
        finally:
            connection.close()
        if answer.status != 200 and not any_status:
            raise refusal(answer.status, body)
        value = _object(body)
        if value is None and not any_status:
            raise ChatError(f"{self.url}{path} is no JSON object", do=_ANOTHER_KIND, code="protocol")
        return value or {}

    def _unreachable(self, error: BaseException) -> ChatError:
        return ChatError(f"no answer from {self.url}", why=_reason(error), code="unreachable")

    def stream(self, body: Mapping[str, Any]) -> Stream:
        """Ask for a chat completion; nothing is waited for here."""
        return Stream(self, self._base + "/v1/chat/completions", body, self._silence)


_ANOTHER_KIND = "Is it an OpenAI-compatible server?"
_EXAMPLE = "An address looks like http://127.0.0.1:8321"


class Stream:
    """One answer on its way: events in order, the last one an `End`, whatever happens."""

    def __init__(self, client: Client, path: str, body: Mapping[str, Any], silence: float) -> None:
        self._client = client
        self._path = path
        self._body = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        self._silence = silence
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._wake_read, self._wake_write = socket.socketpair()
        self._lock = threading.Lock()
        self._cancelled = False
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="outlast-chat-stream", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Readable when `pending` has something to give."""
        return self._wake_read.fileno()

    def pending(self) -> list[Event]:
        """The events that have come since the last call; does not wait."""
        with contextlib.suppress(BlockingIOError):
            self._wake_read.recv(4096, socket.MSG_DONTWAIT)
        out: list[Event] = []
        with contextlib.suppress(queue.Empty):
            while True:
                out.append(self._events.get_nowait())
        return out

    def close(self) -> None:
        """Hang up, which frees the work at the server. Idempotent."""
        with self._lock:
            self._cancelled = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(_JOIN_SECONDS)
        if not self._thread.is_alive():  # else it still connects, and sees `_cancelled` when that has come to an end
            self._wake_read.close()
            self._wake_write.close()

    # --- in the thread

    def _put(self, event: Event) -> None:
        self._events.put(event)
        with contextlib.suppress(BlockingIOError):  # a full buffer wakes just as well
            self._wake_write.send(b"\0", socket.MSG_DONTWAIT)

    def _run(self) -> None:
        connection = self._client.connection(CONNECT_SECONDS)
        reading = _Reading()
        try:
            end = self._talk(connection, reading)
        except BadStream as error:
            end = reading.end(ChatError(error.what, why=error.why, code="protocol"))
        except (OSError, http.client.HTTPException, ValueError) as error:
            end = reading.end(self._broken(reading, error))
        finally:
            connection.close()
        self._put(end)

    def _broken(self, reading: _Reading, error: BaseException) -> ChatError:
        if isinstance(error, TimeoutError) and reading.begun:
            return _truncated(f"nothing came for {self._silence:g} s")
        if reading.begun:
            return _truncated(_reason(error))
        return ChatError(f"no answer from {self._client.url}", why=_reason(error), code="unreachable")

    def _talk(self, connection: http.client.HTTPConnection, reading: _Reading) -> End:
        connection.connect()
        with self._lock:
            self._socket = connection.sock
            if self._cancelled:
                return reading.end(None)
        assert self._socket is not None
        self._socket.settimeout(self._silence)
        headers = {"content-type": "application/json", **self._client.headers}
        connection.request("POST", self._path, self._body, headers)
        answer = connection.getresponse()
        if answer.status != 200:
            return reading.end(refusal(answer.status, answer.read(_MAX_BODY)))
        if not (answer.getheader("content-type") or "").startswith("text/event-stream"):
            raise BadStream("the answer is no event stream", why=f"content type {answer.getheader('content-type')!r}")
        reading.begun = True
        parser = EventParser()
        while data := answer.read1(_READ_BYTES):
            for event in parser.feed(data):
                match event:
                    case Comment(text):
                        self._put(Notice(text))
                    case Data("[DONE]"):
                        return reading.end(None)
                    case Data(text):
                        piece = reading.chunk(text)
                        if piece is not None:
                            self._put(piece)
                        if reading.error is not None:
                            return reading.end(None)
        return reading.end(_truncated("the connection ended without [DONE]"))


class _Reading:
    """What has been read of one stream."""

    def __init__(self) -> None:
        self.begun = False
        self.error: ChatError | None = None
        self._finish: str | None = None
        self._usage: dict[str, int] = {}

    def chunk(self, text: str) -> Piece | None:
        """Take one chunk; the text it brings, if any. Raises BadStream for what is no chunk."""
        value = _object(text.encode("utf-8", "replace"))
        if value is None:
            raise BadStream("the stream holds something that is no JSON object", why=text[:80])
        if "error" in value:
            self.error = _stated(value["error"], 0) or ChatError("the server reports an error", code="error")
            return None
        usage = value.get("usage")
        if isinstance(usage, dict):
            self._usage = {k: v for k, v in usage.items() if type(v) is int}
        choices = value.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            return None
        choice = choices[0]
        if isinstance(choice.get("finish_reason"), str):
            self._finish = choice["finish_reason"]
        delta = choice.get("delta")
        content = delta.get("content") if isinstance(delta, dict) else None
        content = content if isinstance(content, str) else ""
        ours = value.get("outlast")
        ours = ours if isinstance(ours, dict) else {}
        ids, engine = ours.get("token_ids"), ours.get("engine")
        # Others do not say how many tokens a chunk stands for; with most of them it is one.
        tokens = len(ids) if isinstance(ids, list) else bool(content)
        if not content and not tokens:
            return None
        return Piece(content, int(tokens), engine if type(engine) is int else None)

    def end(self, error: ChatError | None) -> End:
        error = error or self.error
        if error is None and self._finish is None and self.begun:
            error = _truncated("no finish reason was given")
        return End(self._finish, error, self._usage.get("prompt_tokens"), self._usage.get("completion_tokens"))


def _truncated(why: str) -> ChatError:
    return ChatError("the answer was cut off", why=why, code="truncated")


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def refusal(status: int, body: bytes) -> ChatError:
    """An answer other than 200, in the API's form or any other."""
    value = _object(body)
    stated = _stated(value.get("error"), status) if value is not None else None
    if stated is not None:
        return stated
    text = " ".join(body[:200].decode("utf-8", "replace").split())
    if text.startswith("<"):  # a page for browsers
        text = ""
    reason = http.client.responses.get(status, "")
    return ChatError(
        f"the server answers {status} {reason}".rstrip(), why=text, do=_ANOTHER_KIND, code="protocol", status=status
    )


def _stated(error: object, status: int) -> ChatError | None:
    if isinstance(error, str):
        return ChatError(error, code="error", status=status)
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return None
    code = error.get("code")
    return ChatError(error["message"], code=code if isinstance(code, str) else "error", status=status)


def _reason(error: BaseException) -> str:
    if isinstance(error, http.client.RemoteDisconnected | ConnectionResetError | BrokenPipeError):
        return "the connection was closed"
    if isinstance(error, http.client.IncompleteRead):
        return "the connection ended in the middle"
    if isinstance(error, TimeoutError):
        return "it takes too long"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
