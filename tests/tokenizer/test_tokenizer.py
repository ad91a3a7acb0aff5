"""The tokenizer: ids, text, bytes of single tokens, and what a broken file says."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from hadron.errors import RequestError, TokenizerError
from hadron.tokenizer.tokenizer import Tokenizer
from tests.conftest import DATA, RANDOM

FOLDER = DATA / "tokenizer"
TEXTS = [
    "",
    "How long is the river?",
    "你好,世界!\n\n  \tdef f(x):\n    return x",
    "😀 é 0x1F 3.14 <|user|>hi<|assistant|><think>hm</think>",
    "A\u200d\u0301\x00\x7f\x80\xa0",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(FOLDER)


@pytest.mark.parametrize("text", TEXTS)
def test_agrees_with_transformers(tokenizer: Tokenizer, text: str) -> None:
    oracle = PreTrainedTokenizerFast(tokenizer_file=str(FOLDER / "tokenizer.json"))
    ids = tokenizer.encode(text)
    assert ids == oracle(text)["input_ids"]
    assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_markup_has_the_ids_of_the_configuration(tokenizer: Tokenizer) -> None:
    config = json.loads((RANDOM / "config.json").read_text())
    placeholders = {
        "<|image|>": "image_token_id",
        "<|video|>": "video_token_id",
        "<|begin_of_image|>": "image_start_token_id",
        "<|end_of_image|>": "image_end_token_id",
        "<|begin_of_video|>": "video_start_token_id",
        "<|end_of_video|>": "video_end_token_id",
    }
    for token, key in placeholders.items():
        assert tokenizer.encode(token) == [tokenizer.token_id(token)] == [config[key]]
    assert tokenizer.vocabulary_size <= config["text_config"]["vocab_size"]
    assert tokenizer.token_id("<|nothing|>") is None


def test_special_ids_are_left_out_of_text_and_reasoning_markup_is_not(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("[gMASK]<sop><|user|>a<think>b</think><|endoftext|>")
    assert tokenizer.decode(ids) == "a<think>b</think>"
    assert tokenizer.token_id("<|user|>") in tokenizer.special_ids
    assert tokenizer.token_id("<think>") not in tokenizer.special_ids


def test_bytes_of_single_tokens_join_to_the_text(tokenizer: Tokenizer) -> None:
    text = "".join(TEXTS)
    assert b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode(text)) == text.encode()


def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    assert {tokenizer.token_bytes(i) for i in range(506)} >= {bytes([b]) for b in range(256)}


def test_an_id_without_a_token_gives_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(511) == b""
    assert tokenizer.decode([511]) == tokenizer.token_text(511) == ""


def test_token_text_shows_bytes_that_are_not_a_character(tokenizer: Tokenizer) -> None:
    first, *_ = tokenizer.encode("\U0001f9ff")
    assert tokenizer.token_text(first).startswith("\\xf0")
    assert tokenizer.token_text(tokenizer.token_id("<|user|>") or 0) == "<|user|>"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.where == str(tmp_path / "tokenizer.json")
    assert "no such file" in caught.value.found
    assert "token ids" in caught.value.hint


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {"type": "BPE"}}', '{"model": null}'])
def test_a_broken_file_is_a_typed_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match="the tokenizer cannot be read") as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.where.endswith("tokenizer.json")


def test_a_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="not valid Unicode") as caught:
        tokenizer.encode("ab\ud800")
    assert caught.value.where == "prompt, character 2"


def test_the_file_builds_again_to_the_same_bytes(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("build_tokenizer", FOLDER / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    built = module.build((FOLDER / "corpus.txt").read_text(encoding="utf-8"))
    assert built == (FOLDER / "tokenizer.json").read_text(encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (FOLDER / name).read_bytes() == (RANDOM / name).read_bytes(), name


def test_a_copied_folder_is_enough(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "tokenizer.json", tmp_path)
    assert Tokenizer.load(tmp_path).encode("a") == Tokenizer.load(FOLDER).encode("a")
