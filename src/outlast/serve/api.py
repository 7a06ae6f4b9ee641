"""The request bodies of the HTTP API: which fields exist, which values they take, what is refused and under which name.

Fields and ranges are those of the OpenAI API, plus `top_k`, `min_p`, `typical_p`, `min_tokens`,
`repetition_penalty` and `ignore_eos`. A field
that would change the answer and is not implemented is refused, never ignored; fields without any effect on the answer
(`user`, `metadata`, ...) are accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from outlast.serve.errors import ApiError, invalid, unsupported

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 1024
MAX_CHOICES = 8
MAX_PROMPTS = 32
#: Sequences of one HTTP request: choices times prompts.
MAX_SEQUENCES = 64
MAX_TOP_LOGPROBS = 20


def _strings(value: Any) -> Any:
    """A string or a list of one to four strings, as a list."""
    if value is None:
        return None
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not 1 <= len(values) <= MAX_STOPS:
        raise ValueError(f"must be a string or a list of 1 to {MAX_STOPS} strings")
    for v in values:
        if not isinstance(v, str) or not 1 <= len(v) <= MAX_STOP_CHARACTERS:
            raise ValueError(f"each stop string must have 1 to {MAX_STOP_CHARACTERS} characters")
    return values


def _content(value: Any) -> Any:
    """A string, or a list of text parts, which are joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    for part in value:
        if not isinstance(part, dict) or set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError('each part must be {"type": "text", "text": "..."}; other kinds are not supported')
        if part["type"] != "text":
            raise ValueError("only parts of type text are supported")
    return "".join(part["text"] for part in value)


def _prompt(value: Any) -> Any:
    """Text, texts, token ids, or lists of token ids; as a list of str or list[int]."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")
    if all(type(v) is int for v in value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"must hold at most {MAX_PROMPTS} prompts")
    for v in value:
        if not isinstance(v, str) and not (isinstance(v, list) and v and all(type(t) is int for t in v)):
            raise ValueError("must hold strings, or non-empty lists of token ids")
    return value


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(_Body):
    """`stream_options`."""

    include_usage: bool | None = None


class Message(_Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_content)]
    tool_call_id: str | None = None  #: of a tool's answer; the template has no place for it
    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None
    name: Any = None
    audio: Any = None


class GenerationBody(_Body):
    """What both endpoints have in common."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=1 << 30)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=1 << 30)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    min_tokens: int | None = Field(None, ge=0, le=1 << 30)  #: no end of answer before so many
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 64) - 1)
    stop: Annotated[list[str] | None, BeforeValidator(_strings)] = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    ignore_eos: bool | None = None  #: go on past the model's end of answer, up to `max_tokens`
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    #: Fields that exist in the API and are not implemented: name -> (harmless values, what it would do).
    refused: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {}


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 30)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    service_tier: Any = None
    store: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    refused: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "tools": ((), "calling tools"),
        "tool_choice": (("none",), "choosing tools"),
        "parallel_tool_calls": ((), "calling tools"),
        "functions": ((), "calling functions"),
        "function_call": (("none",), "calling functions"),
        "response_format": (({"type": "text"},), "any format but text"),
        "modalities": ((["text"],), "any modality but text"),
        "audio": ((), "audio"),
        "prediction": ((), "predicted output"),
        "reasoning_effort": ((), "reasoning effort"),
        "service_tier": (("auto", "default"), "a choice of service tier"),
        "store": ((False,), "storing answers"),
        "verbosity": ((), "verbosity"),
        "web_search_options": ((), "web search"),
    }
    refused_in_messages: ClassVar[dict[str, str]] = {
        "tool_calls": "a past tool call", "function_call": "a past function call", "refusal": "a past refusal",
        "name": "a participant's name", "audio": "audio",
    }  # fmt: skip


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompt)]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    echo: Any = None
    suffix: Any = None

    refused: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "echo": ((False,), "repeating the prompt"),
        "suffix": (("",), "text after the answer"),
    }


B = TypeVar("B", bound=GenerationBody)


def parse(kind: type[B], body: bytes) -> B:
    """The checked body. Raises ApiError (400) that names the first field at fault."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _as_api_error(error) from None
    for name, (harmless, what) in kind.refused.items():
        value = getattr(request, name)
        if value is not None and value not in harmless:
            raise unsupported(name, what)
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "stream_options: only allowed when stream is true")
    if isinstance(request, ChatBody):
        _check_chat(request)
    elif isinstance(request, CompletionBody):
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise unsupported("best_of", "a best_of that differs from n")
        if len(request.prompt) * (request.n or 1) > MAX_SEQUENCES:
            raise invalid("prompt", f"prompt: prompts times n must be at most {MAX_SEQUENCES}")
    return request


def _check_chat(request: ChatBody) -> None:
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise invalid("max_tokens", "max_tokens: give this or max_completion_tokens, not both")
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs", "top_logprobs: only allowed when logprobs is true")
    for i, message in enumerate(request.messages):
        for name, what in request.refused_in_messages.items():
            if getattr(message, name) is not None:
                raise unsupported(f"messages[{i}].{name}", what)


def _path(location: tuple[int | str, ...]) -> str | None:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or None


_CODES: dict[str, tuple[str, Callable[[str], str]]] = {
    "extra_forbidden": ("unknown_parameter", lambda _: "this field is not known to this server"),
    "missing": ("missing_required_parameter", lambda _: "this field is required"),
}


def _as_api_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    kind, text = first["type"], first["msg"].removeprefix("Value error, ")
    if kind == "json_invalid":
        return invalid(None, f"the body is not JSON: {text}", "invalid_json")
    param = _path(first["loc"])
    if param is None:
        return invalid(None, "the body must be a JSON object", "invalid_type")
    code, say = _CODES.get(kind, ("invalid_type" if kind.endswith("_type") else "invalid_value", lambda t: t))
    return invalid(param, f"{param}: {say(text)}", code)
