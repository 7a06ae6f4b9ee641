from collections.abc import Callable, Sequence
from typing import Any

def isa() -> str:
    """Instruction set of the shipped operators in use: generic, avx2 or avx512."""

def operators(isa: str) -> dict[str, int]:
    """Addresses of the shipped operators for an instruction set, by name; empty if it was not built."""

def set_flush(hook: Callable[[], object] | None) -> None:
    """What a replay calls before it looks at its arguments."""

def set_recording(hook: Callable[[], Callable[[Any, tuple[Any, ...]], Any] | None] | None) -> None:
    """What a replay asks first: an answer that is not None is called with it and its arguments instead of the plan."""

class Program:
    """A plan in memory."""

    def __init__(
        self,
        owner: object,
        executor: int,
        block: bytes,
        size: int,
        steps: Sequence[tuple[int, int, int, int]],
        patches: Sequence[tuple[int, int, int]],
        slots: int,
        estimate: float,
    ) -> None: ...
    def bind(self, slot: int, address: int) -> None: ...
    def run(self, first: int, count: int, timeout: float) -> tuple[int, int, str]: ...
    def run_timed(self, first: int, count: int, timeout: float) -> tuple[tuple[int, int, str], list[int]]: ...
    @property
    def block(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def runs(self) -> int: ...

class Replay:
    """Calls of a captured function."""

    def __init__(
        self,
        types: tuple[type, ...],
        exchange: int,
        grad_enabled: Callable[[], bool],
        miss: Callable[[tuple[Any, ...]], Any],
        grad: Callable[[tuple[Any, ...]], Any],
        timeout: float,
    ) -> None: ...
    def __call__(self, *args: Any) -> Any: ...
    def add(
        self,
        inputs: Sequence[tuple[int, Sequence[int], Sequence[int]]],
        same_as: Sequence[int],
        alias_sensitive: bool,
        constants: Sequence[Any],
        constant_keys: Sequence[tuple[int, Sequence[int], Sequence[int]]],
        outputs: Sequence[tuple[int, Sequence[int], Sequence[int]]],
        form: str,
        finish: Callable[[tuple[Any, ...], tuple[Any, ...]], Any] | None,
        python: Callable[[tuple[Any, ...]], Any] | None,
        program: Program | None,
        most: int,
    ) -> None: ...
    def clear(self) -> None: ...
    @property
    def variants(self) -> int: ...
    @property
    def calls(self) -> int: ...
    @property
    def misses(self) -> int: ...
