"""`python -m outlast.serve SETTINGS [PARENT]`: a server in a process of its own, see outlast.serve.subprocess_server.

SETTINGS is the JSON of outlast.serve.settings.Settings. With PARENT, a pid, the server ends when that process does.
"""

from __future__ import annotations

import logging
import sys

from outlast.core.errors import OutlastError
from outlast.serve import run
from outlast.serve.settings import Settings
from outlast.serve.worker import die_with_parent


def main(arguments: list[str]) -> int:
    """Run; errors go to standard error."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    if len(arguments) > 1:
        die_with_parent(int(arguments[1]))
    try:
        return run(Settings.from_json(arguments[0]))
    except OutlastError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
