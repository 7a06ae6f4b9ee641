"""Text to tokens and back, from the tables in the model file itself.

Encoding is the `tokenizers` library's BPE, set up from the file's vocabulary and merges. Decoding is ours: a token is a
run of bytes, so a stream of tokens is a stream of UTF-8 bytes that may break inside a character.
"""

from __future__ import annotations

import codecs
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Bpe

from outlast.core.errors import UsageError
from outlast.engines.native.gguf import Gguf, ModelFileError, UnsupportedModel

_CONTROL, _USER_DEFINED = 3, 4  #: values of tokenizer.ggml.token_type that are no ordinary pieces of text
_MAX_CHAT = 4 << 20  #: characters of a rendered conversation
#: names of control tokens that end an answer, beside the file's own end-of-sequence and end-of-turn ids
_END_NAMES = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "</s>")

# Words, numbers, punctuation, line ends, runs of blanks. Llama 3 takes up to three digits at once, Qwen 2 one.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_first() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _words(digits: str) -> Any:
    split = pre_tokenizers.Split(Regex(_WORDS % digits), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _llama() -> Any:
    return _words("{1,3}")


def _qwen2() -> Any:
    return _words("")


@dataclass(frozen=True, slots=True)
class _Splitting:
    """How text is cut into the words within which merges happen."""

    make: Callable[[], Any]
    whole_words: bool = False  #: a word that is a token itself is taken before any merge
    normalized: bool = False  #: text is brought into Unicode's form NFC first


#: tokenizer.ggml.pre -> what it means
_SPLITTINGS = {
    "smollm": _Splitting(_digits_first),
    "gpt-2": _Splitting(_byte_level),
    "gpt2": _Splitting(_byte_level),
    "llama-bpe": _Splitting(_llama, whole_words=True),
    "llama3": _Splitting(_llama, whole_words=True),
    "qwen2": _Splitting(_qwen2, normalized=True),
}


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the other bytes for U+0100 and up."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


class StreamingDetokenizer:
    """Turns the tokens of one sequence into text, piece by piece; joined they are `Tokenizer.decode` of them all."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that is certain after `token`; an unfinished character is kept back."""
        return self._decoder.decode(self._pieces[token])

    def flush(self) -> str:
        """The rest, with U+FFFD for an unfinished character. Called once, at the end."""
        return self._decoder.decode(b"", final=True)


class TextTokenizer:
    """A tokenizer in parts that are known already, with a chat template. Safe to use from several threads."""

    def __init__(
        self,
        bpe: Any,
        pieces: Sequence[bytes],
        special: Mapping[int, str],
        hidden: Set[int],
        *,
        bos_id: int | None,
        eos_id: int | None,
        ends: Sequence[int | None],
        template: str,
    ) -> None:
        """`bpe`: of the `tokenizers` library; `pieces`: the bytes of each id; `special`: names of ids that are no text;
        `hidden`: ids that show nothing when they are generated; `ends`: ids that end an answer, beside `eos_id` and the
        special ones that are known for it.
        """
        self.vocab_size = len(pieces)
        self._bpe = bpe
        self._lock = threading.Lock()
        self._special = re.compile("|".join(map(re.escape, special.values()))) if special else None
        self._bytes = list(pieces)
        self._text = [b"" if i in hidden else piece for i, piece in enumerate(pieces)]
        self.bos_id = bos_id
        self.eos_id = eos_id
        all_ends = [eos_id, *ends, *(i for i, name in special.items() if name in _END_NAMES)]
        #: ids that end an answer
        self.stop_tokens: tuple[int, ...] = tuple(sorted({i for i in all_ends if i is not None}))
        self._bos = "" if bos_id is None else special.get(bos_id) or pieces[bos_id].decode(errors="replace")
        self._eos = "" if eos_id is None else special.get(eos_id) or pieces[eos_id].decode(errors="replace")
        self._template_source = template
        self._template = _compile(template) if template else None

    # ---- text to tokens -----------------------------------------------------------------------------------------

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Text to ids; nothing is added. Names of special tokens stay text unless `parse_special`."""
        with self._lock:  # the switch is a property of the library's object
            self._bpe.encode_special_tokens = not parse_special
            ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return ids

    def render_chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The conversation as the model's template writes it. Raises `UsageError` with the template's own complaint."""
        if self._template is None:
            raise UsageError("The model has no chat template", do="Use the completions endpoint")
        pieces, length = [], 0
        try:
            for piece in self._template.generate(
                messages=messages, add_generation_prompt=add_generation_prompt, bos_token=self._bos, eos_token=self._eos
            ):
                length += len(piece)
                if length > _MAX_CHAT:
                    raise UsageError(f"The conversation is longer than {_MAX_CHAT} characters")
                pieces.append(piece)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise UsageError("The chat template refuses these messages", why=str(error)) from error
        return "".join(pieces)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Messages through the chat template, up to where the assistant speaks next.

        Only the template's own special tokens count: a message that contains such a name holds it as text, so that a
        user cannot end their turn and speak as somebody else.
        """
        if self._special is None or not any(self._special.search(m.get("content") or "") for m in messages):
            return self.encode(self.render_chat(messages), parse_special=True)
        mark = f"\ue000{secrets.token_hex(16)}\ue000"
        fenced = [
            dict(m) | {"content": self._special.sub(lambda found: mark + found.group() + mark, m.get("content") or "")}
            for m in messages
        ]
        ids: list[int] = []
        for i, part in enumerate(self.render_chat(fenced).split(mark)):
            ids += self.encode(part, parse_special=i % 2 == 0)
        return ids

    # ---- tokens to text -----------------------------------------------------------------------------------------

    def decode(self, tokens: Sequence[int]) -> str:
        """Ids to text, without control tokens; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self._text[token] for token in tokens).decode("utf-8", errors="replace")

    def detokenizer(self) -> StreamingDetokenizer:
        """A new one, for one sequence."""
        return StreamingDetokenizer(self._text)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for; for a special token the bytes of its name."""
        return self._bytes[token]


class Tokenizer(TextTokenizer):
    """The tokenizer of a model file.

    Raises `UnsupportedModel`, by name, for a tokenizer model or a pre-tokenizer that is not known: a near miss would
    give other tokens without any error.
    """

    def __init__(self, gguf: Gguf) -> None:
        model = gguf.text("tokenizer.ggml.model")
        if model != "gpt2":
            raise UnsupportedModel(f"{gguf.path} has a {model!r} tokenizer", why="only byte-level BPE (gpt2) is known")
        pre = gguf.text("tokenizer.ggml.pre", "gpt-2")
        if pre not in _SPLITTINGS:
            known = ", ".join(_SPLITTINGS)
            raise UnsupportedModel(f"{gguf.path} has the pre-tokenizer {pre!r}", why=f"known are {known}")
        names = gguf.strings("tokenizer.ggml.tokens")
        kinds = gguf.integers("tokenizer.ggml.token_type")
        if len(kinds) != len(names):
            raise ModelFileError(f"{gguf.path}: {len(names)} tokens, but {len(kinds)} token types")
        special = {i: names[i] for i, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED)}
        alphabet = byte_alphabet()

        def token(name: str) -> int | None:
            found = gguf.integer(f"tokenizer.ggml.{name}_token_id", -1)
            return found if 0 <= found < len(names) else None

        super().__init__(
            _build(gguf, names, special, pre),
            [_bytes_of(name, alphabet, i in special) for i, name in enumerate(names)],
            special,
            {i for i, kind in enumerate(kinds) if kind == _CONTROL},
            bos_id=token("bos"),
            eos_id=token("eos"),
            ends=[token("eot")],
            template=gguf.text("tokenizer.chat_template", ""),
        )


def _bytes_of(name: str, alphabet: Mapping[str, int], special: bool) -> bytes:
    if special:
        return name.encode()
    try:
        return bytes(alphabet[character] for character in name)
    except KeyError:  # a token outside the byte alphabet (padding of the vocabulary): its name is all there is
        return name.encode()


def _build(gguf: Gguf, names: list[str], special: Mapping[int, str], pre: str) -> Any:
    vocabulary = {name: i for i, name in enumerate(names)}
    if len(vocabulary) != len(names):
        raise ModelFileError(f"{gguf.path}: its vocabulary names {len(names) - len(vocabulary)} tokens twice")
    merges = []
    for merge in gguf.strings("tokenizer.ggml.merges"):
        left, blank, right = merge.partition(" ")
        if not blank or left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ModelFileError(f"{gguf.path}: the merge {merge!r} does not fit the vocabulary")
        merges.append((left, right))
    splitting = _SPLITTINGS[pre]
    bpe = Bpe(models.BPE(vocabulary, merges, ignore_merges=splitting.whole_words))
    if splitting.normalized:
        bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = splitting.make()
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special.values()])
    return bpe


def _compile(source: str) -> Any:
    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = time.strftime
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ModelFileError("The model's chat template cannot be read", why=str(error)) from error
