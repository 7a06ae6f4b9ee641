"""The chat in a terminal: answers as they come, commands, Ctrl-C, and a kill in the middle of an answer."""

from __future__ import annotations

import re
import select
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from outlast.chat.client import ChatError, End, Notice, Piece
from outlast.chat.conversation import Conversation
from outlast.chat.exchange import Answer, Dropped, Exchange, Takeover
from outlast.chat.keyboard import LineEditor, RunningKeys
from outlast.chat.screen import Screen
from outlast.chat.session import Session, describe
from outlast.core.errors import OutlastError

PROMPT = ">>> "
MORE = "... "
KILL_AT = 20  #: token of the next answer at which `/kill` kills when no number is given
#: How often the screen is looked after while nothing comes.
_TICK_SECONDS = 0.1
#: A takeover is told when it is over; one that takes longer is announced.
_SILENCE_SECONDS = 1.0
_COMMAND = re.compile(r"/([a-z?]+)(?:[ \t]+(\S.*))?", re.DOTALL)

HELP = {
    "/help": "this list",
    "/kill [N]": f"kill the engine at token N ({KILL_AT}) of the next answer; typed during an answer: now",
    "/reset": "forget the conversation; the system message stays",
    "/system [TEXT]": "show the system message, or set it; /system - removes it",
    "/save FILE": "write the conversation to a file",
    "/load FILE": "go on with a saved conversation",
    "/stats": "figures of this chat, and the engines",
    "/exit": "leave, as Ctrl-D",
}
HINTS = (
    "A backslash at the end of a line, or a paste, makes a message of several lines.",
    "Ctrl-C stops an answer and keeps the conversation. //TEXT sends a message that starts with a slash.",
)


class Terminal:
    """Runs until the person leaves. The session is open already."""

    def __init__(self, session: Session, screen: Screen, editor: LineEditor) -> None:
        self._session = session
        self._screen = screen
        self._editor = editor
        self._typed_ahead: deque[str] = deque()
        self._kill_at: int | None = None
        self._leaving = False
        self._commands: dict[str, Callable[[str], None]] = {
            "help": self._help, "?": self._help, "kill": self._kill, "reset": self._reset, "system": self._system,
            "save": self._save, "load": self._load, "stats": self._stats, "exit": self._exit, "quit": self._exit,
        }  # fmt: skip

    def run(self) -> None:
        """Read, answer, repeat."""
        model = self._session.model
        context = f", context {model.context}" if model.context else ""
        self._screen.plain(f"{model.id}{context}. /help lists the commands, Ctrl-D leaves.")
        while not self._leaving:
            text = self._read()
            if text is None:
                return
            if text:
                self._do(text)

    def _read(self) -> str | None:
        """The next message; None when the person leaves."""
        if self._typed_ahead:
            text = self._typed_ahead.popleft()
            self._screen.plain(PROMPT + text)
            return text
        self._screen.fresh_line()
        try:
            text = self._editor.read(self._screen.prompt(PROMPT), self._screen.prompt(MORE))
        except EOFError:
            self._screen.plain("")
            return None
        except KeyboardInterrupt:
            self._screen.plain("")
            self._screen.note("Ctrl-D or /exit leaves.")
            return ""
        if text:
            try:
                self._editor.keep(text)
            except OSError as error:
                self._screen.note(f"the history is not written: {error.strerror}")
        return text

    def _do(self, text: str) -> None:
        if text.startswith("//"):
            self._answer(text[1:])
            return
        found = _COMMAND.fullmatch(text)
        if not text.startswith("/") or (found is None and "\n" in text):
            self._answer(text)
            return
        command = self._commands.get(found[1]) if found is not None else None
        if found is None or command is None:
            self._screen.note(f"there is no command {text.split()[0]}; /help lists them, //TEXT sends a slash")
            return
        try:
            command((found[2] or "").strip())
        except OutlastError as error:
            self._screen.note(str(error))

    # --- answers

    def _answer(self, text: str) -> None:
        if not self._server_there():
            return
        exchange = self._session.ask(text)
        try:
            with RunningKeys() as keys:
                _Follower(self._session, self._screen, exchange, keys, self._kill_at, self._typed_ahead).follow()
            self._leaving = keys.ended
        finally:
            exchange.stop()
            self._session.settle(exchange)
        self._kill_at = None
        self._report(exchange.answer)

    def _server_there(self) -> bool:
        """Start another server if ours has ended."""
        how = self._session.lost()
        if how is None:
            return True
        self._screen.note(f"the server is gone ({how}); starting another, the conversation goes on")
        try:
            with self._screen.waiting("starting the server"):
                self._session.restart()
        except OutlastError as error:
            self._screen.note(f"{error}. The conversation is kept: /save FILE")
            return False
        return True

    def _report(self, answer: Answer) -> None:
        notes = []
        if answer.tokens:
            notes.append(describe(answer))
        if answer.finish == "length":
            notes.append("cut off: the limit of --max-tokens or of the context is reached")
        if answer.stopped:
            notes.append("stopped" if answer.text else "stopped before it began; the message is not kept")
        if notes:
            self._screen.note("; ".join(notes))
        if answer.error is not None:
            self._fail(answer, answer.error)

    def _fail(self, answer: Answer, error: ChatError) -> None:
        self._screen.note(str(error))
        kept = (
            "what came of the answer is kept"
            if answer.text
            else "the message was not answered (arrow up brings it back)"
        )
        how = self._session.lost(error)
        if how is not None:
            self._screen.note(
                f"the server is gone ({how}); the conversation is kept, and {kept}. "
                "/save FILE writes it; the next message starts another server"
            )
        elif error.code == "unreachable":
            self._screen.note(f"the conversation is kept, and {kept}. /save FILE writes it")
        else:
            self._screen.note(kept)

    # --- commands

    def _help(self, _: str) -> None:
        width = max(map(len, HELP))
        for name, what in HELP.items():
            self._screen.plain(f"  {name:<{width}}  {what}")
        for hint in HINTS:
            self._screen.plain(hint)

    def _kill(self, text: str) -> None:
        if text and not (text.isdecimal() and int(text) > 0):
            self._screen.note("/kill takes the number of a token, 1 or more")
            return
        self._kill_at = int(text or KILL_AT)
        self._screen.note(f"the engine will be killed (SIGKILL) at token {self._kill_at} of the next answer")

    def _reset(self, _: str) -> None:
        count = len(self._session.conversation.turns)
        self._session.conversation.turns.clear()
        self._screen.note(f"{count} {'turn is' if count == 1 else 'turns are'} forgotten")

    def _system(self, text: str) -> None:
        conversation = self._session.conversation
        if text:
            conversation.system = None if text == "-" else text
            self._screen.note("it holds from the next message on")
        else:
            self._screen.plain(conversation.system or "there is no system message")

    def _save(self, text: str) -> None:
        path = _path(text)
        self._session.conversation.save(path, self._session.model.id)
        self._screen.note(f"{len(self._session.conversation.turns)} turns are in {path}")

    def _load(self, text: str) -> None:
        path = _path(text)
        loaded = Conversation.load(path)
        self._session.conversation.system = loaded.system
        self._session.conversation.turns[:] = loaded.turns
        for turn in loaded.turns[-1:]:
            self._screen.plain(f"{PROMPT}{turn.said}\n{turn.answered}")
        self._screen.note(f"{len(loaded.turns)} turns from {path}")

    def _stats(self, _: str) -> None:
        rows = self._session.stats()
        width = max(map(len, rows))
        for name, value in rows.items():
            self._screen.plain(f"  {name:<{width}}  {value}")

    def _exit(self, _: str) -> None:
        self._leaving = True


def _path(text: str) -> Path:
    if not text:
        raise OutlastError("a file is missing", do="For example: /save chat.json")
    return Path(text).expanduser()


class _Follower:
    """One answer on the screen."""

    def __init__(
        self,
        session: Session,
        screen: Screen,
        exchange: Exchange,
        keys: RunningKeys,
        kill_at: int | None,
        typed_ahead: deque[str],
    ) -> None:
        self._session = session
        self._screen = screen
        self._exchange = exchange
        self._keys = keys
        self._kill_at = kill_at
        self._typed_ahead = typed_ahead
        self._started = time.monotonic()
        self._waiting_shown = False
        self._notice: tuple[str, float] | None = None  #: said by the server, not shown yet; and when
        self._killed = ""  #: what was killed, until another engine goes on

    def follow(self) -> None:
        """Until it has ended or was stopped."""
        exchange, keys = self._exchange, self._keys
        while not exchange.done:
            ready, _, _ = select.select([exchange.fileno(), *keys.descriptors()], [], [], _TICK_SECONDS)
            for line in keys.lines(ready):
                self._typed(line)
            if keys.interrupted or keys.ended:
                exchange.stop()
                break
            for update in exchange.advance():
                self._show(update)
                self._kill_when_due()
            self._look_after()
        self._clear_waiting()
        if self._killed:
            self._screen.note(f"{self._killed} was killed; the answer was over before another engine was needed")
        elif self._kill_at is not None:
            self._screen.note(f"nothing was killed: the answer was over before token {self._kill_at} was seen")

    def _typed(self, line: str) -> None:
        if line.startswith("/kill"):
            self._kill()
        elif line:
            self._typed_ahead.append(line)

    def _show(self, update: Piece | Notice | Takeover | Dropped | End) -> None:
        if not isinstance(update, Notice):
            self._clear_waiting()
            self._notice = None
        match update:
            case Piece():
                self._screen.write(update.text)
            case Notice(text):
                self._notice = (text, time.monotonic())
            case Takeover():
                self._tell_takeover(update)
            case Dropped(turns):
                what = "the oldest turn is" if turns == 1 else f"the {turns} oldest turns are"
                self._screen.note(f"the context is full: {what} forgotten")

    def _tell_takeover(self, takeover: Takeover) -> None:
        milliseconds = f"{takeover.milliseconds:.0f} ms"
        if takeover.killed:
            self._screen.inline(f"{self._killed} killed; another goes on, next token after {milliseconds}")
            self._killed = ""
        else:
            self._screen.inline(f"the engine died; another goes on, next token after {milliseconds}")

    def _kill_when_due(self) -> None:
        if self._kill_at is not None and self._exchange.answer.tokens >= self._kill_at and not self._exchange.done:
            self._kill()

    def _kill(self) -> None:
        self._kill_at = None
        if self._killed:
            return
        self._clear_waiting()
        try:
            victim = self._session.kill_engine()
        except OutlastError as error:
            self._screen.note(str(error))
            return
        self._exchange.killed(victim.engine)
        self._killed = f"engine {victim.pid}" + ("" if victim.spare else ", the only one that was loaded,")

    def _look_after(self) -> None:
        """What to show while nothing comes."""
        now = time.monotonic()
        if self._exchange.done:
            return
        if not self._exchange.answer.tokens:
            if now - self._started > 3 * _TICK_SECONDS:
                self._screen.show_waiting(f"... {now - self._started:.1f} s")
                self._waiting_shown = True
        elif self._notice is not None and now - self._notice[1] > _SILENCE_SECONDS:
            self._screen.inline(self._notice[0])
            self._notice = None

    def _clear_waiting(self) -> None:
        if self._waiting_shown:
            self._screen.clear_waiting()
            self._waiting_shown = False
