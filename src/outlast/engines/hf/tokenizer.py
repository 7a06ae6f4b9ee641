"""The tokenizer and chat template of a Hugging Face folder, without transformers: tokenizer.json and its neighbours."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from outlast.engines.hf.folder import read_config
from outlast.engines.native.gguf import ModelFileError, UnsupportedModel
from outlast.engines.native.tokenizer import TextTokenizer, byte_alphabet

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BLANK = "▁"  # stands for a space in the pieces of SentencePiece


class FolderTokenizer(TextTokenizer):
    """Tokenizer of a model folder. `vocab_size` is the model's; ids that the tokenizer lacks stand for no bytes.

    Raises `ModelFileError` without a tokenizer.json, `UnsupportedModel` for a decoder whose bytes are not known.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
            fast = FastTokenizer.from_str(text)
            described = json.loads(text)
        except OSError as error:
            raise ModelFileError(f"cannot read {path}", why=error.strerror or str(error)) from error
        except Exception as error:
            raise ModelFileError(f"{path} is not a tokenizer", why=str(error)) from error
        model = read_config(folder)
        settings = _optional(folder / "tokenizer_config.json")
        added = {int(token["id"]): token for token in described.get("added_tokens") or []}
        special = {i: str(token["content"]) for i, token in added.items() if token.get("special")}
        ids: dict[str, int] = fast.get_vocab(with_added_tokens=True)
        pieces = [b""] * max(int(model["vocab_size"]), 1 + max(ids.values(), default=0))
        bytes_of = _bytes_reader(path, described.get("decoder"))
        for name, token in ids.items():
            pieces[token] = str(added[token]["content"]).encode() if token in added else bytes_of(name)
        ends = _ends(folder, model)
        super().__init__(
            fast,
            pieces,
            special,
            set(special),
            bos_id=_id(settings.get("bos_token"), ids),
            eos_id=_id(settings.get("eos_token"), ids),
            ends=ends,
            template=_template(folder, settings),
        )
        self.vocab_size = int(model["vocab_size"])


def _bytes_reader(path: Path, decoder: Any) -> Any:
    """How the name of an ordinary token becomes its bytes, from the kind of the decoder."""
    kinds = _kinds(decoder)
    if "ByteLevel" in kinds:
        alphabet = byte_alphabet()

        def byte_level(name: str) -> bytes:
            try:
                return bytes(alphabet[character] for character in name)
            except KeyError:
                return name.encode()

        return byte_level
    if kinds & {"ByteFallback", "Metaspace", "Replace"}:

        def sentence_piece(name: str) -> bytes:
            byte = _BYTE_PIECE.fullmatch(name)
            return bytes([int(byte.group(1), 16)]) if byte else name.replace(_BLANK, " ").encode()

        return sentence_piece
    raise UnsupportedModel(
        f"{path} has the decoder {', '.join(sorted(kinds)) or 'none'}",
        why="the bytes of its tokens are not known",
        do="Use a model with a byte-level or SentencePiece tokenizer.",
    )


def _kinds(decoder: Any) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    inner = decoder.get("decoders") or []
    return {str(decoder.get("type")), *(kind for part in inner for kind in _kinds(part))} - {"Sequence"}


def _ends(folder: Path, model: Mapping[str, Any]) -> list[int | None]:
    """Ids that end an answer, as the model's own settings name them."""
    out: list[int | None] = []
    for settings in (_optional(folder / "generation_config.json"), model):
        value = settings.get("eos_token_id")
        out += [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)]
    return out


def _id(token: Any, ids: Mapping[str, int]) -> int | None:
    name = token.get("content") if isinstance(token, dict) else token
    return ids.get(name) if isinstance(name, str) else None


def _template(folder: Path, settings: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    return template if isinstance(template, str) else ""


def _optional(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"cannot read {path}", why=str(error)) from error
    return value if isinstance(value, dict) else {}
