"""What a server is made of, beside its settings: the model as clients see it, the engines' recipe, the log's owner."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from outlast.serve.log_owner import EngineSpec, LogOwner
from outlast.serve.settings import Settings
from outlast.serve.text import ModelInfo


@dataclass(frozen=True, slots=True)
class Assembly:
    """The parts of one server. `close` gives back what they hold; it is called when all workers have ended."""

    model: ModelInfo
    engine: EngineSpec
    log: LogOwner
    close: Callable[[], None]


def assemble(settings: Settings) -> Assembly:
    """Call the function that `settings.assembly` names."""
    module, _, name = settings.assembly.partition(":")
    function = getattr(importlib.import_module(module), name)
    return cast(Assembly, function(settings))
