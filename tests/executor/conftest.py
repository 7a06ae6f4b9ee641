"""Makes the modules that these tests share importable, and their fixtures known."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from backend_fixtures import backend, cubins, host_operators, toolkit

__all__ = ["backend", "cubins", "host_operators", "toolkit"]
