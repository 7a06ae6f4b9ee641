"""The extension built from native/engine; `decoder.py` and `weights.py` are its documented surface.

Functions raise ValueError for arguments that do not fit, RuntimeError for a failed operator or misuse of the plan.
Addresses are plain integers; whoever passes one keeps the memory alive.
"""

from outlast.engines.native.weights import Buffer

class Config:
    def __init__(
        self,
        *,
        layers: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        ffn: int,
        vocab: int,
        context: int,
        epsilon: float,
        rope_base: float,
        window: int = 0,
        rope_scaling: int = 0,
        rope_factor: float = 1.0,
        rope_original_context: float = 0.0,
        rope_beta_fast: float = 32.0,
        rope_beta_slow: float = 1.0,
    ) -> None: ...
    @property
    def layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def ffn(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def epsilon(self) -> float: ...
    @property
    def rope_base(self) -> float: ...

class KvGeometry:
    """ol_kv_geometry of native/include/outlast/region.h."""

    def __init__(
        self, *, pieces: int, block_tokens: int, row_bytes: int, blocks: int, piece_stride: int, block_bytes: int
    ) -> None: ...
    @property
    def pieces(self) -> int: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def piece_stride(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...

class SamplerParams:
    def __init__(
        self,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int = 0,
        stream: int = 0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: list[tuple[int, float]] = ...,
        top_logprobs: int = 0,
        typical_p: float = 1.0,
        min_tokens: int = 0,
        stop_tokens: list[int] = ...,
    ) -> None: ...

class Result:
    @property
    def handle(self) -> int: ...
    @property
    def token(self) -> int | None: ...
    @property
    def logprob(self) -> float: ...
    @property
    def top(self) -> list[tuple[int, float]]: ...
    @property
    def verified(self) -> bool: ...
    @property
    def finite(self) -> bool: ...
    @property
    def more(self) -> list[tuple[int, float, list[tuple[int, float]]]]: ...

class Decoder:
    def __init__(
        self,
        config: Config,
        tensors: list[tuple[str, int, int, int, int]],
        weights: int,
        weights_bytes: int,
        pool: int,
        geometry: KvGeometry,
        isa: str = "",
        compute: str = "int8x2",
    ) -> None:
        """`tensors`: (name, type, rows or 0 for a vector, columns, offset). `isa` "" = the one `isa()` names."""

    def bind(self, slots: dict[str, int]) -> None: ...
    def add(
        self, key: int, generation: int, tokens: list[int], prompt_length: int, computed: int, params: SamplerParams
    ) -> int: ...
    def set_table(self, handle: int, blocks: list[int]) -> None: ...
    def remove(self, handle: int) -> None: ...
    def rewind(self, handle: int, computed: int) -> None: ...
    def computed(self, handle: int) -> int: ...
    def tokens(self, handle: int) -> list[int]: ...
    def length(self, handle: int) -> int: ...
    def plan(self, batch: list[tuple[int, int, int, list[int]]], parts: int) -> None:
        """`batch`: (handle, new positions, positions to check again, drafts)."""

    @property
    def tasks_address(self) -> int: ...
    @property
    def tasks_count(self) -> int: ...
    @property
    def plan_number(self) -> int: ...
    @property
    def plans_built(self) -> int: ...
    @property
    def writes_address(self) -> int: ...
    @property
    def writes_count(self) -> int: ...
    @property
    def planned(self) -> bool: ...
    def run(self, threads: int = 1) -> None: ...
    def commit(self) -> list[Result]: ...
    def abandon(self) -> None: ...
    def accepted(self) -> list[int]: ...
    def logits(self) -> list[bytes]: ...

def kv_geometry(config: Config, block_tokens: int, blocks: int) -> KvGeometry: ...
def operators() -> dict[str, int]: ...
def isa() -> str:
    """The instruction set in use. RuntimeError for an OUTLAST_ISA that is unknown or that this CPU does not run."""

def isas() -> list[str]:
    """All that this build and CPU can run."""

def matrix_bytes(kind: int, rows: int, columns: int) -> int: ...
def repack(
    source: memoryview, source_offset: int, kind: int, rows: int, columns: int, target: Buffer, target_offset: int
) -> None: ...
def publish_word(target: Buffer, offset: int, value: int) -> None:
    """Store 64 bits with release ordering."""

def read_word(source: Buffer, offset: int) -> int:
    """Load 64 bits with acquire ordering."""

def read_row(weights: Buffer, offset: int, kind: int, rows: int, columns: int, row: int) -> list[float]:
    """One row of a repacked matrix, dequantized."""

def multiply(
    weights: Buffer, offset: int, kind: int, rows: int, columns: int, x: bytes, compute: str, isa: str = ""
) -> bytes:
    """Float rows [tokens][columns] times a repacked matrix: float [tokens][rows]."""

def address(buffer: Buffer) -> int: ...
def philox(counter: list[int], key: list[int]) -> list[int]: ...
def uniform(seed: int, stream: int, position: int) -> float: ...
def rope_angles(config: Config, position: int, factors: list[float] = ...) -> list[float]:
    """cos, sin of each pair. `factors`: of the tensor rope_freqs."""

def sample(
    logits: bytes, params: SamplerParams, counts: list[tuple[int, int]], position: int, generated: int = 0
) -> Result:
    """The sampler alone. `counts`: (token, times generated; 0 = only in the prompt)."""
