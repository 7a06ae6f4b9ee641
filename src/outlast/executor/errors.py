"""What a failed step of a plan becomes."""

from __future__ import annotations

from typing import Any, NoReturn

from outlast.core.errors import OperatorFailed, Refused, TimedOut


class IndexRefused(OperatorFailed, IndexError):
    """An index that an operator met is out of range: eager raises IndexError too."""


class ArgumentRefused(OperatorFailed, RuntimeError):
    """What an operator met in its arguments: eager raises RuntimeError too."""


#: how the text of a kernel begins that has an exception of eager PyTorch behind it
_EAGER = {"IndexError: ": IndexRefused, "RuntimeError: ": ArgumentRefused}


def raise_step_failure(program: Any, step: int, status: int, text: str) -> NoReturn:
    """Raise what the status of a step stands for."""
    if status == 1:
        raise TimedOut("a plan is not done in time", why="an operator does not end, or the machine is overloaded")
    if text == "the executor is closed":
        raise Refused("a plan was not run", why=text, do="Capture again on an executor that is open.")
    for prefix, kind in _EAGER.items():
        if text.startswith(prefix):
            raise kind(f"step {step} of a plan failed", why=text.removeprefix(prefix))
    raise OperatorFailed(f"step {step} of a plan failed with status {status}", why=text)
