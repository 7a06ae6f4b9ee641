"""From a checked request body to the sequences an engine is asked for."""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass

from outlast.core.errors import UsageError
from outlast.engines.protocol import EngineRequest, SamplingParams
from outlast.serve.api import ChatBody, CompletionBody, GenerationBody
from outlast.serve.errors import ApiError, invalid
from outlast.serve.text import ModelInfo


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request, in terms of tokens. Choice `i` continues prompt `i // n`."""

    chat: bool
    prompts: tuple[tuple[int, ...], ...]
    n: int
    max_tokens: tuple[int, ...]  #: per prompt
    stop_tokens: tuple[int, ...]
    params: SamplingParams  #: without the stream number
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool

    @property
    def choices(self) -> int:
        """Number of sequences."""
        return len(self.prompts) * self.n

    @property
    def prompt_tokens(self) -> int:
        """As usage counts them: each prompt once."""
        return sum(len(prompt) for prompt in self.prompts)

    def engine_request(self, choice: int, key: int) -> EngineRequest:
        """The sequence of one choice. Its number goes into the sampler, so that choices of one seed differ."""
        prompt = choice // self.n
        return EngineRequest(
            key=key,
            prompt=self.prompts[prompt],
            max_tokens=self.max_tokens[prompt],
            stop_tokens=self.stop_tokens,
            params=dataclasses.replace(self.params, stream=choice),
        )


def _messages(body: ChatBody) -> list[dict[str, str]]:
    """As templates know them: `developer` is a newer name of `system`."""
    return [
        {"role": "system" if m.role == "developer" else m.role, "content": m.content} for m in body.messages
    ]  # fmt: skip


def build_job(body: GenerationBody, model: ModelInfo, default_max_tokens: int) -> Job:
    """Tokenize and bound a request. Raises ApiError for what the model can not do. Takes milliseconds per 10 kB."""
    if body.model != model.id:
        raise ApiError(404, f"the model {body.model!r} does not exist", code="model_not_found", param="model")
    tokenizer = model.tokenizer
    asked = body.max_tokens
    if isinstance(body, ChatBody):
        field = "messages"
        try:
            prompts = [tuple(tokenizer.encode_chat(_messages(body)))]
        except UsageError as error:  # the template has rules of its own, for example on the order of roles
            raise invalid("messages", f"messages: {error}") from None
        asked = asked if asked is not None else body.max_completion_tokens
        logprobs, top = bool(body.logprobs), body.top_logprobs or 0
    else:
        assert isinstance(body, CompletionBody)
        field = "prompt"
        prompts = [tuple(tokenizer.encode(p)) if isinstance(p, str) else tuple(p) for p in body.prompt]
        logprobs, top = body.logprobs is not None, body.logprobs or 0
    for prompt in prompts:
        if not prompt:
            raise invalid(field, f"{field}: holds no tokens")
        if not all(0 <= token < model.tokenizer.vocab_size for token in prompt):
            raise invalid(field, f"{field}: token ids must be between 0 and {model.tokenizer.vocab_size - 1}")
    return Job(
        chat=isinstance(body, ChatBody),
        prompts=tuple(prompts),
        n=body.n or 1,
        max_tokens=tuple(_limit(len(p), asked, model.context, default_max_tokens, field) for p in prompts),
        stop_tokens=() if body.ignore_eos else tokenizer.stop_tokens,
        params=_sampling(body, top, tokenizer.vocab_size),
        stops=tuple(body.stop or ()),
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        logprobs=logprobs,
    )


def _limit(prompt: int, asked: int | None, context: int, default: int, field: str) -> int:
    room = context - prompt
    if room < 1 or (asked is not None and asked > room):
        wants = f" and {asked} tokens of answer" if asked is not None else ""
        raise ApiError(
            400,
            f"the model's context holds {context} tokens; the prompt has {prompt}{wants}",
            code="context_length_exceeded",
            param=field,
        )
    return asked if asked is not None else min(room, default)


def _sampling(body: GenerationBody, top_logprobs: int, vocab_size: int) -> SamplingParams:
    def given(value: float | None, otherwise: float) -> float:
        return otherwise if value is None else value

    bias = []
    for text, value in (body.logit_bias or {}).items():
        if not text.isdecimal() or not 0 <= int(text) < vocab_size:
            raise invalid("logit_bias", f"logit_bias: {text[:20]!r} is not a token id")
        bias.append((int(text), value))
    # Without a seed, one is drawn here and travels with the request, so that a takeover continues the same draw.
    seed = secrets.randbits(64) if body.seed is None else body.seed & 0xFFFFFFFFFFFFFFFF
    return SamplingParams(
        temperature=given(body.temperature, 1.0),
        top_p=given(body.top_p, 1.0),
        top_k=body.top_k or 0,
        min_p=given(body.min_p, 0.0),
        typical_p=given(body.typical_p, 1.0),
        min_tokens=body.min_tokens or 0,
        seed=seed,
        presence_penalty=given(body.presence_penalty, 0.0),
        frequency_penalty=given(body.frequency_penalty, 0.0),
        repetition_penalty=given(body.repetition_penalty, 1.0),
        logit_bias=tuple(sorted(bias)),
        top_logprobs=top_logprobs,
    )
