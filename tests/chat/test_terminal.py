"""`outlast chat` as a person meets it: on a pseudo-terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from saying_server import DONE, HEAD, SayingServer, event
from serve_harness import StartServer, alive, gauge, wait_for

from outlast.chat.conversation import Conversation, Turn
from outlast.chat.history import History

pytestmark = pytest.mark.faults

_STYLE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Person:
    """Types, and reads what the screen shows (without styles)."""

    def __init__(self, *words: str, state: Path) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # what a shell starts in its background inherits it ignored
            os.environ.update(TERM="xterm", XDG_STATE_HOME=str(state), NO_COLOR="1")
            os.execv(sys.executable, [sys.executable, "-m", "outlast", "chat", *words])
        self.seen = ""  #: of the last `until`
        self.all = ""
        self._raw = b""

    def until(self, what: str, seconds: float = 30.0) -> str:
        deadline = time.monotonic() + seconds
        while True:
            text = _STYLE.sub("", self._raw.decode(errors="replace")).replace("\r", "")
            if what in text:
                at = text.index(what) + len(what)
                self.seen, rest = text[:at], text[at:]
                self._raw = rest.encode()
                return self.seen
            assert time.monotonic() < deadline, f"{what!r} does not come: {text!r}"
            if select.select([self._fd], [], [], 0.1)[0]:
                try:
                    data = os.read(self._fd, 65536)
                except OSError:
                    data = b""
                assert data, f"the chat has ended: {text!r}"
                self._raw += data
                self.all += data.decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def say(self, text: str) -> None:
        self.type(text + "\r")

    def echoes(self) -> bool:
        return bool(termios.tcgetattr(self._fd)[3] & termios.ECHO)

    def end(self) -> int:
        """Its exit status, once it has ended."""
        with contextlib.suppress(OSError):
            while os.read(self._fd, 65536):
                pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)


class Sit:
    """Starts persons."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.persons: list[Person] = []

    def __call__(self, *words: str) -> Person:
        person = Person(*words, state=self.state)
        self.persons.append(person)
        person.until(">>> ")
        return person


@pytest.fixture
def sit(tmp_path: Path) -> Iterator[Sit]:
    found = Sit(tmp_path / "state")
    yield found
    for person in found.persons:
        person.close()


def test_answer_streams_and_control_d_leaves(saying: SayingServer, sit: Sit) -> None:
    saying.say(HEAD, event("Hel"), 0.2, event("lo \x1b]0;pwned\x07ä"), 0.3, event("", "stop"), DONE)
    person = sit("--url", saying.url)
    person.say("hi")
    person.until("Hel")
    person.until("lo ␛]0;pwned␇ä")
    person.until("2 tokens")
    person.until(">>> ")
    assert "\x1b]0;" not in person.all
    person.type("\x04")
    assert person.end() == 0


def test_control_c_stops_the_answer_and_keeps_the_conversation(start_server: StartServer, sit: Sit) -> None:
    server = start_server(options={"step_ms": 20})
    person = sit("--url", server.url)
    person.say("hello")
    wait_for(lambda: gauge(server, "outlast_live_requests") == 1, "the answer runs")
    time.sleep(0.5)
    assert not person.echoes()
    person.type("\x03")
    person.until("stopped")
    person.until(">>> ")
    wait_for(lambda: gauge(server, "outlast_live_requests") == 0, "the request is freed", 5)
    person.type("half a line")
    person.until("half a line")  # shown: the line is being edited, and not only about to be
    person.type("\x03")
    person.until(">>> ")
    person.say("/stats")
    person.until("1 turn")
    person.say("/exit")
    assert person.end() == 0


def test_kill_says_how_long_it_took(start_server: StartServer, sit: Sit) -> None:
    server = start_server(options={"step_ms": 5})
    wait_for(lambda: server.engine_pids("spare"), "a spare is ready")
    victim = server.engine_pids("active")[0]
    person = sit("--url", server.url, "--max-tokens", "100")
    person.say("/kill 10")
    person.say("hello")
    shown = person.until("1 takeover")
    assert re.search(rf"\[engine {victim} killed; another goes on, next token after \d+ ms\]", shown)
    assert not alive(victim)
    person.until(">>> ")
    person.say("/kill x")
    person.until("1 or more")


def test_kill_typed_during_the_answer(start_server: StartServer, sit: Sit) -> None:
    server = start_server(options={"step_ms": 20})
    wait_for(lambda: server.engine_pids("spare"), "a spare is ready")
    person = sit("--url", server.url, "--max-tokens", "100")
    person.say("hello")
    wait_for(lambda: gauge(server, "outlast_live_requests") == 1, "the answer runs")
    person.type("/kill\n/help\n")
    person.until("next token after")
    person.until("100 tokens")
    person.until("/reset")


def test_messages_of_several_lines(saying: SayingServer, sit: Sit) -> None:
    person = sit("--url", saying.url)
    saying.say(HEAD, event("ok1", "stop"), DONE)
    person.say("one\\")
    person.until("... ")
    person.say("two ä")
    person.until("ok1")
    person.until(">>> ")
    assert saying.bodies[-1]["messages"][-1]["content"] == "one\ntwo ä"
    saying.say(HEAD, event("ok2", "stop"), DONE)
    person.type("\x1b[200~/first\nsecond\n\x1b[201~\r")
    person.until("ok2")
    assert saying.bodies[-1]["messages"][-1]["content"] == "/first\nsecond"
    person.until(">>> ")
    saying.say(HEAD, event("ok3", "stop"), DONE)
    person.say("//help")
    person.until("ok3")
    assert saying.bodies[-1]["messages"][-1]["content"] == "/help"


def test_commands(saying: SayingServer, sit: Sit, tmp_path: Path) -> None:
    person = sit("--url", saying.url, "--system", "be brief")
    for typed, shown in [
        ("/help", "/save FILE"), ("/nonsense", "no command /nonsense"), ("/system", "be brief"),
        ("/system be long", "from the next message"), ("/save", "a file is missing"), ("/load /dev/null", "no saved"),
    ]:  # fmt: skip
        person.say(typed)
        person.until(shown)
        person.until(">>> ")
    saying.say(HEAD, event("yes", "stop"), DONE)
    person.say("well?")
    person.until("yes")
    person.until(">>> ")
    person.say(f"/save {tmp_path}/c.json")
    person.until("1 turns are in")
    assert Conversation.load(tmp_path / "c.json") == Conversation("be long", [Turn("well?", "yes")])
    person.say("/reset")
    person.until("1 turn is forgotten")
    person.say("/system -")
    person.until("from the next message")
    person.say(f"/load {tmp_path}/c.json")
    person.until("1 turns from")
    person.until(">>> ")
    saying.say(HEAD, event("more", "stop"), DONE)
    person.say("and?")
    person.until("more")
    said = [message["content"] for message in saying.bodies[-1]["messages"]]
    assert said == ["be long", "well?", "yes", "and?"]


def test_history_comes_back_and_is_private_unless_not_wanted(saying: SayingServer, sit: Sit) -> None:
    file = sit.state / "outlast" / "chat-history"
    person = sit("--url", saying.url, "--no-history")
    person.say("/system secret")
    person.until(">>> ")
    assert not file.exists()
    person = sit("--url", saying.url)
    person.say("/system first")
    person.until(">>> ")
    assert History(file).entries == ["/system first"]
    assert file.stat().st_mode & 0o777 == 0o600
    person = sit("--url", saying.url)
    person.type("\x1b[A")
    person.until("/system first")


@pytest.mark.model
def test_own_server_that_dies_is_told_and_replaced(builtin_model: Path, sit: Sit, tmp_path: Path) -> None:
    person = sit("--model", str(builtin_model), "--seed", "1")
    (server,) = (int(pid) for pid in Path(f"/proc/{person.pid}/task/{person.pid}/children").read_text().split())
    person.say("/kill 5")
    person.say("Tell me a long story about a lighthouse.")
    person.until("killed; another goes on")
    os.kill(server, signal.SIGKILL)
    person.until("the server is gone (it was ended by SIGKILL)")
    person.until(">>> ")
    person.say(f"/save {tmp_path}/c.json")
    person.until("1 turns are in")
    person.say("What is the capital of Italy?")
    person.until("starting another, the conversation goes on")
    person.until("first after", 60)
    person.until(">>> ")
    person.say("/exit")
    assert person.end() == 0


def test_end_by_a_signal_leaves_the_terminal_as_it_was(start_server: StartServer, sit: Sit) -> None:
    server = start_server(options={"step_ms": 20})
    person = sit("--url", server.url)
    person.say("hello")
    wait_for(lambda: gauge(server, "outlast_live_requests") == 1, "the answer runs")
    wait_for(lambda: not person.echoes(), "the keyboard is quiet")
    kept = os.open(Path(f"/proc/{person.pid}/fd/0").readlink(), os.O_RDWR | os.O_NOCTTY)  # else it starts afresh
    os.kill(person.pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(person.pid, 0)[1]) == 128 + signal.SIGTERM
    assert person.echoes()
    os.close(kept)
