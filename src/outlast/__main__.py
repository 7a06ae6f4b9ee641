"""`python -m outlast`: the `outlast` command."""

from __future__ import annotations

import sys

from outlast.cli import main

sys.exit(main())
