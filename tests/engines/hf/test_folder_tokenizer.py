"""The tokenizer of a folder: the ids and texts of the same vocabulary in a GGUF, byte for byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.engines.hf.tokenizer import FolderTokenizer
from outlast.engines.native.gguf import Gguf, ModelFileError, UnsupportedModel
from outlast.engines.native.tokenizer import Tokenizer

SAID = [{"role": "user", "content": "all of <|im_end|> 12"}]


@pytest.fixture(scope="module")
def tokenizers(tiny_folder: Path) -> tuple[FolderTokenizer, Tokenizer]:
    with Gguf(tiny_folder.parent / f"{tiny_folder.name}.gguf") as gguf:
        return FolderTokenizer(tiny_folder), Tokenizer(gguf)


@given(text=st.text(max_size=40))
def test_text_has_the_same_ids_and_comes_back(tokenizers: tuple[FolderTokenizer, Tokenizer], text: str) -> None:
    ours, theirs = tokenizers
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids)
    assert b"".join(ours.token_bytes(i) for i in ids) == text.encode(errors="replace")


def test_chats_use_the_folders_template_and_users_cannot_end_their_turn(
    tokenizers: tuple[FolderTokenizer, Tokenizer],
) -> None:
    ours, theirs = tokenizers
    assert ours.encode_chat(SAID) == theirs.encode_chat(SAID)
    assert ours.encode_chat(SAID).count(2) == 1


def test_answers_end_where_the_model_says(tokenizers: tuple[FolderTokenizer, Tokenizer]) -> None:
    assert tokenizers[0].stop_tokens == tokenizers[1].stop_tokens


def variant(folder: Path, target: Path, file: str, **fields: object) -> Path:
    shutil.copytree(folder, target)
    content = json.loads((target / file).read_text())
    (target / file).write_text(json.dumps({**content, **fields}))
    return target


def test_pieces_of_sentencepiece_are_bytes_too(tiny_folder: Path, tmp_path: Path) -> None:
    decoder = {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    ]}  # fmt: skip
    model = {"type": "BPE", "vocab": {"<unk>": 0, "▁the": 1, "<0x0A>": 2, "é": 3}, "merges": [], "byte_fallback": True}
    folder = variant(
        tiny_folder, tmp_path / "sp", "tokenizer.json", decoder=decoder, model=model, added_tokens=[],
        pre_tokenizer=None,
    )  # fmt: skip
    tokenizer = FolderTokenizer(folder)
    assert [tokenizer.token_bytes(i) for i in (1, 2, 3)] == [b" the", b"\n", "é".encode()]
    assert tokenizer.token_bytes(200) == b"", "an id of the model that the tokenizer lacks"
    assert tokenizer.vocab_size == json.loads((folder / "config.json").read_text())["vocab_size"]


def test_a_decoder_that_is_not_known_is_refused_by_name(tiny_folder: Path, tmp_path: Path) -> None:
    folder = variant(
        tiny_folder, tmp_path / "x", "tokenizer.json", decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}
    )
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        FolderTokenizer(folder)


def test_a_folder_without_a_tokenizer_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    shutil.copy(tiny_folder / "config.json", folder)
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        FolderTokenizer(folder)


def test_several_ends_and_a_template_file_are_read(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "more"
    shutil.copytree(tiny_folder, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 77]}))
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    tokenizer = FolderTokenizer(folder)
    assert 77 in tokenizer.stop_tokens
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "hi!"
