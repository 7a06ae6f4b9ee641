"""`torch.compile(backend="outlast")`: Dynamo finds the graphs, the executor runs them.

Registered as an entry point of the group `torch_dynamo_backends`. AOT autograd turns each graph into aten calls,
forward and backward apart, so that training works: neither part needs autograd while it runs. A graph is captured when
it is first called with real tensors, and again (cheaply, without compiling) for each new shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from outlast.executor.replay import DEFAULT_VARIANTS, Replay
from outlast.executor.shared import default_executor

#: replays of this process's compiled graphs, newest last, for reports
_graphs: list[Replay] = []
_GRAPHS_KEPT = 256


def outlast(graph: Any, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """Compile an FX graph that Dynamo captured. `options`: `fuse` (see `capture`), `timeout` in seconds."""
    import torch
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    chosen = dict(options or {})
    fuse, timeout = chosen.pop("fuse", None), float(chosen.pop("timeout", 60.0))
    if chosen:
        from outlast.core.errors import UsageError

        raise UsageError(f"options {sorted(chosen)} of the backend 'outlast'", why="it knows fuse and timeout")

    def compiler(aten: Any, inputs: Sequence[Any]) -> Any:
        replay = Replay(aten.forward, fuse, "recapture", default_executor(), DEFAULT_VARIANTS, timeout)
        replay.lenient = True
        _graphs.append(replay)
        del _graphs[:-_GRAPHS_KEPT]

        def run(*args: Any) -> Any:
            # AOT autograd has taken gradients out; parameters that want one are plain memory here.
            with torch.no_grad():
                result = replay(*args)
            return list(result) if isinstance(result, tuple) else result

        return make_boxed_func(run)

    compiled: Callable[..., Any] = aot_autograd(fw_compiler=compiler)(graph, example_inputs)
    return compiled


def replays() -> list[Replay]:
    """The replays behind compiled graphs of this process, oldest first."""
    return list(_graphs)
