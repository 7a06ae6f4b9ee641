"""The JSON that clients get: chunks of a stream and whole answers, for both endpoints.

Beside the API's own fields each chunk has `outlast`: `engine`, the writer epoch of the engine that produced it, and
`token_ids`, the tokens it stands for. A whole answer has the same per choice, with all engines that took part.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from outlast.engines.protocol import Emission
from outlast.serve.jobs import Job
from outlast.serve.streams import Delta
from outlast.serve.text import ModelInfo, Tokenizer

#: JSON has no minus infinity; the API uses this for probability 0.
_LOWEST_LOGPROB = -9999.0


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LOWEST_LOGPROB


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}


class Shape:
    """Builds the objects of one request."""

    def __init__(self, job: Job, model: ModelInfo, request_id: str) -> None:
        self._job = job
        self._model = model
        self._head = {
            "id": request_id,
            "created": int(time.time()),
            "model": model.id,
            "system_fingerprint": model.fingerprint,
        }
        self._chunk_object = "chat.completion.chunk" if job.chat else "text_completion"
        self._whole_object = "chat.completion" if job.chat else "text_completion"

    # --- streaming

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        chunk = {**self._head, "object": self._chunk_object, "choices": choices, **more}
        if self._job.include_usage:
            chunk.setdefault("usage", None)
        return chunk

    def opening(self) -> list[dict[str, Any]]:
        """The first chunks: the role of each choice (chat only)."""
        if not self._job.chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}])
            for i in range(self._job.choices)
        ]

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """One token of one choice. Its last carries the text left over and `finish_reason`, in one chunk."""
        choice: dict[str, Any] = {"index": delta.choice}
        if self._job.chat:
            choice["delta"] = {"content": delta.text}
        else:
            choice["text"] = delta.text
        choice["logprobs"] = self._logprobs([delta])
        choice["finish_reason"] = delta.finish
        ours = {"engine": delta.writer_epoch, "token_ids": [delta.emission.token]}
        return self._chunk([choice], outlast=ours)

    def usage_chunk(self, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
        """The last chunk of a stream that asked for usage: no choices."""
        return self._chunk([], usage=self.usage(completion_tokens, cached_tokens))

    # --- whole

    def usage(self, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
        """`usage`."""
        prompt = self._job.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }

    def whole(self, deltas: Sequence[Delta], completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
        """The answer to a request without `stream`."""
        by_choice: list[list[Delta]] = [[] for _ in range(self._job.choices)]
        for delta in deltas:
            by_choice[delta.choice].append(delta)
        choices = []
        for index, mine in enumerate(by_choice):
            text = "".join(delta.text for delta in mine)
            choice: dict[str, Any] = {"index": index}
            if self._job.chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = text
            choice["logprobs"] = self._logprobs(mine)
            choice["finish_reason"] = mine[-1].finish
            choice["outlast"] = {
                "engines": sorted({delta.writer_epoch for delta in mine}),
                "token_ids": [delta.emission.token for delta in mine],
            }
            choices.append(choice)
        usage = self.usage(completion_tokens, cached_tokens)
        return {**self._head, "object": self._whole_object, "choices": choices, "usage": usage}

    # --- log probabilities

    def _logprobs(self, deltas: Sequence[Delta]) -> dict[str, Any] | None:
        if not self._job.logprobs:
            return None
        tokenizer = self._model.tokenizer
        if self._job.chat:
            return {"content": [self._chat_logprob(delta.emission) for delta in deltas], "refusal": None}
        tokens = [_token(tokenizer, d.emission.token, d.emission.logprob) for d in deltas]
        tops = [
            {_token(tokenizer, t, p)["token"]: _finite(p) for t, p in d.emission.top[: self._job.params.top_logprobs]}
            for d in deltas
        ]
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": tops if self._job.params.top_logprobs else None,
            "text_offset": [delta.offset for delta in deltas],
        }

    def _chat_logprob(self, emission: Emission) -> dict[str, Any]:
        tokenizer = self._model.tokenizer
        top = emission.top[: self._job.params.top_logprobs]
        tops = [_token(tokenizer, token, logprob) for token, logprob in top]
        return {**_token(tokenizer, emission.token, emission.logprob), "top_logprobs": tops}
