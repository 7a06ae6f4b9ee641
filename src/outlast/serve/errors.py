"""Errors that a client of the API meets, in the API's own form."""

from __future__ import annotations

from typing import Any

from outlast.core.errors import OutlastError


class ApiError(OutlastError):
    """An answer other than the one asked for: `{"error": {"message", "type", "param", "code"}}` with `status`.

    Before the first byte of a stream it is the HTTP status; later it is the stream's terminal event.
    """

    def __init__(self, status: int, message: str, *, code: str | None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    @property
    def type(self) -> str:
        """The API's class of error, from the status."""
        if self.status == 503:
            return "overloaded_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        """The JSON object that clients expect."""
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}


def invalid(param: str | None, message: str, code: str | None = "invalid_value") -> ApiError:
    """The request itself is wrong; `param` names the field."""
    return ApiError(400, message, code=code, param=param)


def unsupported(param: str, what: str) -> ApiError:
    """The request asks for something that this server does not do, and must not be thought to have done."""
    return ApiError(400, f"{param}: {what} is not supported by this server", code="unsupported_parameter", param=param)


def killed_engine(times: int) -> ApiError:
    """The request was being worked on at each of several deaths of an engine."""
    return ApiError(
        500,
        f"this request killed its engine {times} times: the engine died each time while working on it. "
        "It was ended so that other requests live on",
        code="request_killed_engine",
    )


def no_engine(why: str) -> ApiError:
    """There is no engine, and waiting for one has a bound."""
    return ApiError(503, f"no engine became ready in time: {why}. Try again later", code="no_engine")


def overloaded(what: str) -> ApiError:
    """A bound on waiting or running requests is reached."""
    return ApiError(503, f"{what}. Try again later", code="overloaded")


def shutting_down() -> ApiError:
    """The server is on its way out."""
    return ApiError(503, "the server is shutting down", code="shutting_down")


def request_failed(reason: str) -> ApiError:
    """A fault of this request alone."""
    return ApiError(500, f"this request failed: {reason}", code="request_failed")


def contradiction(what: str) -> ApiError:
    """An engine reported something that does not go with what the client already has."""
    return ApiError(
        500, f"the stream was ended because it could not be continued truthfully: {what}", code="contradiction"
    )
