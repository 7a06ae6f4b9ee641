"""`outlast chat` without a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from saying_server import DONE, HEAD, SayingServer, event
from serve_harness import StartServer, alive, wait_for

from outlast import cli
from outlast.chat.own_server import settings_for
from outlast.cli import chat as chat_verb
from outlast.core.errors import NotPossibleHere
from outlast.engines.native import models
from outlast.serve.settings import Settings


def chat(*words: str, lines: str = "", **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outlast", "chat", *words]
    return subprocess.run(command, input=lines, capture_output=True, text=True, timeout=60, check=False, **more)


def test_lines_in_answers_out(start_server: StartServer) -> None:
    done = chat("--url", start_server().url, lines="<<say:one ä>>\n\n<<say:/two\n>>\n/exit <<say:three>>\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == "one ä"
    assert done.stdout.splitlines()[-1] == "one ä", "the script takes the first order of the conversation"
    assert len(done.stdout.splitlines()) == 4, "a slash is no command here"


def test_one_json_object_per_answer(saying: SayingServer) -> None:
    saying.say(HEAD, event("a\x1b[2J"), event("b", "stop"), DONE)
    saying.say(HEAD, event("half"))
    done = chat("--url", saying.url, "--json", lines="1\n2\n")
    first, second = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 1
    assert (first["text"], first["tokens"], first["takeovers"]) == ("a\x1b[2Jb", 2, 0)
    assert (first["finish_reason"], first["error"]) == ("stop", None)
    assert first["tokens_per_second"] > 0
    assert second["text"] == "half"
    assert "cut off" in second["error"]
    assert "\x1b" not in done.stdout


def test_server_that_is_gone_ends_it(saying: SayingServer) -> None:
    saying.say(HEAD, event("a"), event("", "stop"), DONE)
    saying.say("reset")
    done = chat("--url", saying.url, lines="1\n2\n3\n")
    assert (done.returncode, done.stdout) == (1, "a\n\n")
    assert "no answer from" in done.stderr
    assert "what follows is not asked" in done.stderr


@pytest.mark.faults
def test_own_server_runs_for_the_chat_alone(tiny_gguf: Path) -> None:
    command = [sys.executable, "-m", "outlast", "chat", "--model", str(tiny_gguf), "--json", "--max-tokens", "5"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("hello\n")
    process.stdin.flush()
    record = json.loads(process.stdout.readline())
    assert record["tokens"] <= 5
    servers = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(servers) == 1
    process.stdin.close()
    assert process.wait(30) == 0
    process.stdout.close()
    wait_for(lambda: not any(map(alive, servers)), "the server is gone")


def test_missing_model_says_how_to_get_it(tmp_path: Path) -> None:
    done = chat(lines="hi\n", env={**os.environ, "OUTLAST_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 3
    assert "outlast model fetch" in done.stderr


@pytest.mark.parametrize(
    "words", [["--temperature", "3"], ["--max-tokens", "0"], ["--seed", str(1 << 64)], ["--url", "ftp://x"],
              ["--url", "http://127.0.0.1:1", "--fast"], ["--model", "no/such.gguf"]],
)  # fmt: skip
def test_what_makes_no_sense_is_a_usage_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", *words]) == 2
    assert capsys.readouterr().err.startswith("outlast: ")


def test_fast_mode_is_never_only_pretended(tiny_gguf: Path) -> None:
    try:
        assert getattr(settings_for("m", fast=True), "fast") is True  # noqa: B009
    except NotPossibleHere:
        assert not hasattr(Settings(), "fast")


@pytest.mark.parametrize(("typed", "fetched"), [("", True), ("y", True), ("n", False), (None, False)])
def test_person_is_asked_before_anything_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, typed: str | None, fetched: bool
) -> None:
    asked: list[str] = []

    def type_it(question: str) -> str:
        asked.append(question)
        if typed is None:
            raise EOFError
        return typed

    calls: list[str] = []
    monkeypatch.setenv("OUTLAST_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("builtins.input", type_it)
    monkeypatch.setattr(models, "fetch", lambda name, progress: calls.append(name))
    if fetched:
        chat_verb._prepare("builtin", interactive=True)
    else:
        with pytest.raises(NotPossibleHere):
            chat_verb._prepare("builtin", interactive=True)
    assert asked == ["Fetch it now? [Y/n] "]
    assert calls == (["builtin"] if fetched else [])
