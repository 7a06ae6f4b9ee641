"""The parts of a server with the native engine: a GGUF model, its tokenizer, memory for its weights, the epoch log."""

from __future__ import annotations

import contextlib
import hashlib

import outlast
from outlast.core.memory import Memory
from outlast.engines.native import decoder as decoders
from outlast.engines.native import models, weights
from outlast.engines.native.gguf import Gguf
from outlast.engines.native.loading import BLOCK_TOKENS, pool_geometry
from outlast.engines.native.tokenizer import Tokenizer
from outlast.serve.assembly import Assembly
from outlast.serve.log_owner import EngineSpec
from outlast.serve.options import EngineOption, parse_options
from outlast.serve.parts import open_log, pool_tokens
from outlast.serve.settings import Settings
from outlast.serve.text import ModelInfo

FACTORY = "outlast.engines.native.engine:create"
_FLOAT_BYTES = 4
#: Defaults are those of `outlast.engines.native.engine.create`, which is not imported here; a test compares them.
OPTIONS = (
    EngineOption("share_prefixes", True),
    EngineOption("speculate", 7, 0, 64),
    EngineOption("prefill_chunk", 64, 1, 65536),
    EngineOption("block_tokens", BLOCK_TOKENS, 1, 4096),
    EngineOption("specialise", True),
)


def assemble(settings: Settings) -> Assembly:
    """Find the model, read its tokenizer, take memory. Raises OutlastError for what is missing or not supported."""
    chosen = parse_options("native", settings.engine_options, OPTIONS)
    path = models.find(settings.model)
    known = models.MODELS.get(settings.model)
    with Gguf(path) as gguf:
        plan = weights.plan(gguf)
        tokenizer = Tokenizer(gguf)
        digest = known.sha256 if known is not None else gguf.digest()
    config = plan.config
    token_bytes = config.layers * 2 * config.kv_heads * config.head_dim * _FLOAT_BYTES
    kv_tokens = pool_tokens(settings.kv_tokens, config.context, token_bytes, plan.size)
    log = open_log(settings, kv_tokens, token_bytes)
    with contextlib.ExitStack() as undo:
        undo.callback(log.close)
        memory = Memory.anonymous(plan.size, name="outlast-weights")
        undo.callback(memory.close)
        # Pages only: an engine never trusts what another left in them, but pages that were touched are quick to fill.
        geometry = pool_geometry(config, kv_tokens, int(chosen.get("block_tokens", BLOCK_TOKENS)))
        pool = Memory.anonymous(geometry.pool_bytes, name="outlast-kv")
        undo.pop_all()
    options = {
        "model": str(path),
        "weights_fd": memory.fd,
        "kv_fd": pool.fd,
        "kv_tokens": kv_tokens,
        "threads": settings.threads,
        "compute": "int8" if settings.fast else decoders.COMPUTE,
        "allow_degrade": settings.allow_degrade,
        **chosen,
    }

    def close() -> None:
        memory.close()
        pool.close()

    build = hashlib.sha256(f"{digest} {outlast.__version__}".encode()).hexdigest()
    info = ModelInfo(
        id=known.name if known is not None else path.stem,
        # A request must fit the pool as well as the context.
        context=min(config.context, kv_tokens),
        tokenizer=tokenizer,
        fingerprint=f"fp_{build[:12]}",
        created=int(path.stat().st_mtime),
    )
    return Assembly(info, EngineSpec(FACTORY, options, {"weights": memory.fd, "kv": pool.fd}), log, close)
