"""Errors that users meet. Each says what happened, why, and what to do about it."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_POSSIBLE = 3  #: not possible on this machine; the message names what is possible instead


class OutlastError(Exception):
    """Base of all errors of this package.

    `what` happened, `why` it happened and what to `do`; `exit_code` is what a command ends with.
    """

    exit_code = EXIT_FAILED

    def __init__(self, what: str, *, why: str = "", do: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.do = do

    def __str__(self) -> str:
        text = self.what
        if self.why:
            text += f": {self.why}"
        if self.do:
            text += f". {self.do}"
        return text


class NotPossibleHere(OutlastError):
    """This machine lacks something; the text says what would be possible instead."""

    exit_code = EXIT_NOT_POSSIBLE


class UsageError(OutlastError):
    """The caller asked for something that has no meaning."""

    exit_code = EXIT_USAGE


class Refused(OutlastError):
    """A bounded resource is full, or the request can never fit."""


class TimedOut(OutlastError):
    """A wait reached its deadline; nothing was lost, the work may still complete."""


class OperatorFailed(OutlastError):
    """An executor operator reported an error; carries its ticket."""

    def __init__(self, what: str, *, ticket: int = 0, why: str = "", do: str = "") -> None:
        super().__init__(what, why=why, do=do)
        self.ticket = ticket


class Fenced(OutlastError):
    """A newer writer owns the log; this process must not write any more."""


class DurabilityLost(OutlastError):
    """The log could not be made as durable as was asked for (disk full, I/O error)."""


class CorruptState(OutlastError):
    """Stored state failed a check and was refused."""
