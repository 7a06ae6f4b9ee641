"""The parts of a server with the transformers engine: a model folder or a GGUF, its tokenizer, memory, the epoch log.

Nothing here imports torch: only the workers do.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import outlast
from outlast.core.errors import UsageError
from outlast.core.memory import Memory
from outlast.engines.hf.convert import converted, folder_for
from outlast.engines.hf.folder import BLOCK_TOKENS, digest_of, pool_geometry, read_shape
from outlast.engines.hf.tokenizer import FolderTokenizer
from outlast.engines.native import models
from outlast.engines.native.gguf import Gguf
from outlast.engines.native.tokenizer import TextTokenizer, Tokenizer
from outlast.serve.assembly import Assembly
from outlast.serve.log_owner import EngineSpec
from outlast.serve.options import EngineOption, parse_options
from outlast.serve.parts import open_log, pool_tokens
from outlast.serve.settings import Settings
from outlast.serve.text import ModelInfo

log = logging.getLogger("outlast.serve")

FACTORY = "outlast.engines.hf.engine:create"
#: Defaults are those of `outlast.engines.hf.engine.create`, which imports torch; a test compares them.
OPTIONS = (
    EngineOption("dtype", "float32", choices=("float32", "bfloat16", "float16", "auto")),
    EngineOption("prefill_chunk", 64, 1, 65536),
    EngineOption("replay", "exact", choices=("exact", "fast")),
    EngineOption("verify", True),
    EngineOption("block_tokens", BLOCK_TOKENS, 1, 4096),
)


def assemble(settings: Settings) -> Assembly:
    """Find the model, convert a GGUF, take memory. Raises OutlastError for what is missing or not supported."""
    if settings.fast:
        raise UsageError("--fast with --engine transformers", why="only the native engine has that mode")
    chosen = parse_options("transformers", settings.engine_options, OPTIONS)
    source = Path(settings.model).expanduser()
    if source.is_dir():
        source = source.absolute()
        read_shape(source)  # what can not be served is refused before its weights are read
        name, folder, digest = source.name, source, digest_of(source)
        tokenizer: TextTokenizer = FolderTokenizer(folder)
    else:
        source = models.find(settings.model)
        known = models.MODELS.get(settings.model)
        with Gguf(source) as gguf:
            tokenizer = Tokenizer(gguf)
            file_digest = known.sha256 if known is not None else gguf.digest()
        name = known.name if known is not None else source.stem
        if not folder_for(file_digest).exists():
            log.warning("converting %s for transformers; this is done once and takes 10 s for each 100 MB", source)
        folder, digest = converted(source, file_digest)
    shape = read_shape(folder, str(chosen.get("dtype", "float32")))
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    kv_tokens = pool_tokens(settings.kv_tokens, shape.context, shape.token_bytes, weights)
    geometry = pool_geometry(shape, kv_tokens, int(chosen.get("block_tokens", BLOCK_TOKENS)))
    epoch_log = open_log(settings, kv_tokens, shape.token_bytes)
    try:
        # Pages only: an engine never trusts what another left in them, but pages that were touched are quick to fill.
        pool = Memory.anonymous(geometry.pool_bytes, name="outlast-kv")
    except BaseException:
        epoch_log.close()
        raise
    options = {
        "kv_fd": pool.fd, "kv_tokens": kv_tokens, "threads": settings.threads,
        "allow_degrade": settings.allow_degrade, **chosen, "model": str(folder), "digest": digest,
        "dtype": shape.dtype,
    }  # fmt: skip
    build = hashlib.sha256(f"{digest} transformers {outlast.__version__}".encode()).hexdigest()
    info = ModelInfo(
        id=name,
        # A request must fit the pool as well as the context.
        context=min(shape.context, kv_tokens),
        tokenizer=tokenizer,
        fingerprint=f"fp_{build[:12]}",
        created=int(source.stat().st_mtime),
    )
    return Assembly(info, EngineSpec(FACTORY, options, {"kv": pool.fd}), epoch_log, pool.close)
