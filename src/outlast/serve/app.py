"""The HTTP API: routes, bodies, event streams, and what happens when a client goes away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from outlast.serve.api import ChatBody, CompletionBody, GenerationBody, parse
from outlast.serve.errors import ApiError, request_failed, shutting_down
from outlast.serve.jobs import Job, build_job
from outlast.serve.metrics import Metrics
from outlast.serve.responses import Shape
from outlast.serve.settings import Settings
from outlast.serve.streams import Delta, Done, Generation, Notice
from outlast.serve.supervisor import Supervisor
from outlast.serve.text import ModelInfo

log = logging.getLogger("outlast.serve")

#: Bodies above this are tokenized in a thread: 64 kB take about 10 ms, which other streams would feel.
_THREAD_BODY = 64 << 10
_JSON = {"content-type": "application/json"}
#: A body of the largest allowed size takes this long at 1 Mbit/s.
_BODY_SECONDS = 32.0


def _dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def error_response(error: ApiError) -> JSONResponse:
    """An error as a whole answer."""
    headers = {"retry-after": "1"} if error.status == 503 else None
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


class Gateway:
    """Accepts requests, and knows which are open."""

    def __init__(self, supervisor: Supervisor, model: ModelInfo, settings: Settings, metrics: Metrics) -> None:
        self.supervisor = supervisor
        self.model = model
        self.settings = settings
        self.metrics = metrics
        self.draining = False
        self._open: set[Generation] = set()
        self._idle = asyncio.Event()
        self._tokenizing = asyncio.Lock()  # one large prompt at a time: they may take long, and memory

    @property
    def open_answers(self) -> int:
        """Answers that are being sent."""
        return len(self._open)

    def health(self) -> dict[str, Any]:
        """The body of /health."""
        settings = self.settings
        return {
            "status": "draining" if self.draining else self.supervisor.status,
            "model": self.model.id,
            "durability": {"asked": settings.durability, "allow_degrade": settings.allow_degrade},
            **self.supervisor.snapshot(),
        }

    async def job(self, kind: type[GenerationBody], body: bytes) -> Job:
        """Check and tokenize a body. Raises ApiError."""
        if self.draining:
            raise shutting_down()
        request = parse(kind, body)
        limit = self.settings.default_max_tokens
        if len(body) <= _THREAD_BODY:
            return build_job(request, self.model, limit)
        async with self._tokenizing:
            return await asyncio.to_thread(build_job, request, self.model, limit)

    def open(self, job: Job, request_id: str) -> Generation:
        """Start generating. Raises ApiError if there is no room."""
        if self.draining:
            raise shutting_down()
        generation = Generation(job, self.model.tokenizer, self.supervisor, request_id)
        self._open.add(generation)
        return generation

    def close(self, generation: Generation) -> None:
        """The answer is complete, or nobody waits for it."""
        generation.cancel()
        self._open.discard(generation)
        if not self._open:
            self._idle.set()

    def give_up_waiting(self) -> None:
        """Cut a running `wait_until_idle` short."""
        self._idle.set()

    async def wait_until_idle(self, seconds: float) -> bool:
        """Until no answer is open; False if that takes longer."""
        self._idle.clear()
        if not self._open:
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        return not self._open


async def _read_body(request: Request, limit: int) -> bytes:
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise too_large
    except TimeoutError:
        what = f"the body did not arrive within {_BODY_SECONDS:g} s"
        raise ApiError(408, what, code="body_too_slow") from None
    return bytes(body)


class Answer(Response):
    """The answer to one generation, streamed or whole, sent while watching whether the client is still there."""

    def __init__(self, gateway: Gateway, generation: Generation) -> None:
        self._gateway = gateway
        self._generation = generation
        self._shape = Shape(generation.job, gateway.model, generation.id)
        self._gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI."""
        watch = asyncio.ensure_future(self._watch(receive))
        try:
            if self._generation.job.stream:
                await self._stream(send)
            else:
                await self._whole(scope, receive, send)
        except OSError:
            log.info("request %s: the client went away", self._generation.id)
        finally:
            watch.cancel()
            self._gateway.close(self._generation)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            continue
        self._gone = True
        self._generation.cancel()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        deltas: list[Delta] = []
        while True:
            match await self._generation.next():
                case Delta() as delta:
                    deltas.append(delta)
                case Done(error):
                    break
        if self._gone:
            return
        response = error_response(error) if error else self._render_whole(deltas)
        await response(scope, receive, send)

    def _render_whole(self, deltas: list[Delta]) -> Response:
        try:
            body = _dump(self._shape.whole(deltas, self._generation.completion_tokens, self._generation.cached_tokens))
        except Exception as error:
            log.exception("request %s: the answer could not be written", self._generation.id)
            return error_response(request_failed(f"the answer could not be written ({error})"))
        return Response(body, headers=_JSON)

    async def _stream(self, send: Send) -> None:
        # Nothing is sent before the first event (or the first comment is due), so that an early error still has a
        # status of its own.
        keepalive = self._gateway.settings.keepalive
        event = await self._generation.next(keepalive)
        if self._gone:
            return
        if isinstance(event, Done) and event.error is not None:
            error = error_response(event.error)
            await send({"type": "http.response.start", "status": error.status_code, "headers": error.raw_headers})
            await send({"type": "http.response.body", "body": error.body})
            return
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # a proxy that collects chunks would undo streaming
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._write(send, b"".join(b"data: %b\n\n" % _dump(chunk) for chunk in self._shape.opening()))
        while not self._gone:
            if isinstance(event, Done):
                await self._write(send, self._terminal(event.error))
                await send({"type": "http.response.body", "body": b""})
                return
            try:
                data = self._event(event)
            except Exception as error:  # whatever it is, this stream must end with a terminal event
                log.exception("request %s: a chunk could not be written", self._generation.id)
                event = Done(request_failed(f"a chunk could not be written ({error})"))
                continue
            await self._write(send, data)
            event = await self._generation.next(keepalive)

    def _event(self, event: Delta | Notice | None) -> bytes:
        match event:
            case Delta():
                return b"data: %b\n\n" % _dump(self._shape.chunk(event))
            case Notice(text):
                return b": %b\n\n" % text.encode()
            case None:
                return b": keep-alive\n\n"

    def _terminal(self, error: ApiError | None) -> bytes:
        if error is not None:
            return b"data: %b\n\n" % _dump(error.body())
        done = b"data: [DONE]\n\n"
        if self._generation.job.include_usage:
            usage = self._shape.usage_chunk(self._generation.completion_tokens, self._generation.cached_tokens)
            return b"data: %b\n\n" % _dump(usage) + done
        return done

    async def _write(self, send: Send, data: bytes) -> None:
        if not data:
            return
        message = {"type": "http.response.body", "body": data, "more_body": True}
        try:
            await asyncio.wait_for(send(message), self._gateway.settings.send_timeout)
        except TimeoutError:
            self._gone = True
            raise OSError("the client takes nothing") from None


def build_app(gateway: Gateway) -> Starlette:
    """The ASGI application."""
    model = gateway.model
    card = {
        "id": model.id, "object": "model", "created": model.created, "owned_by": "outlast",
        "context_length": model.context,
    }  # fmt: skip

    async def generate(request: Request, kind: type[GenerationBody], prefix: str) -> Response:
        try:
            job = await gateway.job(kind, await _read_body(request, gateway.settings.max_body))
            return Answer(gateway, gateway.open(job, prefix + secrets.token_hex(16)))
        except ApiError as error:
            return error_response(error)
        except ClientDisconnect:  # in the middle of its body: nobody reads this
            return Response(status_code=400)

    async def chat(request: Request) -> Response:
        return await generate(request, ChatBody, "chatcmpl-")

    async def completions(request: Request) -> Response:
        return await generate(request, CompletionBody, "cmpl-")

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [card]})

    async def one_model(request: Request) -> Response:
        if request.path_params["id"] != model.id:
            what = f"the model {request.path_params['id']!r} does not exist"
            return error_response(ApiError(404, what, code="model_not_found", param="model"))
        return JSONResponse(card)

    async def health(request: Request) -> Response:
        able = gateway.supervisor.able and not gateway.draining
        return JSONResponse(gateway.health(), status_code=200 if able else 503)

    async def metrics(request: Request) -> Response:
        return Response(gateway.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def no_route(request: Request, exc: Exception) -> Response:
        status = getattr(exc, "status_code", 404)
        text = f"{request.method} {request.url.path} is not served"
        return error_response(ApiError(status, text, code="unknown_url"))

    async def crashed(request: Request, exc: Exception) -> Response:
        log.exception("%s %s failed", request.method, request.url.path, exc_info=exc)
        return error_response(request_failed(f"the server made a mistake ({type(exc).__name__})"))

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{id:path}", one_model),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers={404: no_route, 405: no_route, 500: crashed},
    )
