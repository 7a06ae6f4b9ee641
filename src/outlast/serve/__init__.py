"""The server: an OpenAI-compatible API whose streams survive their engine.

Import `outlast.serve.server` for the programmatic form. This module stays light: every engine worker imports it.
"""

from __future__ import annotations

from outlast.serve.settings import Settings

__all__ = ["Settings", "run"]


def run(settings: Settings) -> int:
    """Serve in this process until SIGTERM or SIGINT; the exit status.

    Prints one line of JSON, `{"event": "ready", "url": ...}`, once the first engine is active. Raises OutlastError if
    the parts can not be put together (no model, port taken, log folder in use).
    """
    from outlast.serve import assembly, server

    return server.run(settings, assembly.assemble(settings), server.print_ready)
