"""The command as a whole: dispatch, exit codes, errors."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import types

import pytest

import outlast
from outlast import cli
from outlast.core.errors import NotPossibleHere, OutlastError, UsageError


def install(monkeypatch: pytest.MonkeyPatch, run: object) -> None:
    """Make `outlast probe` a verb that calls `run`."""
    module = types.ModuleType("outlast.cli.probe", "Probe something.\n\nAt length.")
    module.configure = lambda parser: parser.add_argument("--level", type=int)  # type: ignore[attr-defined]
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "outlast.cli.probe", module)
    monkeypatch.setitem(cli.VERBS, "probe", "outlast.cli.probe")


def raising(error: BaseException) -> object:
    def run(arguments: argparse.Namespace) -> int:
        raise error

    return run


def test_verb_gets_its_arguments_and_gives_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, lambda arguments: arguments.level)
    assert cli.main(["probe", "--level", "7"]) == 7


@pytest.mark.parametrize(
    ("error", "code"),
    [(OutlastError("it broke", why="a reason", do="Mend it."), 1), (UsageError("odd"), 2), (NotPossibleHere("no"), 3)],
)
def test_error_says_what_why_and_what_to_do_on_stderr_and_sets_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: OutlastError, code: int
) -> None:
    install(monkeypatch, raising(error))
    assert cli.main(["probe"]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"outlast: {error}\n"


def test_interrupt_ends_with_130_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, raising(KeyboardInterrupt()))
    assert cli.main(["probe"]) == 130
    assert capsys.readouterr().err == ""


def test_defect_is_not_dressed_up_as_a_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["probe"])


@pytest.mark.parametrize("words", [["no-such-verb"], ["probe", "--level", "x"], ["--odd"]])
def test_usage_error_is_2(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    install(monkeypatch, lambda arguments: 0)
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2


def test_no_verb_shows_all_of_them_with_their_summaries(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    shown = capsys.readouterr().out
    for verb in cli.VERBS:
        assert f"\n  {verb} " in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"outlast {outlast.__version__}\n"


@pytest.mark.parametrize("verb", list(cli.VERBS))
def test_every_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([verb, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: outlast {verb}")
    module = sys.modules[cli.VERBS[verb]]
    assert (module.__doc__ or "").splitlines()[0] in shown


def test_reader_that_goes_away_ends_the_command_quietly() -> None:
    command = [sys.executable, "-m", "outlast", "model", "list"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    complaint = process.stderr.read()
    assert process.wait(timeout=60) == 1
    assert complaint == b""
