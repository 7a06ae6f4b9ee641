"""From logits to a token: the native engine's sampler, so that equal logits give equal tokens in both engines."""

from __future__ import annotations

from collections.abc import Sequence

from outlast.engines.native import _native
from outlast.engines.native.decoder import sampler_params
from outlast.engines.native.sequences import Emitted
from outlast.engines.protocol import EngineRequest


class Sampler:
    """Chooses tokens of a vocabulary of `vocab` ids."""

    def __init__(self, vocab: int) -> None:
        self._bytes = vocab * 4

    def choose(self, logits: bytes, request: EngineRequest, generated: Sequence[int]) -> Emitted | None:
        """The token behind prompt and `generated`, from native float32 logits; None if they are not finite."""
        if len(logits) != self._bytes:
            raise ValueError(f"{len(logits)} bytes of logits, expected {self._bytes}")
        params = request.params
        counts: dict[int, int] = {}
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            counts = dict.fromkeys(request.prompt, 0)
            for token in generated:
                counts[token] = counts.get(token, 0) + 1
        position = len(request.prompt) + len(generated)
        native = sampler_params(params, request.stop_tokens)
        result = _native.sample(logits, native, list(counts.items()), position, len(generated))
        if not result.finite or result.token is None:
            return None
        return Emitted(result.token, result.logprob, tuple(result.top))
